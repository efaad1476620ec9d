"""What processes that act for the driver have in common: simulators, a copy of the policy, and requests."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.deployment import Deployment
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import ChannelClosed, ChannelTimeout
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.hybrid_engines.weight_sync.buckets import layout_of
from embodrl.scheduler.worker import Worker, dispatch
from embodrl.types import Decoding
from embodrl.workers.collector import Share, Snapshot, share_config
from embodrl.workers.env import held_out_pool
from embodrl.workers.evaluator import EvalProgress, run_decodings
from embodrl.workers.parts import make_share
from embodrl.workers.rollout_backend import evaluator_class
from embodrl.workers.weights import ReceiverThread, Route, make_receiver


def channel_names(rank: int) -> dict[str, str]:
    """Return the names of a process's channels: signals, weights, answers."""
    return {name: f"{name}_{rank}" for name in ("stop", "weights", "answers")}


class Answer(TypedDict):
    """Answer of a rollout process to a long request; see RolloutProcess."""

    faults: dict[str, int]
    carried: NotRequired[Snapshot]


class Evaluated(Answer):
    """Answer to a request for an evaluation: the fields of ``EpisodeResults``, by decoding."""

    played: dict[Decoding, dict[str, Any]]


class SimulatingProcess(Worker):
    """Drives a share of the simulators for the driver, which calls the methods; ``call`` numbers its requests.

    Attributes:
        config: configuration of the share.
        pool: started simulators of the share.
    """

    config: Config
    pool: EnvPool

    def __init__(self, config: Config, deployment: Deployment, log_dir: str | None = None) -> None:
        self.share = Share(self.rank, self.world_size)
        self.log_dir = None if log_dir is None else Path(log_dir) / f"rollout_{self.rank}"
        self.places = deployment.of("env")[self.share.rows(config.env.num_processes)]
        self.channels = {name: self.channel(full) for name, full in channel_names(self.rank).items()}
        self._call = -1
        self._stopped = False

    @dispatch()
    def about(self) -> dict[str, object]:
        """Return the process id, the tasks, the control rate, and the numbers of environments and state dimensions."""
        spec = self.pool.spec
        sizes = {"num_envs": spec.num_envs, "state_dim": spec.state_dim}
        return {"pid": os.getpid(), "tasks": list(spec.tasks), "control_hz": spec.control_hz, **sizes}

    def close(self) -> None:
        """Stop the simulators."""
        self.pool.close()

    def begin(self, call: int) -> None:
        """Begin an interruptible request."""
        self._call = call
        self._stopped = False

    def faults(self) -> dict[str, object]:
        """Return the simulators' faults, as a field of an answer."""
        return {"faults": dict(vars(self.pool.faults))}

    def should_stop(self) -> bool:
        """Whether the driver has interrupted the request."""
        try:
            # Signals for earlier requests may still be in the channel; they are discarded.
            while not self._stopped:
                self._stopped = self.channels["stop"].get(0.0) == self._call
        except ChannelTimeout:
            pass
        except ChannelClosed:
            self._stopped = True
        return self._stopped


class PolicyProcess(SimulatingProcess):
    """Drives simulators and a copy of the driver's policy, whose weights it receives.

    Attributes:
        engine: engine of the copy.
    """

    engine: RolloutEngine
    _receiver: ReceiverThread | None = None

    @dispatch()
    def join(self, options: Route) -> None:
        """Receive weights from a new generation of the channel (``WeightChannel.options``)."""
        if self._receiver is not None:
            # Two receivers would read from the same channel.
            self._receiver.close()
        receiver = make_receiver(self, options, self.channels["weights"], self.rank, layout_of(self.engine.policy))
        self._receiver = ReceiverThread(receiver, self.channels["answers"], options["generation"])

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Accept weights (a ``WeightTarget``); called by the receiver's thread."""
        self.engine.update_weights(weights, version)

    def close(self) -> None:
        """Stop receiving, and the simulators."""
        if self._receiver is not None:
            self._receiver.close()
        super().close()


class ActingProcess(PolicyProcess):
    """Acts and evaluates for the driver; ``training`` is False for a process that only evaluates."""

    def __init__(
        self, config: Config, deployment: Deployment, log_dir: str | None = None, training: bool = True
    ) -> None:
        super().__init__(config, deployment, log_dir)
        share = self.share
        self.pool, self.engine = make_share(config, deployment, share, self.log_dir, self.places, training)
        self.config = share_config(config, share)
        make_own = partial(held_out_pool, log_dir=self.log_dir, places=self.places)
        self.evaluator = evaluator_class(config)(self.config, self.pool, self.engine, self.should_stop, make_own)

    @dispatch()
    def evaluate(
        self, call: int, episodes: NDArray[np.int64], video_dir: str | None, every_decoding: bool
    ) -> dict[str, object] | None:
        """Return the results of episodes ``int64[n]``; None if interrupted. See Evaluator."""
        decodings = run_decodings(self.evaluator.config, self.engine, every_decoding)
        return self.evaluated(call, episodes, video_dir, decodings)

    def evaluated(
        self,
        call: int,
        episodes: NDArray[np.int64],
        video_dir: str | None,
        decodings: tuple[Decoding, ...] | None,
        progress: EvalProgress = None,
    ) -> dict[str, object] | None:
        """Return the answer to a request for an evaluation; None if interrupted."""
        self.begin(call)
        where = None if video_dir is None else Path(video_dir)
        try:
            played = self.evaluator.run_episodes(episodes, where, progress, decodings)
        except InterruptedError:
            return None
        return {"played": {decoding: vars(results) for decoding, results in played.items()}, **self.faults()}
