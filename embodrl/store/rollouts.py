"""Episodes of a store in place of rollouts: `embodrl train` with ``store.url`` learns from them by reward.

Shapes: B episodes, T chunks of the longest one, C actions in a chunk, A action dimensions, N frames.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.demos import Demos
from embodrl.data.imitation import observed
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import StoreError
from embodrl.fields import Fields
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.learners.offline.backend import OfflineBackend
from embodrl.learners.replay import ROWS_AT_ONCE, no_rewards
from embodrl.store.config import store_settings
from embodrl.store.learner import PublishedWeights
from embodrl.store.parts import DONE
from embodrl.store.shards import ShardPart, TransitionReader
from embodrl.store.shared_rollouts import SharedRollouts
from embodrl.store.store import Retry, pause
from embodrl.types import Observation
from embodrl.workers.collector import Metrics, NoCollector, RolloutState

logger = logging.getLogger(__name__)

READ = "store"
"""Key in a checkpoint: what has been read from the store."""


class StoreCollector(NoCollector):
    """Gives the episodes that arrive in a store, at least as many steps at a time as a rollout has.

    Args:
        reader: reads each episode once.
        check: raises if episodes do not fit the run.
        weights: are uploaded again after an outage.
        should_stop: polled while waiting.
    """

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine,
        reader: TransitionReader,
        weights: PublishedWeights,
        check: Callable[[Demos], None],
        should_stop: Callable[[], bool],
    ) -> None:
        super().__init__(config, engine)
        self._engine = engine
        self._reader = reader
        self._check = check
        self._weights = weights
        self._should_stop = should_stop
        self._retry = Retry(logger.warning)
        self._waiting: list[ShardPart] = []
        self._taken: list[ShardPart] = []  # by the update in progress, which may be undone

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, Metrics]:
        started_s = time.perf_counter()
        if not self._taken:
            self._retry(self._weights.store.remove, DONE)  # left by a run that has been extended
            self._taken = self._await(self.config.env.train.total_num_envs * self._steps)
        waited_s = time.perf_counter() - started_s
        demos = observed(Demos.concat([part.demos for part in self._taken], with_outcomes=True), self.config)
        batch = trajectories(demos, self.config, self._engine)
        return batch, episode_metrics(demos, self._engine.version) | {"time/wait_s": waited_s}

    @property
    def _steps(self) -> int:
        return self.config.env.train.max_steps_per_rollout_epoch * self.config.algorithm.rollout_epoch

    def _await(self, steps: int) -> list[ShardPart]:
        """Return the oldest parts, once they have so many steps; the others stay in the store.

        Raises:
            InterruptedError: the run is to stop.
        """
        while not self._should_stop():
            found = self._retry(self._reader.poll, 1, default=False)
            for part in self._reader.take():
                self._check(part.demos)
                self._waiting.append(part)
            if sum(len(part.demos.actions) for part in self._waiting) >= steps:
                taken, self._waiting = self._waiting, []
                return taken
            if not found:
                self._weights.catch_up()
                pause(store_settings(self.config).poll_s, self._should_stop)
        raise InterruptedError

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        super().update_weights(weights, version)
        self._taken = []

    def state(self) -> RolloutState:
        return RolloutState({READ: self._reader.unread([*self._waiting, *self._taken])})

    def load_state(self, saved: RolloutState, version: int) -> None:
        self._reader.restore(Fields(saved.state, "the checkpoint's rollouts", StoreError).fields(READ))


class StoreBackend(OfflineBackend):
    """Gathers from a store; simulators start with the first evaluation. Each saved version is published there."""

    def __init__(self, *arguments: object, weights: PublishedWeights, **keywords: object) -> None:
        super().__init__(*arguments, **keywords)  # type: ignore[arg-type]
        self._weights = weights

    def restored(self, engine: TrainEngine) -> None:
        self._weights.drop_newer(engine.version)
        if isinstance(self.collector, SharedRollouts):
            self.collector.resumed()
        self.saved(engine)

    def saved(self, engine: TrainEngine) -> None:
        self._weights.publish(engine, engine.version)
        if isinstance(self.collector, SharedRollouts):
            self.collector.kept()

    def finish(self, version: int, is_to_stop: Callable[[], bool]) -> None:
        self._weights.finish(version, is_to_stop, store_settings(self.config).poll_s)


def trajectories(demos: Demos, config: Config, engine: RolloutEngine) -> TrajectoryBatch:
    """Return recorded episodes as a rollout, an episode in each column; rows after its end are not valid.

    The last chunk of an episode that was not terminated is not valid either: what followed it is not recorded.

    Raises:
        EmbodrlError: they have no rewards.
    """
    outcomes = demos.outcomes
    if outcomes is None:
        raise no_rewards(str(store_settings(config).url))
    size = config.model.num_action_chunks
    lengths = np.bincount(demos.episode, minlength=demos.num_episodes)
    first = np.cumsum(lengths) - lengths  # [B]
    last = first + lengths - 1
    steps = -(-int(lengths.max()) // size)
    starts = first[None] + size * np.arange(steps)[:, None]  # [T,B]
    is_there = starts <= last
    starts = np.minimum(starts, last)
    ends = outcomes.terminated[last] & (starts + size > last)
    acted = is_there & (ends | (starts + size <= last))
    index = starts[..., None] + np.arange(size)  # [T,B,C]
    valid = (index <= last[:, None]) & acted[..., None]
    index = np.minimum(index, last[:, None])
    success = np.array([bool(one) for one in demos.success])
    by = np.zeros(len(demos.actions), np.int64) if demos.acted_by is None else demos.acted_by
    versions = np.zeros(len(demos.actions), np.int64) if demos.versions is None else demos.versions
    seen = inputs_of(demos, starts, engine)
    values = torch.zeros(steps + 1, len(lengths), 1)
    return TrajectoryBatch.from_rollout(
        forward_inputs=seen,
        final_inputs={name: torch.zeros_like(column) for name, column in seen.items()},
        values=values,
        bootstrap_values=torch.zeros_like(values[:-1]),
        rewards=torch.from_numpy(outcomes.rewards[index] * valid),
        logprobs=torch.zeros(*index.shape, config.model.action_dim),
        valid=torch.from_numpy(valid),
        terminated=torch.from_numpy(outcomes.terminated[index] & valid),
        truncated=torch.zeros(index.shape, dtype=torch.bool),
        policy_version=torch.from_numpy(versions[starts]),
        task_id=torch.from_numpy(np.broadcast_to(task_ids(demos, config.env.tasks), starts.shape).copy()),
        success=torch.from_numpy(success & is_there & (starts + size > last)),
        actions=torch.from_numpy(outcomes.executed[index]),
        source=torch.from_numpy((by[index] * valid).max(-1).astype(np.int8)),
        meta={"env_steps": len(demos.actions)},
    )


def task_ids(demos: Demos, tasks: Sequence[str]) -> NDArray[np.int64]:
    """Return the place of each episode's task among the run's, ``int64[B]``.

    Raises:
        StoreError: an episode is of another task.
    """
    if strange := sorted(set(demos.tasks) - set(tasks)):
        hint = f"collect with env.tasks=[{','.join(tasks)}], or train with the tasks of the store"
        raise StoreError(f"the store has episodes of {', '.join(strange)}", hint, code="store-other-tasks")
    return np.array([tasks.index(task) for task in demos.tasks], np.int64)


def inputs_of(demos: Demos, frames: NDArray[np.int64], engine: RolloutEngine) -> dict[str, Tensor]:
    """Return the policy's inputs at frames ``int64[T,B]``, ``[T,B,...]`` by name, on the CPU."""
    rows = frames.reshape(-1)
    parts: list[dict[str, Tensor]] = []
    for some in np.array_split(rows, -(-len(rows) // ROWS_AT_ONCE)):
        tasks = np.zeros(len(some), np.int32)
        observation = Observation(demos.images[some], demos.state[some], demos.said(some), tasks)
        parts.append({name: tensor.cpu() for name, tensor in engine.inputs(observation).items()})
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {name: column.reshape(*frames.shape, *column.shape[1:]) for name, column in whole.items()}


def episode_metrics(demos: Demos, version: int) -> Metrics:
    """Return the metrics of recorded episodes, as of a rollout at a version of the weights."""
    lengths = np.bincount(demos.episode)
    metrics: Metrics = {
        "rollout/success_rate": float(np.mean([bool(one) for one in demos.success])),
        "rollout/episodes": float(len(lengths)),
        "rollout/episode_length": float(lengths.mean()),
    }
    if demos.outcomes is not None:
        metrics["rollout/return"] = float(demos.outcomes.rewards.sum() / len(lengths))
    if demos.versions is not None:
        ages = version - demos.versions
        metrics |= {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}
    return metrics
