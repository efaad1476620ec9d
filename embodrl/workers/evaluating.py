"""Evaluations in processes: the parts of `embodrl eval` where rollouts are placed on several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from embodrl.config.schema import Config
from embodrl.deployment import Deployment
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import ChannelTimeout, EnvTimeout, EnvWorkerDied
from embodrl.models.base import VLAPolicy
from embodrl.scheduler.channel import Channel
from embodrl.scheduler.worker import dispatch
from embodrl.types import Decoding
from embodrl.workers.acting_process import ActingProcess
from embodrl.workers.env import check_environments, make_pool
from embodrl.workers.evaluator import EvalProgress, EvalResult, evaluation_result
from embodrl.workers.remote_backend import StartedProcesses
from embodrl.workers.rollout_backend import evaluator_class

# Numbers of finished episodes in flight; of more, some are dropped.
_PROGRESS_PLACES = 4


def described(pool: EnvPool) -> dict[str, object]:
    """Return the versions and driver that a simulator process reports; empty if it has just died."""
    with suppress(EnvWorkerDied, EnvTimeout):
        answer = pool.call_one(0, "describe")
        if isinstance(answer, dict):
            return cast(dict[str, object], answer)
    return {}


class EvaluatingProcess(ActingProcess):
    """Evaluates for the driver with a share of the environments, perturbed on request."""

    def __init__(self, config: Config, deployment: Deployment, log_dir: str | None = None) -> None:
        super().__init__(config, deployment, log_dir, training=False)
        self._axis: str | None = None
        self._progress = self.channel(f"progress_{self.rank}")

    @dispatch()
    def measure(
        self,
        call: int,
        episodes: NDArray[np.int64],
        video_dir: str | None,
        axis: str | None,
        decodings: tuple[Decoding, ...] | None,
    ) -> dict[str, object] | None:
        """Return the results of episodes ``int64[n]``, perturbed along an axis; None if interrupted. See Evaluator.

        ``decodings`` None: as ``env.eval.decoding`` says.
        """
        if axis != self._axis:
            self._perturb(axis)
        return self.evaluated(call, episodes, video_dir, decodings, self._show)

    def _perturb(self, axis: str | None) -> None:
        faults = self.pool.faults
        self.pool.close()
        total = self.config.env.train.total_num_envs
        self.pool = make_pool(self.config, total, self.log_dir, places=self.places, axis=axis)
        self.pool.recovery.faults = faults  # reported to the driver as totals
        self.pool.start()
        check_environments(self.config, self.pool, training=False)
        self.evaluator = evaluator_class(self.config)(self.config, self.pool, self.engine, self.should_stop)
        self._axis = axis

    def _show(self, done: int, text: str) -> None:
        with suppress(ChannelTimeout):
            self._progress.put(done, 0.0)

    @dispatch()
    def decodings(self) -> list[Decoding]:
        """Return the decodings of ``env.eval.decoding``."""
        return list(self.evaluator.decodings)

    @dispatch()
    def describe(self) -> dict[str, object]:
        """Return what the simulators report of themselves."""
        return described(self.pool)


class RemoteEvaluator:
    """Evaluates in the processes of ``rollout``, each with its simulators and a copy of the driver's policy.

    Process r of R plays the r-th of R consecutive ranges of episodes: the results equal those of one process.

    Args:
        config: configuration of the evaluation; ``deployment`` its placement.
        policy: policy to evaluate; not used otherwise.
        directory: new directory for the processes' output.
        closing: stops what was started.

    Raises:
        EnvError: a simulator could not be started.
        WorkerError: a process could not be started.
        EmbodrlError: the launcher lacks a requirement.
    """

    def __init__(
        self, config: Config, deployment: Deployment, policy: VLAPolicy, directory: Path, closing: ExitStack
    ) -> None:
        env = config.env
        # The processes' pools have the size of the training environments, and nothing trains.
        train = env.train.model_copy(update={"total_num_envs": env.eval.total_num_envs})
        config = config.model_copy(update={"env": env.model_copy(update={"train": train})})
        self.config = config
        reports = ("progress", _PROGRESS_PLACES)
        started = StartedProcesses.start(config, deployment, EvaluatingProcess, directory / "logs", reports, closing)
        self._shown = started.reports
        self.processes = started.with_policy(policy, directory / "weight_sync", closing)

    def num_plays(self, decodings: tuple[Decoding, ...] | None = None) -> int:
        """Return the number of episodes, each counted once per decoding; None for those of ``env.eval.decoding``."""
        names = decodings or self.processes.call_all("decodings", ranks=[0])[0]
        return self.config.env.eval.num_episodes * len(names)

    def run(
        self,
        video_dir: Path | None = None,
        progress: EvalProgress = None,
        axis: str | None = None,
        decodings: tuple[Decoding, ...] | None = None,
    ) -> EvalResult:
        """Run all episodes, perturbed along an axis; see ``Evaluator.run``."""
        shown = _Shown(self._shown, progress)
        played = self.processes.play_shares("measure", video_dir, axis, decodings, should_stop=shown.look)
        return evaluation_result(self.config, played)

    def describe(self) -> dict[str, object]:
        """Return what the simulators report of themselves."""
        return self.processes.call_all("describe", ranks=[0])[0]


class _Shown:
    """Adds up the finished episodes that the processes report."""

    def __init__(self, channels: Sequence[Channel], progress: Callable[[int, str], None] | None) -> None:
        self._channels = channels
        self._progress = progress
        self._done = [0] * len(channels)

    def look(self) -> bool:
        """Show what was reported since; False, since nothing stops here."""
        before = sum(self._done)
        for rank, channel in enumerate(self._channels):
            with suppress(ChannelTimeout):
                while True:
                    self._done[rank] = int(cast(int, channel.get(0.0)))
        if self._progress is not None and sum(self._done) != before:
            self._progress(sum(self._done), f"{len(self._done)} processes")
        return False
