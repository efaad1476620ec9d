"""Gathering experience: the policy acts, the environments answer, and the chunks become a TrajectoryBatch.

Shapes: T policy steps (chunks), B environments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import CheckpointError
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.workers.lockstep import LockstepRunner, ShardMeta, combine_extras
from embodrl.workers.outcomes import EpisodeStats
from embodrl.workers.play import Seconds, take_turns
from embodrl.workers.recorders import NOT_JUDGED, Judging

Metrics = dict[str, float | None]
logger = logging.getLogger(__name__)

LOST = "lost"
"""Key of the state of a rollout process that died as the run was to end: its successor has fresh simulators."""
_BRANCH_POINTS = 1  # tells their random numbers from those of the reset seeds


@dataclass(frozen=True)
class Share:
    """The slice of a run's environments that a rollout process has: equal for all, in order.

    Attributes:
        rank: rank of the rollout process.
        count: number of rollout processes.
    """

    rank: int = 0
    count: int = 1

    def rows(self, total: int) -> slice:
        """Return this process's rows of ``total``, a multiple of ``count``."""
        size = total // self.count
        return slice(self.rank * size, (self.rank + 1) * size)


WHOLE = Share()


def share_config(config: Config, share: Share) -> Config:
    """Return the configuration of a run of this share alone: its environments and simulator processes."""
    count = share.count
    if count == 1:
        return config
    env = config.env
    parts = {
        "num_processes": env.num_processes // count,
        "train": env.train.model_copy(update={"total_num_envs": env.train.total_num_envs // count}),
        "eval": env.eval.model_copy(update={"total_num_envs": env.eval.total_num_envs // count}),
    }
    return config.model_copy(update={"env": env.model_copy(update=parts)})


@dataclass
class RolloutState:
    """What a resumed run needs of its rollouts.

    Attributes:
        state: what can be written as JSON.
        tensors: groups of tensors by name.
        blobs: opaque bytes by name.
    """

    state: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])
    blobs: dict[str, bytes] = field(default_factory=dict[str, bytes])


class Snapshot(TypedDict):
    """Where a collector is, for one that takes its place.

    Attributes:
        metas: descriptions of the rollouts of the update under way.
        random: state of the random numbers.
        before: the same at the beginning of the update; None if none is under way.
    """

    metas: list[ShardMeta]
    random: list[str]
    before: list[str] | None


class Collector(Protocol):
    """Where the batches that a run trains on come from."""

    config: Config

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, Metrics]:
        """Return the batch of an update, and metrics.

        Raises:
            InterruptedError: the run is to stop; ``undo`` follows.
        """
        ...

    def gather_more(self, iteration: int, epoch: int) -> tuple[TrajectoryBatch, Metrics]:
        """Return a further batch for the same update; metrics are of all since ``gather``.

        Args:
            iteration: see ``gather``.
            epoch: rollouts that the iteration has had.

        Raises:
            InterruptedError: as ``gather``.
        """
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Act with these weights from the next chunk on.

        Args:
            weights: names and tensors of the policy.
            version: updates that they have seen.
        """
        ...

    def undo(self) -> None:
        """Be as before ``gather``: the update that it was for does not happen."""
        ...

    def drain(self) -> None:
        """Wait for what an interruption left in progress, so that ``undo`` and ``state`` can ask for other things."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which the environments are left to somebody else."""
        ...

    def reset_history(self) -> None:
        """See to it that what follows depends on nothing but ``state``."""
        ...

    def state(self) -> RolloutState:
        """Return what is needed to continue."""
        ...

    def load_state(self, saved: RolloutState, version: int) -> None:
        """Continue from a state of ``state``, with weights that have seen ``version`` updates.

        Raises:
            CheckpointError: it was made with other settings.
        """
        ...

    def close(self) -> None:
        """End what is under way."""
        ...


class SyncCollector:
    """Runs ``rollout_epoch`` rollouts of T chunks in all environments, while nothing else happens.

    Every rollout begins with fresh episodes, whose seeds follow from ``runner.seed`` and the iteration; environments
    of a group (``algorithm.group_size``) get the same ones. With ``algorithm.branch`` they begin in the midst of one.

    Args:
        config: the run.
        pool: started.
        engine: the policy.
        should_stop: function asked before every chunk; if it answers True, ``gather`` raises InterruptedError.
        judging: what the rewards ask for.
        share: part of the run's environments that the pool has.
    """

    def __init__(
        self,
        config: Config,
        pool: EnvPool,
        engine: RolloutEngine,
        should_stop: Callable[[], bool],
        judging: Judging = NOT_JUDGED,
        share: Share = WHOLE,
    ) -> None:
        self.config = config
        self.pool = pool
        self.engine = engine
        self.should_stop = should_stop
        self.schedule = EpisodeSchedule(config, pool.spec.num_envs * share.count, len(pool.spec.tasks), share)
        self.judging = judging
        self.seconds = Seconds()
        self.stats = EpisodeStats()
        self._prefix_steps = 0
        # Random numbers at the mark that an interrupted rollout goes back to; None until an update has its first one.
        self._before: list[str] | None = None

    # Made with the first rollout: a collector that is closed before has nothing to release.
    @cached_property
    def stages(self) -> list[LockstepRunner]:
        """The groups of environments that take turns."""
        return make_lockstep_runners(self.config, self.pool, self.engine, self.judging)

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, Metrics]:
        self.seconds = Seconds()
        self.stats = EpisodeStats()
        if self._before is None:  # a second attempt at the same update goes back to the same mark
            self.pool.call("mark", restart=True)
            self._before = self.engine.random_state()
        return self._rollouts(iteration, range(self.config.algorithm.rollout_epoch))

    def gather_more(self, iteration: int, epoch: int) -> tuple[TrajectoryBatch, Metrics]:
        return self._rollouts(iteration, range(epoch, epoch + 1))

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Where the engine shares the weights, only the version is new."""
        # The update is done, so that ``undo`` has nothing to go back to.
        self._before = None
        self.engine.update_weights(weights, version)

    def drain(self) -> None:
        self.pool.requests.drain()

    def undo(self) -> None:
        if self._before is not None:
            self.engine.set_random_state(self._before)
            self.pool.call("rewind", restart=True)
            self._before = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Between two rollouts the environments have nothing to do."""
        yield

    def reset_history(self) -> None:
        """Simulators carry history that a checkpoint would have to replay."""
        self.pool.call("rebuild", restart=True)

    def state(self) -> RolloutState:
        states = self.pool.get_state(restart=True) if self.pool.keeps_state else []
        blobs = {f"env_{rank}": blob for rank, blob in enumerate(states)}
        return RolloutState({"random": self.engine.random_state()}, blobs=blobs)

    def load_state(self, saved: RolloutState, version: int) -> None:
        if "processes" in saved.state:
            count = len(saved.state["processes"])
            raise CheckpointError(
                f"the checkpoint was made with {count} rollout processes, not with one",
                f"resume with {count} of them in cluster.component_placement",
                code="checkpoint-other-settings",
            )
        if "random" not in saved.state and LOST not in saved.state:
            raise CheckpointError(
                "the checkpoint is that of an asynchronous run",
                "resume with runner.max_staleness above 0, as before",
                code="checkpoint-other-settings",
            )
        if LOST not in saved.state:
            self._load_simulators(saved)
        if "random" in saved.state:
            self._load_random(saved.state["random"])
        self.engine.version = version

    def _load_simulators(self, saved: RolloutState) -> None:
        processes = len(self.pool.managers)
        if not saved.blobs:  # of simulators that can't tell their state
            logger.warning("the checkpoint has no simulators: the next rollout begins with fresh ones")
            return
        if len(saved.blobs) != processes:
            raise CheckpointError(
                f"the checkpoint was made with {len(saved.blobs)} simulator processes, not with {processes}",
                f"resume with env.num_processes={len(saved.blobs)}",
                code="checkpoint-other-settings",
            )
        self.pool.set_state([saved.blobs[f"env_{rank}"] for rank in range(processes)])

    def _load_random(self, random: list[str]) -> None:
        try:
            self.engine.set_random_state(random)
        except ValueError as error:
            threads = len(random)
            raise CheckpointError(
                f"the checkpoint was made with {threads} threads, not with {self.engine.num_threads}",
                f"resume with cluster.num_threads={threads}",
                code="checkpoint-other-settings",
            ) from error

    def close(self) -> None:
        if "stages" in self.__dict__:  # not merely to be closed
            for stage in self.stages:
                stage.play.release()

    def _rollouts(self, iteration: int, epochs: range) -> tuple[TrajectoryBatch, Metrics]:
        self._prefix_steps = 0
        parts = [part for epoch in epochs for part in self._roll_out(iteration, epoch)]
        self.engine.offload()
        batch = TrajectoryBatch.concat(parts)
        # Steps on the way to the branch points were simulated, and are in no batch.
        batch.meta["env_steps"] = int(batch.valid.sum()) + self._prefix_steps
        return batch, rollout_metrics(self.metas())

    def snapshot(self) -> Snapshot:
        """Return what a worker in the place of this one needs to continue with the same update; see ``restore``."""
        return {"metas": self.metas(), "random": self.engine.random_state(), "before": self._before}

    def restore(self, carried: Snapshot) -> None:
        """Continue from what ``snapshot`` returned elsewhere, with fresh simulators.

        Args:
            carried: ``before`` is None, and ``metas`` is empty, if no update is under way.
        """
        self.engine.set_random_state(carried["random"])
        if carried["before"] is not None:
            # The mark is gone with the predecessor's simulators, so the fresh ones are marked as they are.
            self.pool.call("mark", restart=True)
            self._before = carried["before"]
            for meta in carried["metas"]:
                self.stats.merge(EpisodeStats(**meta["episodes"]))
                self.seconds.merge(Seconds(**meta["seconds"]))

    def metas(self) -> list[ShardMeta]:
        """Return what is known of the rollouts since ``gather``; see ``rollout_metrics``."""
        return [{"episodes": self.stats.as_dict(), "seconds": dict(vars(self.seconds))}]

    def _begin(self, iteration: int, epoch: int) -> None:
        """Start fresh episodes in all environments, and play to their branch points.

        Raises:
            InterruptedError: ``should_stop`` answered True.
        """
        branches = self.config.algorithm.branch.enabled
        if branches:
            self.pool.call("rebuild", restart=True)  # a state that is restored by replay then has one episode to replay
        seeds, tasks = self.schedule.draw(iteration, epoch)
        for stage in self.stages:
            stage.begin(seeds[stage.rows], tasks[stage.rows])
        if branches:
            points = self.schedule.branch_points(iteration, epoch)
            self._prefix_steps += sum(stage.branch(points[stage.rows], self.should_stop) for stage in self.stages)

    def _roll_out(self, iteration: int, epoch: int) -> list[TrajectoryBatch]:
        """Return one rollout of all environments, a batch a stage.

        Raises:
            InterruptedError: ``should_stop`` answered True.
        """
        self._begin(iteration, epoch)
        take_turns([stage.play for stage in self.stages], self.should_stop)
        groups = self.schedule.group_ids(epoch)
        batches = [stage.stack(groups[stage.rows]) for stage in self.stages]
        for stage in self.stages:
            self.stats.merge(stage.stats)
            self.seconds.merge(stage.seconds)
        return batches


