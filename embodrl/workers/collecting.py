"""Collections in processes: the parts of `embodrl collect` where rollouts are placed on several processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from embodrl.config.schema import Config
from embodrl.data.demos import DemoEpisode, Outcomes
from embodrl.deployment import Deployment
from embodrl.errors import ChannelTimeout
from embodrl.models.base import VLAPolicy
from embodrl.scheduler.channel import Channel
from embodrl.scheduler.worker import dispatch
from embodrl.workers.acting_process import PolicyProcess, SimulatingProcess
from embodrl.workers.collection import OPEN_PER_ENV, DemoCollector
from embodrl.workers.collector import share_config
from embodrl.workers.demonstrations import Attempted, NumberedAttempts
from embodrl.workers.env import make_single_pool
from embodrl.workers.parts import make_recording_share
from embodrl.workers.policy import configure_torch
from embodrl.workers.remote_backend import StartedProcesses
from embodrl.workers.supervised import SupervisedProcesses

_EPISODE_PLACES = 4
"""Outcomes, with their episodes, on the way from a process to the driver; a process with more waits."""
_PUT_S = 1.0
_GET_S = 0.01


class CollectingProcess(SimulatingProcess):
    """Lets the experts attempt tasks for the driver, with a share of the environments."""

    def __init__(self, config: Config, deployment: Deployment, log_dir: str | None = None) -> None:
        super().__init__(config, deployment, log_dir)
        self.config = share_config(config, self.share)
        self._outcomes = self.channel(f"outcomes_{self.rank}")
        self._start(deployment)

    def _start(self, deployment: Deployment) -> None:
        """Start the simulators."""
        configure_torch(self.config, threads=deployment.threads_of(deployment.of("rollout")[self.rank]))
        self.pool = make_single_pool(self.config, self.config.env.train.total_num_envs, self.places, self.log_dir)
        self.pool.start()

    def _attempts(self, take: Callable[[int], Sequence[int]], report: Callable[[Attempted], None]) -> NumberedAttempts:
        return NumberedAttempts(self.config, self.pool, None, take, report)

    @dispatch()
    def play(self, call: int, numbers: list[int]) -> dict[str, object] | None:
        """Play the attempts with these numbers, and send their outcomes as they end; None if interrupted."""
        self.begin(call)
        waiting = deque(numbers)
        missing = len(numbers)

        def report(outcome: Attempted) -> None:
            nonlocal missing
            missing -= 1
            self._send(outcome)

        def take(count: int) -> list[int]:
            return [waiting.popleft() for _ in range(min(count, len(waiting)))]

        self._attempts(take, report).run(lambda: not missing or self.should_stop())
        return None if missing else self.faults()

    def _send(self, outcome: Attempted) -> None:
        packed = packed_outcome(outcome)
        while not self.should_stop():
            try:
                self._outcomes.put(packed, _PUT_S)
                return
            except ChannelTimeout:  # the driver writes earlier episodes
                continue


class RecordingProcess(PolicyProcess, CollectingProcess):
    """Lets a copy of the driver's policy attempt tasks, with a share of the environments."""

    def _start(self, deployment: Deployment) -> None:
        self.pool, self.engine = make_recording_share(self.config, deployment, self.share, self.log_dir, self.places)

    def _attempts(self, take: Callable[[int], Sequence[int]], report: Callable[[Attempted], None]) -> NumberedAttempts:
        return NumberedAttempts(self.config, self.pool, self.engine, take, report)


def packed_outcome(outcome: Attempted) -> dict[str, object]:
    """Return an outcome as plain values and arrays, for a channel."""
    episode = outcome.episode
    if episode is None:
        return {"number": outcome.number, "success": outcome.success}
    outcomes = None if episode.outcomes is None else dict(vars(episode.outcomes))
    packed = vars(episode) | {"outcomes": outcomes, "acted": dict(episode.acted)}
    return {"number": outcome.number, "success": outcome.success, "episode": packed}


def unpacked_outcome(content: Any) -> Attempted:
    """Return the outcome of ``packed_outcome``."""
    if (packed := content.get("episode")) is None:
        return Attempted(content["number"], content["success"])
    outcomes = None if packed["outcomes"] is None else Outcomes(**packed["outcomes"])
    return Attempted(content["number"], content["success"], DemoEpisode(**(packed | {"outcomes": outcomes})))


class RemoteAttempts:
    """Has the rollout processes play the attempts of a collection, each with its simulators.

    Attempts are handed out in rounds, and every process plays an equal share of a round. A process that dies is
    restarted and plays its share of the round again.

    Args:
        config: configuration of the collection; ``deployment`` its placement.
        policy: policy of which each process gets a copy; None for the experts.
        log_dir: directory for the processes' output.
        closing: stops what was started.

    Raises:
        EnvError: a simulator could not be started.
        WorkerError: a process could not be started.
        EmbodrlError: the launcher lacks a requirement.
    """

    def __init__(
        self, config: Config, deployment: Deployment, policy: VLAPolicy | None, log_dir: Path, closing: ExitStack
    ) -> None:
        process = CollectingProcess if policy is None else RecordingProcess
        reports = ("outcomes", _EPISODE_PLACES)
        started = StartedProcesses.start(config, deployment, process, log_dir, reports, closing)
        self._outcomes: Sequence[Channel] = started.reports
        self._num_envs = config.env.train.total_num_envs
        self.processes: SupervisedProcesses = (
            started.without_policy()
            if policy is None
            else started.with_policy(policy, log_dir / "weight_sync", closing)
        )

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks."""
        return self.processes.tasks

    @property
    def control_hz(self) -> float:
        """Control rate of the simulators."""
        return float(self.processes.about["control_hz"])

    def run(self, collector: DemoCollector, should_stop: Callable[[], bool]) -> None:
        """Play until the collection is finished or ``should_stop`` returns True.

        Raises:
            EmbodrlError: the experts or the simulators fail too often.
            WorkerError: a process raised, or processes keep dying.
        """

        def is_over() -> bool:
            self._receive(collector)
            return collector.finished or should_stop()

        while not is_over():
            size = min(OPEN_PER_ENV * self._num_envs, max(self._num_envs, collector.missing))
            numbers = collector.take(size)
            shares = [(numbers[rank :: self.processes.size],) for rank in range(self.processes.size)]
            try:
                self.processes.call("play", shares, should_stop=is_over)
            except InterruptedError:
                return
            while collector.waits and not is_over():
                continue

    def _receive(self, collector: DemoCollector) -> None:
        """Add the outcomes that have arrived."""
        for channel in self._outcomes:
            while True:
                try:
                    outcome = channel.get(_GET_S)
                except ChannelTimeout:
                    break
                collector.add(unpacked_outcome(outcome))
