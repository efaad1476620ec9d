"""A rollout process: a share of the environments, with its own simulators and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict

from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.shared_rows import shared_memory_batch
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.deployment import Deployment
from embodrl.scheduler.messages import MAX_FILES
from embodrl.scheduler.worker import dispatch
from embodrl.specs import LOSSES
from embodrl.workers.acting_process import ActingProcess, Answer
from embodrl.workers.async_collector import EpisodeRunner, make_runners
from embodrl.workers.collector import RolloutState, Snapshot, SyncCollector
from embodrl.workers.lockstep import Shard, ShardMeta
from embodrl.workers.recorders import Judging
from embodrl.workers.reward import DetachedRewards, RewardWorker
from embodrl.workers.rollout_backend import make_sync_collector
from embodrl.workers.streaming import StreamRunner, play_given

_MAX_OPEN = 256
"""Memory files that a process has, or that are on their way to others; mapped ones take two of its 1024 descriptors."""


def shares_inputs(config: Config, deployment: Deployment) -> bool:
    """Return whether training processes read policy inputs from memory files of the rollout processes.

    Otherwise inputs pass through the driver: what is not on its machine, or in it, can't read the files, and nodes of
    other pipelines may expect every column.
    """
    algorithm = config.algorithm
    epochs = algorithm.rollout_epoch + (algorithm.filter.max_resamples if algorithm.filter.enabled else 0)
    num_files = epochs * len(deployment.of("rollout"))
    num_open = num_files * max(len(deployment.of("actor")), config.runner.max_staleness + 2)
    return (
        deployment.rolls_out_in_processes
        and deployment.trains_in_processes
        and config.cluster.launcher == "process"
        and config.store_url is None
        and config.pipeline.fn is None
        and not LOSSES.entry(algorithm.loss_type).learns_from_records
        and num_files <= MAX_FILES
        and num_open <= _MAX_OPEN
    )


class Gathered(Answer):
    """Answer to a request for a batch."""

    batch: TrajectoryBatch
    rewards: DetachedRewards | None
    metas: list[ShardMeta]


class StreamedShard(TypedDict):
    """A shard that has ended in a stream."""

    number: int
    batch: TrajectoryBatch
    rewards: DetachedRewards | None


class Streamed(Answer):
    """Answer to a request for what ends next."""

    ended: list[StreamedShard]


class RolloutProcess(ActingProcess):
    """Collects and evaluates for the driver, which calls the methods; ``call`` numbers its requests."""

    def __init__(self, config: Config, deployment: Deployment, log_dir: str | None = None) -> None:
        super().__init__(config, deployment, log_dir)
        mine = self.config
        self._shares_inputs = shares_inputs(config, deployment)
        self.rewards = RewardWorker(config, tuple(self.pool.spec.tasks)) if config.reward.judged else None
        # SRPO judges in the driver, from the frames.
        judging = Judging(keep_frames=config.algorithm.srpo.enabled)
        if self.rewards is not None:
            self.rewards.check(self.pool.spec)
            judging = self.rewards.judging
        self._collector: SyncCollector | None = None
        self._runner: EpisodeRunner | None = None
        self._stream: StreamRunner | None = None
        if config.rollout.streaming:
            self._stream = StreamRunner(mine, self.pool, self.engine, judging)
        elif config.runner.max_staleness:
            # Requests are served one after another: several pipeline stages would only make batches smaller.
            rollout = mine.rollout.model_copy(update={"pipeline_stages": 1})
            alone = mine.model_copy(update={"rollout": rollout})
            (self._runner,) = make_runners(alone, self.pool, self.engine, judging)
        else:
            self._collector = make_sync_collector(mine, self.pool, self.engine, self.should_stop, judging, self.share)

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Accept weights (a ``WeightTarget``); called by the receiver's thread."""
        # The current version arrives again after another process was restarted: the update in progress continues.
        again = self.engine.version == version
        target = self.engine if again or self.is_asynchronous else self.collector
        target.update_weights(weights, version)

    def close(self) -> None:
        if self.rewards is not None:
            self.rewards.close()
        super().close()

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def is_asynchronous(self) -> bool:
        """Whether the driver chooses the next shards."""
        return self._collector is None

    @property
    def collector(self) -> SyncCollector:
        """Collector of a synchronous run."""
        assert self._collector is not None
        return self._collector

    @property
    def runner(self) -> EpisodeRunner:
        """Runner of an asynchronous run."""
        assert self._runner is not None
        return self._runner

    @dispatch()
    def gather(self, call: int, iteration: int) -> dict[str, object] | None:
        """Return a batch and its metadata; None if interrupted. See Collector."""
        return self._rolled_out(call, lambda: self.collector.gather(iteration)[0])

    @dispatch()
    def gather_more(self, call: int, iteration: int, epoch: int, groups: int) -> dict[str, object] | None:
        """Like ``gather``, for another rollout of the update."""
        return self._rolled_out(call, lambda: self.collector.gather_more(iteration, epoch, groups)[0])

    @dispatch()
    def roll_out(self, call: int, shard: dict[str, Any]) -> dict[str, object] | None:
        """Like ``gather``, for a shard of an asynchronous run."""
        return self._rolled_out(call, lambda: self.runner.roll_out(Shard(**shard), self.should_stop))

    @dispatch()
    def stream(
        self, call: int, shards: Sequence[tuple[int, dict[str, Any]]], shards_a_journal: int
    ) -> dict[str, object] | None:
        """Return what ends next of numbered shards; None if interrupted. See ``play_given``."""
        assert self._stream is not None
        self.begin(call)
        given = {number: Shard(**shard) for number, shard in shards}
        try:
            ended: list[StreamedShard] = [
                {"number": number, "batch": batch, "rewards": self._rewards_of(batch)}
                for number, batch in play_given(self._stream, given, shards_a_journal, self.should_stop)
            ]
        except InterruptedError:
            return None
        return {"ended": ended, "carried": self._random_numbers(), **self.faults()}

    def _rewards_of(self, batch: TrajectoryBatch) -> DetachedRewards | None:
        return None if self.rewards is None else self.rewards.detach(batch, self.should_stop)

    def _random_numbers(self) -> Snapshot:
        return {"metas": [], "random": self.engine.random_state(), "before": None}

    def _rolled_out(self, call: int, roll_out: Callable[[], TrajectoryBatch]) -> dict[str, object] | None:
        self.begin(call)
        try:
            batch = roll_out()
            rewards = self._rewards_of(batch)
            batch = shared_memory_batch(batch) if self._shares_inputs else batch
        except InterruptedError:
            return None
        carried = self._random_numbers() if self.is_asynchronous else self.collector.snapshot()
        return {
            "batch": batch,
            "rewards": rewards,
            "metas": carried["metas"],
            "carried": carried,
            **self.faults(),
        }

    @dispatch()
    def rebuild(self) -> None:
        self.runner.rebuild()

    @dispatch()
    def offload_policy(self) -> tuple[str, int, int] | None:
        """Offload the weights; return the device and the bytes allocated there before and after."""
        self.engine.offload()
        report = self.engine.offload_report
        return None if report is None else (str(report.device), report.before, report.after)

    @dispatch()
    def offload_simulators(self, end_processes: bool) -> tuple[int, int] | None:
        """Move the simulators out of memory; return the bytes before and after."""
        memory = self.pool.offload(end_processes)
        return None if memory is None else (memory.before, memory.after)

    @dispatch()
    def onload(self) -> None:
        """Bring back weights and simulators."""
        self.engine.onload()
        self.pool.onload()

    @dispatch()
    def undo(self) -> list[str]:
        """Undo the current update; return the random state."""
        self.collector.undo()
        return self.engine.random_state()

    @dispatch()
    def reset_history(self) -> None:
        self.collector.reset_history()

    @dispatch()
    def restore(self, carried: Snapshot) -> None:
        """Continue from the predecessor's snapshot; see ``SyncCollector.restore``."""
        if self.is_asynchronous:
            self.engine.set_random_state(carried["random"])
        else:
            self.collector.restore(carried)

    @dispatch()
    def state(self) -> dict[str, object]:
        return dict(vars(self.collector.state()))

    @dispatch()
    def load_state(
        self, state: dict[str, object], tensors: dict[str, dict[str, Tensor]], blobs: dict[str, bytes]
    ) -> list[str]:
        """Load a state with the version of the last weights; return the random state."""
        self.collector.load_state(RolloutState(state, tensors, blobs), self.engine.version)
        return self.engine.random_state()