def rollout_metrics(metas: Sequence[ShardMeta]) -> Metrics:
    """Return the metrics of some rollouts from what ``shard_meta`` tells of each."""
    stats = EpisodeStats()
    seconds = Seconds()
    for meta in metas:
        stats.merge(EpisodeStats(**meta["episodes"]))
        seconds.merge(Seconds(**meta["seconds"]))
    times: Metrics = {"time/env_s": seconds.env, "time/policy_s": seconds.policy}
    return stats.metrics() | times | combine_extras(metas)


@dataclass(frozen=True)
class EpisodeSchedule:
    """The episodes at the start of an iteration.

    Args:
        config: the run.
        num_envs: B of the run.
        num_tasks: tasks that take turns.
        share: share whose rows are requested.
    """

    config: Config
    num_envs: int
    num_tasks: int
    share: Share = WHOLE

    @property
    def rows(self) -> slice:
        """Of the share."""
        return self.share.rows(self.num_envs)

    def draw(self, iteration: int, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return reset seeds ``int64[b]`` and tasks ``int32[b]`` of the share, equal within a group."""
        train = self.config.env.train
        if train.use_fixed_reset_state_ids:
            iteration = 0
            epoch = 0
        groups = np.arange(self.num_envs) // self.config.algorithm.group_size
        # Seeds of the whole run are drawn and the share's cut out, so that they do not depend on the number of
        # processes.
        sequence = np.random.SeedSequence([self.config.runner.seed, train.seed, iteration, epoch])
        drawn = sequence.generate_state(int(groups[-1]) + 1, np.uint32) >> np.uint32(1)
        tasks = (groups + iteration) % self.num_tasks
        return drawn[groups].astype(np.int64)[self.rows], tasks.astype(np.int32)[self.rows]

    def branch_points(self, iteration: int, epoch: int) -> NDArray[np.int64]:
        """Return ``int64[b]`` of the share: chunks before the episodes of each group begin, equal within a group."""
        config = self.config
        groups = np.arange(self.num_envs) // config.algorithm.group_size
        # Drawn for the whole run, as the seeds are.
        rng = np.random.default_rng([config.runner.seed, config.env.train.seed, iteration, epoch, _BRANCH_POINTS])
        return rng.integers(config.branch_chunks + 1, size=int(groups[-1]) + 1)[groups][self.rows]

    def group_ids(self, epoch: int) -> Tensor:
        """Return ``int64[b]`` of the share; no two rollouts of an iteration have a group in common."""
        size = self.config.algorithm.group_size
        return (epoch * (self.num_envs // size) + torch.arange(self.num_envs) // size)[self.rows]


def make_lockstep_runners(
    config: Config, pool: EnvPool, engine: RolloutEngine, judging: Judging = NOT_JUDGED
) -> list[LockstepRunner]:
    """Return ``rollout.pipeline_stages`` stages of equal size."""
    pools = pool.split(config.rollout.pipeline_stages)
    size = pool.spec.num_envs // len(pools)
    rows = [slice(i * size, (i + 1) * size) for i in range(len(pools))]
    return [LockstepRunner(config, part, engine, mine, judging) for part, mine in zip(pools, rows, strict=True)]
