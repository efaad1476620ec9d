"""Gathering experience: the policy acts, the environments answer, and the chunks become a TrajectoryBatch.

Legend: T policy steps, B environments, C actions in a chunk, A action dimensions, K values a chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.envs.pool import EnvPool
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.rollout import NativeRolloutEngine
from embodrl.registry import LOSSES
from embodrl.types import EnvStep, Observation, PolicyOutput


@dataclass
class EpisodeStats:
    """What became of the episodes that ended in a rollout."""

    successes: int = 0
    episodes: int = 0
    lost: int = 0
    returns: float = 0.0
    lengths: int = 0

    def add(self, step: EnvStep, acted: NDArray[np.bool_]) -> None:
        """Count the episodes that ended in a chunk; those that a fault ended are counted as lost only."""
        done = step.done & acted
        lost = done & ~step.valid.any(axis=1)
        ended = done & ~lost
        self.lost += int(lost.sum())
        self.episodes += int(ended.sum())
        self.successes += int(step.success[ended].sum())
        self.returns += float(step.episode_return[ended].sum())
        self.lengths += int(step.episode_length[ended].sum())

    def metrics(self) -> dict[str, float | None]:
        """Return means over the episodes; None where none has ended."""
        count = self.episodes
        return {
            "rollout/success_rate": self.successes / count if count else None,
            "rollout/return": self.returns / count if count else None,
            "rollout/episode_length": self.lengths / count if count else None,
            "rollout/episodes": float(count),
            "rollout/lost_episodes": float(self.lost),
        }


@dataclass
class Stage:
    """A group of environments that is simulated while the policy serves the others.

    Attributes:
        pool: its managers.
        rows: its environments within the whole batch.
        observation: what the policy sees next.
        active: ``bool[B]``, episodes that go on; all of them with auto-reset.
        steps, inputs: what was gathered so far, one entry a chunk.
        output: what the policy answered last.
        task_id: ``int64[B]``, tasks of the observation that it answered to.
    """

    pool: EnvPool
    rows: slice
    observation: Observation | None = None
    active: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    steps: list[dict[str, Tensor]] = field(default_factory=list)
    inputs: list[dict[str, Tensor]] = field(default_factory=list)
    output: PolicyOutput | None = None
    task_id: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


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
        self.keep_frames = keep_frames
        self.engine = engine
        self.should_stop = should_stop
        self.num_envs = pool.spec.num_envs
        self.num_tasks = len(pool.spec.tasks)
        self.num_steps = config.env.train.max_steps_per_rollout_epoch // config.model.num_action_chunks
        self.needs_values = bool(LOSSES.entry(config.algorithm.loss_type).facts.get("needs_values"))
        pools = pool.split(config.rollout.pipeline_stages)
        size = self.num_envs // len(pools)
        self.stages = [Stage(part, slice(i * size, (i + 1) * size)) for i, part in enumerate(pools)]
        self.seconds = {"env": 0.0, "policy": 0.0}
        self.stats = EpisodeStats()

    def seeds(self, iteration: int, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return reset seeds ``int64[B]`` and tasks ``int32[B]``, equal within a group."""
        train = self.config.env.train
        moment = (0, 0) if train.use_fixed_reset_state_ids else (iteration, epoch)
        groups = np.arange(self.num_envs) // self.config.algorithm.group_size
        sequence = np.random.SeedSequence([self.config.runner.seed, train.seed, *moment])
        drawn = sequence.generate_state(int(groups[-1]) + 1, np.uint32) >> np.uint32(1)
        tasks = (groups + iteration) % self.num_tasks
        return drawn[groups].astype(np.int64), tasks.astype(np.int32)

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, dict[str, float | None]]:
        """Return ``rollout_epoch`` rollouts with the present policy, and metrics.

        Raises:
            InterruptedError: ``should_stop`` answered True.
        """
        self.seconds = {"env": 0.0, "policy": 0.0}
        self.stats = EpisodeStats()
        return self._rollouts(iteration, range(self.config.algorithm.rollout_epoch))

    def gather_more(self, iteration: int, epoch: int) -> tuple[TrajectoryBatch, dict[str, float | None]]:
        """Return one rollout more, ``epoch`` counted from 0 over the iteration; metrics are of all since ``gather``.

        Raises:
            InterruptedError: ``should_stop`` answered True.
        """
        return self._rollouts(iteration, range(epoch, epoch + 1))

    def update_weights(self, engine: TrainEngine) -> None:
        """Act with the weights of the engine from now on.

        There is nothing to do: this worker's policy and the engine share their weights.
        """

    def _rollouts(self, iteration: int, epochs: range) -> tuple[TrajectoryBatch, dict[str, float | None]]:
        parts = [part for epoch in epochs for part in self._play(iteration, epoch, self.stats)]
        batch = TrajectoryBatch.concat(parts)
        batch.meta["env_steps"] = int(batch.valid.sum())
        times: dict[str, float | None] = {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}
        return batch, self.stats.metrics() | times

    def _play(self, iteration: int, epoch: int, stats: EpisodeStats) -> list[TrajectoryBatch]:
        """Return one rollout of all environments, a batch a stage.

        Raises:
            InterruptedError: ``should_stop`` answered True.
        """
        seeds, tasks = self.seeds(iteration, epoch)
        for stage in self.stages:
            self._begin(stage, seeds[stage.rows], tasks[stage.rows])
        for stage in self.stages:
            self._act(stage)
        for index in range(self.num_steps):
            if self.should_stop():
                for stage in self.stages:
                    stage.pool.wait()  # a pool with a step under way takes no other request
                raise InterruptedError
            for stage in self.stages:
                self._receive(stage, stats)
                # While the policy serves this stage, the simulators of the others are at work.
                if index + 1 < self.num_steps:
                    self._act(stage)
        return [self._stack(stage, iteration, epoch) for stage in self.stages]

    def _begin(self, stage: Stage, seeds: NDArray[np.int64], tasks: NDArray[np.int32]) -> None:
        clock = time.perf_counter()
        stage.observation = stage.pool.reset(seeds, tasks)
        stage.active = np.ones(len(seeds), np.bool_)
        stage.steps, stage.inputs = [], []
        self._lap("env", clock)

    def _act(self, stage: Stage) -> None:
        clock = time.perf_counter()
        assert stage.observation is not None
        stage.task_id = torch.from_numpy(stage.observation.task_id.astype(np.int64))
        stage.output = self.engine.act(stage.observation, self.needs_values)
        clock = self._lap("policy", clock)
        stage.pool.step_async(stage.output.actions, stage.active)
        self._lap("env", clock)

    def _receive(self, stage: Stage, stats: EpisodeStats) -> None:
        clock = time.perf_counter()
        assert stage.output is not None
        output = stage.output
        step = stage.pool.wait()
        clock = self._lap("env", clock)
        stats.add(step, stage.active)
        logprobs = output.logprobs.float().cpu()
        values = torch.zeros(len(logprobs), 1) if output.values is None else output.values.float().cpu()
        stage.inputs.append({name: tensor.cpu() for name, tensor in output.forward_inputs.items()})
        stage.steps.append(
            {
                "logprobs": logprobs,
                "values": values,
                "rewards": torch.from_numpy(step.reward.copy()),
                "valid": torch.from_numpy(step.valid.copy()),
                "terminated": torch.from_numpy(step.terminated.copy()),
                "truncated": torch.from_numpy(step.truncated.copy()),
                "bootstrap_values": self._bootstrap(step, values.shape[1]),
                "task_id": stage.task_id,
                "success": torch.from_numpy(step.success.copy()),
            }
        )
        if self.keep_frames:
            stage.steps[-1]["frames"] = torch.from_numpy(self._frames(stage, step))
        if not self.config.env.train.auto_reset:
            stage.active = stage.active & ~step.done
        stage.observation = step.observation
        self._lap("policy", clock)

    def _frames(self, stage: Stage, step: EnvStep) -> NDArray[np.uint8]:
        """Return ``uint8[B,H,W,3]``: what the first camera sees after the chunk, of the episode that it belongs to."""
        assert stage.observation is not None
        frames = step.observation.images[:, 0].copy()
        if self.config.env.train.auto_reset:  # where an episode has ended, that is the start of the next one
            frames[step.done] = stage.observation.images[step.done, 0]
        if step.final_observation is not None:
            frames[step.final_mask] = step.final_observation.images[step.final_mask, 0]
        return frames

    def _bootstrap(self, step: EnvStep, num_values: int) -> Tensor:
        """Return ``float32[B,K]``: the value of the last observation of episodes that the step limit ended, else 0."""
        values = torch.zeros(len(step.reward), num_values)
        rows = np.flatnonzero(step.final_mask & step.valid.any(axis=1))
        wanted = self.needs_values and self.config.algorithm.bootstrap_type == "truncation"
        if wanted and len(rows) and step.final_observation is not None:
            values[torch.from_numpy(rows)] = self.engine.values(step.final_observation.select(rows))
        return values

    def _stack(self, stage: Stage, iteration: int, epoch: int) -> TrajectoryBatch:
        clock = time.perf_counter()
        assert stage.observation is not None
        last = (
            self.engine.values(stage.observation) if self.needs_values else torch.zeros_like(stage.steps[0]["values"])
        )
        columns: dict[str, Any] = {name: torch.stack([step[name] for step in stage.steps]) for name in stage.steps[0]}
        inputs = {name: torch.stack([step[name] for step in stage.inputs]) for name in stage.inputs[0]}
        columns["values"] = torch.cat([columns["values"], last[None]])
        version = torch.full(columns["task_id"].shape, iteration, dtype=torch.int64)
        group_id = self._group_ids(stage, epoch).expand(version.shape)
        self._lap("policy", clock)
        return TrajectoryBatch.from_rollout(forward_inputs=inputs, policy_version=version, group_id=group_id, **columns)

    def _group_ids(self, stage: Stage, epoch: int) -> Tensor:
        """Return ``int64[B]`` of a stage's environments; no two rollouts share a group."""
        size = self.config.algorithm.group_size
        rows = torch.arange(self.num_envs)[stage.rows]
        return epoch * (self.num_envs // size) + rows // size

    def _lap(self, name: str, clock: float) -> float:
        now = time.perf_counter()
        self.seconds[name] += now - clock
        return now
