"""Gathering experience: the policy acts, the environments respond, and the chunks become a TrajectoryBatch.

Shapes: T policy steps (chunks), B environments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from embodrl.errors import CheckpointError, PipelineError
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.hybrid_engines.weight_sync.base import WeightTarget
from embodrl.workers.lockstep import LockstepRunner, Shard, ShardMeta, combine_extras
from embodrl.workers.outcomes import EpisodeStats
from embodrl.workers.play import Seconds, take_turns
from embodrl.workers.recorders import NOT_JUDGED, Judging
from embodrl.workers.starts import STARTS, EpisodeStarts

Metrics = dict[str, float | None]
logger = logging.getLogger(__name__)

LOST = "lost"
"""State key of a rollout process that died while the run was stopping: its replacement starts fresh simulators."""
_BRANCH_POINTS = 1  # separates its random numbers from the reset seeds


@dataclass(frozen=True)
class Share:
    """The contiguous slice of a run's environments that a rollout process owns; all slices have equal size."""

    rank: int = 0
    count: int = 1

    def rows(self, total: int) -> slice:
        """Return this process's rows of ``total``, which must be a multiple of ``count``."""
        size = total // self.count
        return slice(self.rank * size, (self.rank + 1) * size)


WHOLE = Share()


def share_config(config: Config, share: Share) -> Config:
    """Return the run configuration restricted to this share's environments and simulator processes."""
    count = share.count
    if count == 1:
        return config
    env = config.env
    first = share.rows(env.num_processes).start % max(1, len(env.remote))
    parts = {
        "num_processes": env.num_processes // count,
        "remote": (*env.remote[first:], *env.remote[:first]),  # in turn from there; all, for a server that is gone
        "train": env.train.model_copy(update={"total_num_envs": env.train.total_num_envs // count}),
        "eval": env.eval.model_copy(update={"total_num_envs": env.eval.total_num_envs // count}),
    }
    return config.model_copy(update={"env": env.model_copy(update=parts)})


@dataclass
class RolloutState:
    """Rollout state that a resumed run needs: JSON-serialisable values, named groups of tensors, named opaque bytes."""

    state: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])
    blobs: dict[str, bytes] = field(default_factory=dict[str, bytes])


class Snapshot(TypedDict):
    """Position of a collector, for its replacement; ``before`` is the random state at the update's start, if in one."""

    metas: list[ShardMeta]
    random: list[str]
    before: list[str] | None


class Collector(Protocol):
    """Source of the batches that a run trains on."""

    config: Config

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, Metrics]:
        """Return the batch of an update, and metrics.

        Raises:
            InterruptedError: the run is stopping; call ``undo`` next.
        """
        ...

    def gather_more(self, iteration: int, epoch: int, groups: int) -> tuple[TrajectoryBatch, Metrics]:
        """Return another batch for the update, number ``epoch`` of the iteration; metrics cover all since ``gather``.

        In lockstep all environments play once more; otherwise at least ``groups`` groups come.

        Raises:
            InterruptedError: as in ``gather``.
        """
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Act with these weights from the next chunk on."""
        ...

    def undo(self) -> None:
        """Return to the state before ``gather``, because its update is cancelled."""
        ...

    def drain(self) -> None:
        """Wait until interrupted requests have finished, so that ``undo`` and ``state`` can send new ones."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which other code may use the environments."""
        ...

    def reset_history(self) -> None:
        """Ensure that everything from here on depends only on ``state``."""
        ...

    def state(self) -> RolloutState:
        """Return the state needed to continue."""
        ...

    def load_state(self, saved: RolloutState, version: int) -> None:
        """Continue from a result of ``state``, with weights of ``version`` updates.

        Raises:
            CheckpointError: the state was made with other settings.
        """
        ...

    def close(self) -> None:
        """Stop everything in progress."""
        ...


class NoCollector(Collector):
    """Gathers nothing; passes weights to what evaluates."""

    def __init__(self, config: Config, engine: WeightTarget) -> None:
        self.config = config
        self.engine = engine

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, Metrics]:
        raise PipelineError(
            "an offline run has no rollouts", "remove the node from the pipeline", code="offline-rollout"
        )

    def gather_more(self, iteration: int, epoch: int, groups: int) -> tuple[TrajectoryBatch, Metrics]:
        return self.gather(iteration)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.engine.update_weights(weights, version)

    def drain(self) -> None:
        """Do nothing: evaluations drain their own requests."""

    def undo(self) -> None:
        """Do nothing."""

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reset_history(self) -> None:
        """Do nothing."""

    def state(self) -> RolloutState:
        return RolloutState({})

    def load_state(self, saved: RolloutState, version: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class SyncCollector:
    """Runs ``rollout_epoch`` rollouts of T chunks in all environments while nothing else runs.

    Every rollout starts fresh episodes with seeds derived from ``runner.seed`` and the iteration; environments of a
    group (``algorithm.group_size``) get the same seed. ``starts`` may begin some elsewhere, and with
    ``algorithm.branch`` all start in the middle of an episode. ``should_stop`` is called before every chunk; if it
    returns True, ``gather`` raises InterruptedError.
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
        self.starts = EpisodeStarts(config, pool)
        self.judging = judging
        self.seconds = Seconds()
        self.stats = EpisodeStats()
        self._prefix_steps = 0
        # Random state at the mark that an interrupted rollout returns to; None before the first update.
        self._before: list[str] | None = None
        self._starts_before: dict[str, Any] = {}

    # Created with the first rollout: a collector that is closed earlier has nothing to release.
    @cached_property
    def stages(self) -> list[LockstepRunner]:
        """The groups of environments that take turns."""
        return make_lockstep_runners(self.config, self.pool, self.engine, self.judging)

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, Metrics]:
        self.seconds = Seconds()
        self.stats = EpisodeStats()
        if self._before is None:  # a second attempt at the same update returns to the same mark
            self.pool.call("mark", restart=True)
            self._before = self.engine.random_state()
            self._starts_before = self.starts.state()
        return self._rollouts(iteration, range(self.config.algorithm.rollout_epoch))

    def gather_more(self, iteration: int, epoch: int, groups: int) -> tuple[TrajectoryBatch, Metrics]:
        return self._rollouts(iteration, range(epoch, epoch + 1))

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Record the version; if the engine shares the weights, nothing else changes."""
        # The update is complete: ``undo`` has nothing to roll back.
        self._before = None
        self.engine.update_weights(weights, version)

    def drain(self) -> None:
        self.pool.requests.drain()

    def undo(self) -> None:
        if self._before is not None:
            self.engine.set_random_state(self._before)
            self.pool.call("rewind", restart=True)
            self.starts.load_state(self._starts_before)
            self._before = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do nothing: the environments are idle between two rollouts."""
        yield

    def reset_history(self) -> None:
        """Drop the simulators' history, which a checkpoint would have to replay."""
        self.pool.call("rebuild", restart=True)

    def state(self) -> RolloutState:
        states = self.pool.get_state(restart=True) if self.pool.keeps_state else []
        blobs = {f"env_{rank}": blob for rank, blob in enumerate(states)}
        starts = self.starts.state()
        return RolloutState(
            {"random": self.engine.random_state()} | ({STARTS: starts} if starts else {}),
            blobs=blobs,
        )

    def load_state(self, saved: RolloutState, version: int) -> None:
        if "processes" in saved.state:
            count = len(saved.state["processes"])
            raise CheckpointError(
                f"the checkpoint was made with {count} rollout processes, but this run has one",
                f"resume with {count} of them in cluster.component_placement",
                code="checkpoint-other-settings",
            )
        if "random" not in saved.state and LOST not in saved.state:
            raise CheckpointError(
                "the checkpoint belongs to an asynchronous run",
                "resume with runner.max_staleness above 0, as before",
                code="checkpoint-other-settings",
            )
        if LOST not in saved.state:
            self._load_simulators(saved)
        if "random" in saved.state:
            self._load_random(saved.state["random"])
        self.starts.load_state(saved.state.get(STARTS, {}))
        self.engine.version = version

    def _load_simulators(self, saved: RolloutState) -> None:
        processes = len(self.pool.managers)
        if not saved.blobs:  # of simulators that cannot save their state
            logger.warning("the checkpoint has no simulators: the next rollout begins with fresh ones")
            return
        if len(saved.blobs) != processes:
            raise CheckpointError(
                f"the checkpoint was made with {len(saved.blobs)} simulator processes, but this run has {processes}",
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
                f"the checkpoint was made with {threads} threads, but this run has {self.engine.num_threads}",
                f"resume with cluster.num_threads={threads}",
                code="checkpoint-other-settings",
            ) from error

    def close(self) -> None:
        if "stages" in self.__dict__:  # opened for more than closing
            for stage in self.stages:
                stage.play.release()

    def _rollouts(self, iteration: int, epochs: range) -> tuple[TrajectoryBatch, Metrics]:
        self._prefix_steps = 0
        parts = [part for epoch in epochs for part in self._roll_out(iteration, epoch)]
        self.engine.offload()
        batch = TrajectoryBatch.concat(parts)
        # Steps on the way to the branch points were simulated but belong to no batch.
        batch.meta["env_steps"] = int(batch.valid.sum()) + self._prefix_steps
        return batch, rollout_metrics(self.metas()) | self.starts.metrics()

    def snapshot(self) -> Snapshot:
        """Return the state that a replacement worker needs to continue the same update; see ``restore``."""
        return {"metas": self.metas(), "random": self.engine.random_state(), "before": self._before}

    def restore(self, carried: Snapshot) -> None:
        """Continue from a ``snapshot``, with fresh simulators; ``before`` is None between updates."""
        self.engine.set_random_state(carried["random"])
        if carried["before"] is not None:
            # The mark was lost with the predecessor's simulators, so the fresh ones are marked in their current state.
            self.pool.call("mark", restart=True)
            self._before = carried["before"]
            for meta in carried["metas"]:
                self.stats.merge(EpisodeStats(**meta["episodes"]))
                self.seconds.merge(Seconds(**meta["seconds"]))

    def metas(self) -> list[ShardMeta]:
        """Return the metadata of the rollouts since ``gather``; see ``rollout_metrics``."""
        return [{"episodes": self.stats.as_dict(), "seconds": dict(vars(self.seconds))}]

    def _begin(self, iteration: int, epoch: int) -> None:
        branches = self.config.algorithm.branch.enabled
        if branches:
            self.pool.call("rebuild", restart=True)  # then a state restored by replay has only one episode to replay
        starts = self.starts.choose(iteration, epoch, *self.schedule.draw(iteration, epoch))
        for stage in self.stages:
            stage.begin(starts.seeds[stage.rows], starts.tasks[stage.rows])
            if prefixes := starts.within(stage.rows):
                found = stage.replay(starts.seeds[stage.rows], prefixes)
                assert stage.play.observation is not None
                states = stage.play.observation.state
                self._prefix_steps += self.starts.replayed(stage.rows.start, list(prefixes), found, states)
        if branches:
            points = self.schedule.branch_points(iteration, epoch)
            self._prefix_steps += sum(stage.branch(points[stage.rows], self.should_stop) for stage in self.stages)

    def _roll_out(self, iteration: int, epoch: int) -> list[TrajectoryBatch]:
        self._begin(iteration, epoch)
        take_turns([stage.play for stage in self.stages], self.should_stop)
        groups = self.schedule.group_ids(epoch)
        batches = [stage.stack(groups[stage.rows]) for stage in self.stages]
        for stage in self.stages:
            self.stats.merge(stage.stats)
            self.seconds.merge(stage.seconds)
        self.starts.learn([episode for stage in self.stages for episode in stage.ended])
        return batches


def rollout_metrics(metas: Sequence[ShardMeta]) -> Metrics:
    """Return the combined metrics of rollouts from their ``shard_meta``."""
    stats = EpisodeStats()
    seconds = Seconds()
    for meta in metas:
        stats.merge(EpisodeStats(**meta["episodes"]))
        seconds.merge(Seconds(**meta["seconds"]))
    times: Metrics = {"time/env_s": seconds.env, "time/policy_s": seconds.policy}
    return stats.metrics() | times | combine_extras(metas)


@dataclass(frozen=True)
class EpisodeSchedule:
    """The initial episodes of each iteration."""

    config: Config
    num_envs: int
    num_tasks: int
    share: Share = WHOLE

    @property
    def rows(self) -> slice:
        return self.share.rows(self.num_envs)

    def draw(self, iteration: int, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return reset seeds ``int64[b]`` and tasks ``int32[b]`` of the share, equal within a group."""
        train = self.config.env.train
        if train.use_fixed_reset_state_ids:
            iteration = 0
            epoch = 0
        groups = np.arange(self.num_envs) // self.config.algorithm.group_size
        # Seeds of the whole run are drawn before taking the share's rows, so that they do not depend on the number of
        # processes.
        sequence = np.random.SeedSequence([self.config.runner.seed, train.seed, iteration, epoch])
        drawn = sequence.generate_state(int(groups[-1]) + 1, np.uint32) >> np.uint32(1)
        tasks = (groups + iteration) % self.num_tasks
        return drawn[groups].astype(np.int64)[self.rows], tasks.astype(np.int32)[self.rows]

    def branch_points(self, iteration: int, epoch: int) -> NDArray[np.int64]:
        """Return ``int64[b]`` of the share: number of chunks before each episode starts, equal within a group."""
        config = self.config
        groups = np.arange(self.num_envs) // config.algorithm.group_size
        # Drawn for the whole run, like the seeds.
        rng = np.random.default_rng([config.runner.seed, config.env.train.seed, iteration, epoch, _BRANCH_POINTS])
        return rng.integers(config.branch_chunks + 1, size=int(groups[-1]) + 1)[groups][self.rows]

    def shard(self, iteration: int, epoch: int, random: Sequence[int], rows: slice = slice(None)) -> Shard:
        """Return some environments' part of a rollout, with group ids as of the first one of an iteration."""
        seeds, task_ids = self.draw(iteration, epoch)
        points = self.branch_points(iteration, epoch)[rows] if self.config.algorithm.branch.enabled else None
        return Shard(iteration, seeds[rows], task_ids[rows], self.group_ids(0)[rows], random, points=points)

    def group_ids(self, epoch: int) -> Tensor:
        """Return ``int64[b]`` of the share; group ids are unique across the rollouts of an iteration."""
        size = self.config.algorithm.group_size
        return (epoch * (self.num_envs // size) + torch.arange(self.num_envs) // size)[self.rows]


def make_lockstep_runners(
    config: Config, pool: EnvPool, engine: RolloutEngine, judging: Judging = NOT_JUDGED
) -> list[LockstepRunner]:
    """Return ``rollout.pipeline_stages`` runners over equally many environments."""
    pools = pool.split(config.rollout.pipeline_stages)
    size = pool.spec.num_envs // len(pools)
    rows = [slice(i * size, (i + 1) * size) for i in range(len(pools))]
    return [LockstepRunner(config, part, engine, mine, judging) for part, mine in zip(pools, rows, strict=True)]
