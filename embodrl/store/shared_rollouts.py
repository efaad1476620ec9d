"""Rollouts of processes that joined a run, in place of the trainer's own: `embodrl train` with ``store.url``."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from embodrl.config.identity import changes, describe
from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import StoreError
from embodrl.fields import Fields
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.store.config import store_settings
from embodrl.store.learner import PublishedWeights
from embodrl.store.parts import DONE
from embodrl.store.rollout_shards import (
    ROLLOUTS,
    Demand,
    Ledger,
    SharedRollout,
    removable,
    rows_of_update,
)
from embodrl.store.shards import place_of
from embodrl.store.store import Retry, pause
from embodrl.workers.async_collector import PLAYERS, join_shards, shard_settings
from embodrl.workers.collector import Metrics, NoCollector, RolloutState, rollout_metrics
from embodrl.workers.lockstep import ShardMeta, meta_of
from embodrl.workers.reward import RewardWorker
from embodrl.workers.saved_rollouts import check_policy

logger = logging.getLogger(__name__)

NUM_ENVS = "env.train.total_num_envs"


def rollout_settings(config: Config) -> dict[str, object]:
    """Return the settings that rollouts depend on, by key; the trainer and all joined processes must share them."""
    found = shard_settings(config, 1)
    return {key: value for key, value in found.items() if key not in (PLAYERS, NUM_ENVS)}


@dataclass
class _Update:
    """The update in progress, which may be undone: its rollouts, groups so far, seconds waited, and dropped steps."""

    rollouts: dict[str, SharedRollout] = field(default_factory=dict[str, SharedRollout])
    metas: list[ShardMeta] = field(default_factory=list[ShardMeta])
    num_groups: int = 0
    waited_s: float = 0.0
    env_steps_dropped: int = 0


class SharedRollouts(NoCollector):
    """Takes the oldest rollouts of a store until they have an update's environments; each counts once.

    Rejected are rollouts that began more than ``runner.max_staleness`` updates ago, that are by weights which this run
    has not made (yet), or by other settings. The ledger of a checkpoint is that of its updates: what an interrupted
    update had taken is read again.

    Args:
        directory: for copies of rollouts while they are read.
        weights: those in the store, uploaded again after an outage.
        rewards: gets the rewards that came with the rollouts.
        should_stop: polled while waiting.
    """

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine,
        directory: Path,
        weights: PublishedWeights,
        rewards: RewardWorker,
        should_stop: Callable[[], bool],
    ) -> None:
        super().__init__(config, engine)
        self._engine = engine
        self._store = weights.store
        self._directory = directory
        self._weights = weights
        self._rewards = rewards
        self._should_stop = should_stop
        self._retry = Retry(logger.warning)
        self._settings = rollout_settings(config)
        self._ledger = Ledger()
        self._waiting: dict[str, SharedRollout] = {}
        self._update = _Update()
        self._rejected = 0
        self._env_steps_dropped = 0  # of rejected rollouts, in no update yet
        self._told: Demand | None = None
        self._warned: set[str] = set()

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, Metrics]:
        self.undo()
        return self._gather(rows_of_update(self.config))

    def gather_more(self, iteration: int, epoch: int, groups: int) -> tuple[TrajectoryBatch, Metrics]:
        """Return the oldest further rollouts that have together at least so many groups."""
        return self._gather(groups * self.config.algorithm.group_size)

    def _gather(self, rows: int) -> tuple[TrajectoryBatch, Metrics]:
        started_s = time.perf_counter()
        self._retry(self._tell, rows)
        while (chosen := self._choose(rows)) is None:
            if self._should_stop():
                raise InterruptedError
            if not self._retry(self._poll, default=False):
                self._weights.catch_up()
                self._retry(self._tell, rows)
                pause(store_settings(self.config).poll_s, self._should_stop)
        update = self._update
        update.waited_s += time.perf_counter() - started_s
        taken = {name: self._waiting.pop(name) for name in chosen}
        update.rollouts |= taken
        batches = [shared.batch for shared in taken.values()]
        update.metas += [meta_of(batch) for batch in batches]
        # Steps of rejected rollouts were simulated, so they count, once.
        whole = join_shards(batches, self._env_steps_dropped, update.num_groups)
        update.env_steps_dropped += self._env_steps_dropped
        self._env_steps_dropped = 0
        update.num_groups = int(whole["group_id"].max()) + 1
        metrics: Metrics = {
            "staleness/queue": float(len(self._waiting)),
            "staleness/rejected_shards": float(self._rejected),
            "time/wait_s": update.waited_s,
        }
        return whole, rollout_metrics(update.metas) | metrics

    def _choose(self, rows: int) -> list[str] | None:
        """Return rollouts with so many environments, of the oldest that add up to them; None if there are none."""
        version = self._engine.version
        for name, shared in list(self._waiting.items()):
            if shared.newest > version or version - shared.began > self.config.runner.max_staleness:
                del self._waiting[name]
                self._reject(shared)
        sums: dict[int, list[str]] = {0: []}
        for name, shared in sorted(self._waiting.items(), key=lambda item: (item[1].began, item[1].number, item[0])):
            for count, names in list(sums.items()):
                if count + shared.rows <= rows:
                    sums.setdefault(count + shared.rows, [*names, name])
            if rows in sums:
                return sums[rows]
        return None

    def _reject(self, shared: SharedRollout) -> None:
        self._ledger.add(shared.collector, shared.number)
        self._env_steps_dropped += shared.env_steps
        self._rejected += 1

    def _tell(self, wanted: int) -> None:
        """Tell those who joined what counts already, and how much may wait; raises StoreError.

        Args:
            wanted: environments that are waited for.
        """
        ledger = Ledger.read(Fields(self._ledger.content(), "the ledger"))
        for shared in self._update.rollouts.values():  # of this update, which asks for more
            ledger.add(shared.collector, shared.number)
        rows = rows_of_update(self.config)
        waiting = sum(shared.rows for shared in self._waiting.values())
        # What waits may not add up to an update: then it takes no room.
        spare = waiting if waiting >= wanted and self._choose(wanted) is None else 0
        stale = self.config.runner.max_staleness
        demand = Demand(self._engine.version, rows, (stale + 1) * rows + spare, stale, ledger)
        if demand != self._told:
            demand.put(self._store)
            self._told = demand

    def _poll(self) -> bool:
        """Read one new rollout, the oldest number first; return whether there was any.

        Raises:
            StoreError: the store can't be reached, or a rollout is damaged.
        """
        known = self._waiting.keys() | self._update.rollouts.keys()
        names = [name for name in self._store.names(ROLLOUTS) if name not in known]
        new = [name for name in names if not self._ledger.has(*place_of(name))]
        if not new:
            return False
        marks = {one: mark for one in new if (mark := self._store.mark(one)) is not None}
        if not marks:
            return False
        name = min(marks, key=lambda one: (marks[one].integer("began"), place_of(one)[::-1]))
        copy = self._directory / name.rpartition("/")[2]
        shutil.rmtree(copy, ignore_errors=True)
        shared, mark = SharedRollout.read(self._store, name, copy)
        shutil.rmtree(copy)
        if other := changes(mark.content, self._settings):
            self._reject(shared)
            if shared.collector not in self._warned:
                self._warned.add(shared.collector)
                message = "rollouts of %s are rejected: they were made with other settings: %s"
                logger.warning(message, shared.collector, describe(other))
            return True
        check_policy(f"{name} in {self._store}", shared.batch, self.config)
        if shared.rewards is not None:
            self._rewards.adopt(shared.batch, shared.rewards)
        self._waiting[name] = shared
        return True

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        super().update_weights(weights, version)
        for shared in self._update.rollouts.values():
            self._ledger.add(shared.collector, shared.number)
        self._update = _Update()

    def undo(self) -> None:
        """Give the rollouts of the current update to the next one."""
        self._waiting |= self._update.rollouts
        self._env_steps_dropped += self._update.env_steps_dropped
        self._update = _Update()

    def resumed(self) -> None:
        """Reject what weights have made that followed the checkpoint: they are lost, and others get their numbers."""

        def clean() -> bool:
            self._store.remove(DONE)  # left by a run that has been extended
            for name in self._store.names(ROLLOUTS):
                mark = None if self._ledger.has(*place_of(name)) else self._store.mark(name)
                if mark is not None and mark.integer("newest") > self._engine.version:
                    self._ledger.add(*place_of(name))
                    self._env_steps_dropped += mark.integer("env_steps")
                    self._rejected += 1
            return True

        while not (self._retry(clean, default=False) or self._should_stop()):
            pause(store_settings(self.config).poll_s, self._should_stop)

    def kept(self) -> None:
        """Remove what the newest checkpoint has taken from the store."""

        def clean() -> None:
            for name in removable(self._store.names(ROLLOUTS), self._ledger):
                self._store.remove(name)

        self._retry(clean)

    def state(self) -> RolloutState:
        return RolloutState(
            {
                "ledger": self._ledger.content(),
                "rejected": self._rejected,
                "env_steps_dropped": self._env_steps_dropped + self._update.env_steps_dropped,
            }
        )

    def load_state(self, saved: RolloutState, version: int) -> None:
        fields = Fields(saved.state, "the checkpoint's rollouts", StoreError)
        self._ledger = Ledger.read(fields.fields("ledger"))
        self._rejected = fields.integer("rejected")
        self._env_steps_dropped = fields.integer("env_steps_dropped")
        self._waiting = {}
        self._update = _Update()
