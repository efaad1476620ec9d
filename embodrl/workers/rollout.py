"""Gathering experience: the policy acts, the environments answer, and the chunks become a TrajectoryBatch.

Legend: T policy steps (chunks), B environments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.algorithms.episodes import split_episodes
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
        self.seconds = Seconds()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Act with these weights from the next chunk on."""
        self.engine.update_weights(weights, version)

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, dict[str, float | None]]:
        """Return a rollout with the present policy, and metrics.

        Raises:
            InterruptedError: ``should_stop`` answered True.
        """
        self.seconds = Seconds()
        stats = EpisodeStats()
        selection, wanted = self.config.algorithm.filter, self.config.algorithm.rollout_epoch
        if selection.enabled:
            batch, selected = self._gather_mixed(iteration, stats)
        else:
            parts = [part for epoch in range(wanted) for part in self._play(iteration, epoch, stats)]
            batch = TrajectoryBatch.concat(parts)
            batch.meta["env_steps"] = int(batch.valid.sum())
            selected = {}
        metrics = stats.metrics() | selected
        return batch, metrics | {"time/env_s": self.seconds.env, "time/policy_s": self.seconds.policy}

    def _gather_mixed(self, iteration: int, stats: EpisodeStats) -> tuple[TrajectoryBatch, dict[str, float | None]]:
        """Return groups with both successes and failures, from further rollouts if need be (DAPO's dynamic sampling).

        DAPO: Yu et al. 2025, arXiv 2503.14476, sec. 3.2. Groups left over are dropped.
        """
        algorithm = self.config.algorithm
        selection, size = algorithm.filter, algorithm.group_size
        wanted = algorithm.rollout_epoch * (self.num_envs // size)
        parts: list[TrajectoryBatch] = []
        kept, seen, env_steps, rounds = 0, 0, 0, 0
        for _ in range(algorithm.rollout_epoch + selection.max_resamples):
            if kept >= wanted:
                break
            batch = TrajectoryBatch.concat(self._play(iteration, rounds, stats))
            rounds += 1
            env_steps += int(batch.valid.sum())
            rates = group_success_rates(batch, size)
            chosen = ((rates > selection.min_rate) & (rates < selection.max_rate)).nonzero().squeeze(-1)
            seen, chosen = seen + len(rates), chosen[: wanted - kept]
            kept += len(chosen)
            parts.append(batch[(chosen.unsqueeze(1) * size + torch.arange(size)).flatten()])
        batch = TrajectoryBatch.concat(parts)
        batch.meta["env_steps"] = env_steps
        return batch, {
            "rollout/groups_kept": float(kept),
            "rollout/groups_dropped": float(seen - kept),
            "rollout/groups_missing": float(wanted - kept),
            "rollout/resamples": float(max(rounds - algorithm.rollout_epoch, 0)),
        }

    def _play(self, iteration: int, epoch: int, stats: EpisodeStats) -> list[TrajectoryBatch]:
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
            stats.merge(stage.stats)
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


def group_success_rates(batch: TrajectoryBatch, group_size: int) -> Tensor:
    """Return ``float32[B / group_size]``: the part of a group's episodes that succeeded; lost ones do not count.

    A group without episodes has a rate of 0.
    """
    assert batch.success is not None
    episodes = split_episodes(batch.valid, batch.terminated, batch.truncated)
    known = ~episodes.lost
    group = episodes.column[known] // group_size
    count = torch.zeros(batch.success.shape[1] // group_size)
    successes = count.clone().index_add_(0, group, episodes.of(batch.success)[known].float())
    return successes / count.index_add_(0, group, torch.ones(len(group))).clamp_min(1)
