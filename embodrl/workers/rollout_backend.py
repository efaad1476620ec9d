"""Rollout backends: simulators and the policy that acts in them, in the driver or in separate processes.

The training loop treats both alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from embodrl.config.schema import Config
from embodrl.envs.pool.faults import FaultCounts
from embodrl.envs.pool.offload import SimulatorMemory
from embodrl.envs.pool.pool import EnvPool
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.copies import frozen_copy
from embodrl.hybrid_engines.offload import OffloadReport
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.models.base import VLAPolicy
from embodrl.names import import_object
from embodrl.workers.async_collector import AsyncCollector, make_runners, workflow_runner
from embodrl.workers.collector import WHOLE, Collector, EpisodeSchedule, Share, SyncCollector
from embodrl.workers.evaluator import EvalResult, Evaluator, run_decodings
from embodrl.workers.recorders import Judging
from embodrl.workers.reward import RewardWorker
from embodrl.workers.streaming import StreamRunner


class RolloutBackend(ABC):
    """Started simulators, and the policy that acts in them."""

    collector: Collector
    tasks: Sequence[str]
    faults: FaultCounts

    def num_decodings(self, every_decoding: bool) -> int:
        """Return how often this process plays the episodes of an evaluation."""
        return 0

    @abstractmethod
    def evaluate(self, video_dir: Path | None, every_decoding: bool) -> EvalResult:
        """Run the episodes of ``env.eval`` with the newest weights; see ``Learner.evaluate``.

        Raises:
            InterruptedError: the run is stopping.
        """

    @abstractmethod
    def offload_policies(self) -> OffloadReport | None:
        """Offload rollout-only weights and buffers; return the freed memory."""

    @abstractmethod
    def offload_simulators(self, end_processes: bool) -> SimulatorMemory | None:
        """Move the simulators out of memory; return the freed memory. See ``EnvPool.offload``."""

    @abstractmethod
    def onload(self) -> None:
        """Bring back policies and simulators."""

    def sync_metrics(self) -> dict[str, float]:
        """Return metrics of the last weight sync to other processes, if they are of interest."""
        return {}

    def total_faults(self) -> FaultCounts:
        """Return the faults of the whole run."""
        return self.faults

    def restored(self, engine: TrainEngine) -> None:  # noqa: B027 - only what publishes weights needs these
        """The engine's state comes from a checkpoint."""

    def saved(self, engine: TrainEngine) -> None:  # noqa: B027
        """The engine's state is in a checkpoint."""

    def finish(self, version: int, is_to_stop: Callable[[], bool]) -> None:  # noqa: B027
        """The run is finished, with weights of this version."""

    @abstractmethod
    def close(self) -> None:
        """Stop everything in progress. The owner closes simulators and processes."""


class LocalBackend(RolloutBackend):
    """The driver acts, with the trained weights or a copy of them."""

    def __init__(self, pool: EnvPool, engine: RolloutEngine, collector: Collector, evaluator: Evaluator) -> None:
        self.pool = pool
        self.engine = engine
        self.collector = collector
        self.evaluator = evaluator
        self.tasks = pool.spec.tasks
        self.faults = pool.faults

    def num_decodings(self, every_decoding: bool) -> int:
        return len(run_decodings(self.evaluator.config, self.engine, every_decoding))

    def evaluate(self, video_dir: Path | None, every_decoding: bool) -> EvalResult:
        decodings = run_decodings(self.evaluator.config, self.engine, every_decoding)
        with self.collector.paused():
            return self.evaluator.run(video_dir, decodings=decodings)

    def offload_policies(self) -> OffloadReport | None:
        self.engine.offload()
        return self.engine.offload_report

    def offload_simulators(self, end_processes: bool) -> SimulatorMemory | None:
        return self.pool.offload(end_processes)

    def onload(self) -> None:
        self.engine.onload()
        self.pool.onload()

    def close(self) -> None:
        self.collector.close()


def acting_policy(config: Config, policy: VLAPolicy) -> VLAPolicy:
    """Return the policy that acts in the driver: the trained one, or a copy of it if rollouts run while it trains."""
    if config.runner.max_staleness == 0:
        return policy
    return frozen_copy(policy, [parameter for group in policy.trainable_groups().values() for parameter in group])


def make_collector(
    config: Config,
    pool: EnvPool,
    engine: RolloutEngine,
    should_stop: Callable[[], bool],
    rewards: RewardWorker,
) -> Collector:
    """Return the driver's collector for ``runner.max_staleness`` and ``rollout.workflow``.

    ``engine`` acts with the ``acting_policy``.
    """
    if config.runner.max_staleness == 0:
        return make_sync_collector(config, pool, engine, should_stop, rewards.judging)
    runners = (
        [StreamRunner(config, part, engine, rewards.judging) for part in pool.split(config.rollout.pipeline_stages)]
        if config.rollout.streaming
        else make_runners(config, pool, engine, rewards.judging)
    )
    schedule = EpisodeSchedule(config, pool.spec.num_envs, len(pool.spec.tasks))
    return AsyncCollector(config, schedule, runners, engine, should_stop, rewards)


def make_sync_collector(
    config: Config,
    pool: EnvPool,
    engine: RolloutEngine,
    should_stop: Callable[[], bool],
    judging: Judging,
    share: Share = WHOLE,
) -> SyncCollector:
    """Return the collector of a synchronous run."""
    own = None if config.rollout.workflow is None else workflow_runner().collector
    collector = SyncCollector if own is None else cast("type[SyncCollector]", import_object(own))
    return collector(config, pool, engine, should_stop, judging, share)


def evaluator_class(config: Config) -> type[Evaluator]:
    """Return the class that evaluates a policy, which ``rollout.workflow``, if any, plays as in training."""
    own = None if config.rollout.workflow is None else workflow_runner().evaluator
    return Evaluator if own is None else cast("type[Evaluator]", import_object(own))
