"""Rollouts of processes that joined a run, in place of the trainer's own: `embodrl train` with ``store.url``."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from embodrl.config.identity import ABSENT, changes, describe
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
from embodrl.store.store import Retry, Store
from embodrl.workers.async_collector import PLAYERS, join_shards, shard_settings
from embodrl.workers.collector import Metrics, NoCollector, RolloutState, rollout_metrics
from embodrl.workers.lockstep import ShardMeta, meta_of
from embodrl.workers.saved_rollouts import check_policy

logger = logging.getLogger(__name__)

NUM_ENVS = "env.train.total_num_envs"
_LOOK_S = 0.2


def rollout_settings(config: Config) -> dict[str, object]:
    """Return the settings that rollouts depend on, by key: those of the trainer and of all who joined it agree."""
    found = shard_settings(config, 1)
    return {key: value for key, value in found.items() if key not in (PLAYERS, NUM_ENVS)}


class SharedRollouts(NoCollector):
    """Takes the oldest rollouts of a store until they have an update's environments; each counts once.

    Rollouts that began more than ``runner.max_staleness`` updates ago, or with weights that this run has not made, are
    rejected. The ledger of a checkpoint is that of its updates: what an interrupted update had taken is read again.

    Args:
        directory: for copies of rollouts while they are read.
        weights: are uploaded again after an outage.
        should_stop: polled while waiting.
    """

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine,
        store: Store,
        directory: Path,
        weights: PublishedWeights,
        should_stop: Callable[[], bool],
    ) -> None:
        super().__init__(config, engine)
        self._store = store
        self._directory = directory
        self._weights = weights
        self._should_stop = should_stop
        self._retry = Retry(logger.warning)
        self._settings = rollout_settings(config)
        self._ledger = Ledger()
        self._waiting: dict[str, SharedRollout] = {}
        self._given: dict[str, SharedRollout] = {}  # to the update in progress, which may be undone
        self._metas: list[ShardMeta] = []
        self._num_groups = 0
        self._waited_s = 0.0
        self._rejected = 0
        self._env_steps_dropped = 0

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, Metrics]:
        self.undo()
        self._metas = []
        self._num_groups = 0
        self._waited_s = 0.0
        batch, metrics = self._gather(rows_of_update(self.config))
        # Steps of rejected rollouts were simulated, so they count, once.
        batch.meta["env_steps"] += self._env_steps_dropped
        return batch, metrics

    def gather_more(self, iteration: int, epoch: int) -> tuple[TrajectoryBatch, Metrics]:
        """Return rollouts of as many further environments as the run has."""
        return self._gather(self.config.env.train.total_num_envs)

    def _gather(self, rows: int) -> tuple[TrajectoryBatch, Metrics]:
        started_s = time.perf_counter()
        while (chosen := self._choose(rows)) is None:
            if self._should_stop():
                raise InterruptedError
            if not self._retry(self._poll, default=False):
                self._weights.catch_up()
                self._sleep(store_settings(self.config).poll_s)
        self._waited_s += time.perf_counter() - started_s
        taken = {name: self._waiting.pop(name) for name in chosen}
        self._given |= taken
        batches = [shared.batch for shared in taken.values()]
        self._metas += [meta_of(batch) for batch in batches]
        whole = join_shards(batches, 0, self._num_groups)
        self._num_groups = int(whole["group_id"].max()) + 1
        metrics: Metrics = {
            "staleness/queue": float(len(self._waiting)),
            "staleness/rejected_shards": float(self._rejected),
            "time/wait_s": self._waited_s,
        }
        return whole, rollout_metrics(self._metas) | metrics

    def _choose(self, rows: int) -> list[str] | None:
        """Return the oldest rollouts with so many environments; None while there are fewer."""
        version = self.engine.version
        for name, shared in list(self._waiting.items()):
            if not 0 <= version - shared.began <= self.config.runner.max_staleness:
                self._ledger.add(shared.collector, shared.number)
                self._env_steps_dropped += int(shared.batch.meta["env_steps"])
                self._rejected += 1
                del self._waiting[name]
        chosen: list[str] = []
        for name, shared in sorted(self._waiting.items(), key=lambda item: (item[1].began, item[1].number, item[0])):
            if shared.rows <= rows:
                rows -= shared.rows
                chosen.append(name)
        return None if rows else chosen

    def _poll(self) -> bool:
        """Read one new rollout, the oldest number first; return whether there was any.

        Raises:
            StoreError: the store can't be reached, or a rollout was made with other settings.
        """
        known = self._waiting.keys() | self._given.keys()
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
        self._check(name, shared, mark)
        self._waiting[name] = shared
        return True

    def _check(self, name: str, shared: SharedRollout, mark: Fields) -> None:
        if other := changes(mark.content, self._settings):
            hint = "let it join the run (`embodrl join`), which takes the run's settings"
            if lost := [key for key, (_, new) in other.items() if new is ABSENT]:
                hint += f"; this run has no {', '.join(lost)}"
            message = f"{name} in {self._store} was made with other settings: {describe(other)}"
            raise StoreError(message, hint, code="store-other-settings")
        check_policy(f"{name} in {self._store}", shared.batch, self.config)

    def _sleep(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and not self._should_stop():
            time.sleep(min(_LOOK_S, seconds))

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        super().update_weights(weights, version)
        for shared in self._given.values():
            self._ledger.add(shared.collector, shared.number)
        self._given = {}
        self._env_steps_dropped = 0

    def undo(self) -> None:
        """Give the rollouts of the current update to the next one."""
        self._waiting |= self._given
        self._given = {}

    def kept(self) -> None:
        """Tell those who joined what the newest checkpoint has taken, and remove it from the store."""
        demand = Demand(
            self.engine.version, rows_of_update(self.config), self.config.runner.max_staleness, self._ledger
        )

        def tell() -> None:
            self._store.remove(DONE)  # of a run that has ended before, and goes on
            demand.put(self._store)
            for name in removable(self._store.names(ROLLOUTS), self._ledger):
                self._store.remove(name)

        self._retry(tell)

    def state(self) -> RolloutState:
        return RolloutState(
            {
                "ledger": self._ledger.content(),
                "rejected": self._rejected,
                "env_steps_dropped": self._env_steps_dropped,
            }
        )

    def load_state(self, saved: RolloutState, version: int) -> None:
        fields = Fields(saved.state, "the checkpoint's rollouts", StoreError)
        self._ledger = Ledger.read(fields.fields("ledger"))
        self._rejected = fields.integer("rejected")
        self._env_steps_dropped = fields.integer("env_steps_dropped")
        self._waiting = {}
        self._given = {}
