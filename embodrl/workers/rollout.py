"""Gathering experience: the policy acts, the environments answer, and the chunks become a TrajectoryBatch.

Legend: T policy steps (chunks), B environments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.envs.pool import EnvPool
from embodrl.hybrid_engines.rollout import NativeRolloutEngine
from embodrl.workers.stage import EpisodeStats, Seconds, Stage


class RolloutWorker:
    """Plays ``rollout_epoch`` rollouts of T chunks in all environments.

    Every rollout begins with fresh episodes, whose seeds follow from ``runner.seed`` and the iteration; environments
    of a group (``algorithm.group_size``) get the same ones.

    Args:
        config: the run.
        pool: started.
        engine: the policy.
        should_stop: asked before every chunk; if it answers True, ``gather`` raises InterruptedError.
        keep_frames: keep what the first camera sees, for those who judge episodes by it.
    """

    def __init__(
        self,
        config: Config,
        pool: EnvPool,
        engine: NativeRolloutEngine,
        should_stop: Callable[[], bool],
        keep_frames: bool = False,
    ) -> None:
        self.config = config
        self.engine = engine
        self.should_stop = should_stop
        self.schedule = EpisodeSchedule(config, pool.spec.num_envs, len(pool.spec.tasks))
        self.num_envs = pool.spec.num_envs
        self.num_steps = config.env.train.max_steps_per_rollout_epoch // config.model.num_action_chunks
        self.stages = make_stages(config, pool, engine, keep_frames)
        self.seconds, self.stats = Seconds(), EpisodeStats()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Act with these weights from the next chunk on."""
        self.engine.update_weights(weights, version)

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, dict[str, float | None]]:
        """Return ``rollout_epoch`` rollouts with the present policy, and metrics.

        Raises:
            InterruptedError: ``should_stop`` answered True.
        """
        self.seconds, self.stats = Seconds(), EpisodeStats()
        return self._rollouts(iteration, range(self.config.algorithm.rollout_epoch))

    def gather_more(self, iteration: int, epoch: int) -> tuple[TrajectoryBatch, dict[str, float | None]]:
        """Return one rollout more, ``epoch`` counted from 0 over the iteration; metrics are of all since ``gather``.

        Raises:
            InterruptedError: ``should_stop`` answered True.
        """
        return self._rollouts(iteration, range(epoch, epoch + 1))

    def _rollouts(self, iteration: int, epochs: range) -> tuple[TrajectoryBatch, dict[str, float | None]]:
        parts = [part for epoch in epochs for part in self._play(iteration, epoch)]
        batch = TrajectoryBatch.concat(parts)
        batch.meta["env_steps"] = int(batch.valid.sum())
        return batch, self.stats.metrics() | {"time/env_s": self.seconds.env, "time/policy_s": self.seconds.policy}

    def _play(self, iteration: int, epoch: int) -> list[TrajectoryBatch]:
        """Return one rollout of all environments, a batch a stage.

        Raises:
            InterruptedError: ``should_stop`` answered True.
        """
        seeds, tasks = self.schedule.draw(iteration, epoch)
        for stage in self.stages:
            stage.begin(seeds[stage.rows], tasks[stage.rows])
        for stage in self.stages:
            stage.act()
        for index in range(self.num_steps):
            if self.should_stop():
                for stage in self.stages:
                    stage.abandon()
                raise InterruptedError
            for stage in self.stages:
                stage.receive()
                # While the policy serves this stage, the simulators of the others are at work.
                if index + 1 < self.num_steps:
                    stage.act()
        groups = self.schedule.group_ids(epoch)
        batches = [stage.stack(groups[stage.rows]) for stage in self.stages]
        for stage in self.stages:
            self.stats.merge(stage.stats)
            self.seconds.env += stage.seconds.env
            self.seconds.policy += stage.seconds.policy
        return batches


class EpisodeSchedule:
    """Which episodes an iteration begins with.

    Args:
        config: the run.
        num_envs: B.
        num_tasks: tasks that take turns.
    """

    def __init__(self, config: Config, num_envs: int, num_tasks: int) -> None:
        self.config, self.num_envs, self.num_tasks = config, num_envs, num_tasks

    def draw(self, iteration: int, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return reset seeds ``int64[B]`` and tasks ``int32[B]``, equal within a group."""
        train = self.config.env.train
        moment = (0, 0) if train.use_fixed_reset_state_ids else (iteration, epoch)
        groups = np.arange(self.num_envs) // self.config.algorithm.group_size
        sequence = np.random.SeedSequence([self.config.runner.seed, train.seed, *moment])
        drawn = sequence.generate_state(int(groups[-1]) + 1, np.uint32) >> np.uint32(1)
        tasks = (groups + iteration) % self.num_tasks
        return drawn[groups].astype(np.int64), tasks.astype(np.int32)

    def group_ids(self, epoch: int) -> Tensor:
        """Return ``int64[B]``; no two rollouts of an iteration share a group."""
        size = self.config.algorithm.group_size
        return epoch * (self.num_envs // size) + torch.arange(self.num_envs) // size


def make_stages(config: Config, pool: EnvPool, engine: NativeRolloutEngine, keep_frames: bool) -> list[Stage]:
    """Return ``rollout.pipeline_stages`` stages of equal size."""
    pools = pool.split(config.rollout.pipeline_stages)
    size = pool.spec.num_envs // len(pools)
    rows = [slice(i * size, (i + 1) * size) for i in range(len(pools))]
    return [Stage(config, part, engine, mine, keep_frames) for part, mine in zip(pools, rows, strict=True)]
