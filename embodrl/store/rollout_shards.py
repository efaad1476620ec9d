"""Rollouts in a store: written by processes that joined a run, each taken once by its trainer.

A collector's rollouts are numbered from 0. ``taken/trainer`` says which of them the trainer has taken or rejected so
far, and how many environments may wait; what its updates have taken for good is in its checkpoints.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from embodrl.config.identity import record_of
from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import StoreError
from embodrl.fields import Fields
from embodrl.storage.json_file import write_json_file
from embodrl.store.shards import place_of
from embodrl.store.store import Store
from embodrl.workers.reward import DetachedRewards, outcomes_of
from embodrl.workers.saved_rollouts import load_rollout, save_rollout

ROLLOUTS = "rollouts"
"""Prefix of rollouts in a store."""
TAKEN = "taken/trainer"
SETTINGS = "run/settings"
"""The trainer's run: ``config``, the text of its config.yaml, and ``id``, which no other run has."""
FILE = "rollout.safetensors"
MARK = ".mark.json"
"""Facts of the mark, beside a rollout that is not in the store yet."""


@dataclass
class Ledger:
    """Numbers that were taken or rejected: of each collector those below ``next`` that are not ``open``."""

    next: dict[str, int] = field(default_factory=dict[str, int])
    open: dict[str, set[int]] = field(default_factory=dict[str, set[int]])

    def has(self, collector: str, number: int) -> bool:
        """Return whether a rollout counts already."""
        return number < self.next.get(collector, 0) and number not in self.open.get(collector, ())

    def add(self, collector: str, number: int) -> None:
        """Count a rollout."""
        skipped = self.open.setdefault(collector, set())
        skipped.update(range(self.next.get(collector, 0), number))
        skipped.discard(number)
        self.next[collector] = max(self.next.get(collector, 0), number + 1)

    def content(self) -> dict[str, object]:
        """Return the argument of ``read``, as JSON."""
        return {name: {"next": self.next[name], "open": sorted(self.open[name])} for name in sorted(self.next)}

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """Return the ledger of a ``content``."""
        parts = {name: fields.fields(name) for name in fields}
        return cls(
            {name: part.integer("next") for name, part in parts.items()},
            {name: {int(number) for number in part.numbers("open", low=0)} for name, part in parts.items()},
        )


@dataclass(frozen=True)
class Demand:
    """What the trainer says in ``taken/trainer``.

    Attributes:
        version: updates done.
        rows: environments of an update.
        room: environments that may wait for weights of ``version``.
        max_staleness: updates that a rollout may be behind when it is trained on.
        ledger: rollouts that count already, also of updates that no checkpoint has yet.
    """

    version: int
    rows: int
    room: int
    max_staleness: int
    ledger: Ledger

    def put(self, store: Store) -> None:
        """Write it; raises StoreError."""
        names = ("version", "rows", "room", "max_staleness")
        store.put_note(TAKEN, {**{name: getattr(self, name) for name in names}, "ledger": self.ledger.content()})

    @classmethod
    def of(cls, store: Store) -> Self | None:
        """Return what is written; None before the trainer has begun, or while it is being written."""
        mark = store.mark(TAKEN)
        if mark is None:
            return None
        return cls(
            version=mark.integer("version"),
            rows=mark.integer("rows"),
            room=mark.integer("room"),
            max_staleness=mark.integer("max_staleness"),
            ledger=Ledger.read(mark.fields("ledger")),
        )

    def has_room(self, store: Store, version: int) -> bool:
        """Return whether a rollout by weights of ``version`` may begin.

        Older weights leave less room: their rollouts have to be trained on sooner. Rollouts that are too old take none;
        those that others have begun are not known, so that each of them may add one. Raises StoreError.
        """
        behind = self.version - version
        if behind > self.max_staleness:
            return False  # newer weights are on their way
        waiting = 0
        for name in store.names(ROLLOUTS):
            mark = None if self.ledger.has(*place_of(name)) else store.mark(name)
            if mark is not None and 0 <= self.version - mark.integer("began") <= self.max_staleness:
                waiting += mark.integer("rows")
        return waiting < self.room - behind * self.rows


def rows_of_update(config: Config) -> int:
    """Return the environments of an update, counted once for each rollout."""
    return config.env.train.total_num_envs * config.algorithm.rollout_epoch


@dataclass(frozen=True)
class SharedRollout:
    """A rollout.

    Attributes:
        began: version of the weights when it began.
        rewards: of the run's reward function or model; None without one.
    """

    collector: str
    number: int
    began: int
    batch: TrajectoryBatch
    rewards: DetachedRewards | None = None

    @property
    def rows(self) -> int:
        """Number of environments."""
        return self.batch.batch_size[1]

    @property
    def newest(self) -> int:
        """Newest version of the weights that chose a chunk."""
        return int(self.batch.policy_version.max())

    @property
    def env_steps(self) -> int:
        """Environment steps that were simulated."""
        return int(self.batch.meta["env_steps"])

    def write(self, directory: Path, settings: Mapping[str, object]) -> None:
        """Write it into a directory, with the settings that made it; raises OutputError."""
        save_rollout(directory / FILE, self.batch, {})
        facts = {"began": self.began, "newest": self.newest, "rows": self.rows, "env_steps": self.env_steps}
        paid = {} if self.rewards is None else {"rewards": self.rewards["outcomes"]}
        write_json_file(directory / MARK, {**facts, **paid, **record_of(settings)})

    @classmethod
    def read(cls, store: Store, name: str, directory: Path) -> tuple[Self, Fields]:
        """Copy a rollout into a new directory and read it; return its mark, too.

        Raises:
            StoreError: the store can't be reached, or it is damaged.
            FileFormatError: it is no rollout.
        """
        mark = store.get(name, directory)
        batch, _ = load_rollout(directory / FILE)
        return cls(*place_of(name), mark.integer("began"), batch, _rewards(mark)), mark


def _rewards(mark: Fields) -> DetachedRewards | None:
    return {"outcomes": outcomes_of(mark, "rewards"), "waited_s": 0.0} if "rewards" in mark else None


def run_of(store: Store) -> tuple[str, str]:
    """Return the configuration of the store's trainer, and the id of its run.

    Raises:
        StoreError: no trainer has begun, or the store can't be reached.
    """
    mark = store.mark(SETTINGS)
    if mark is None:
        hint = "start it first: embodrl train ... store.url=URL"
        raise StoreError(f"{store} has no run that could be joined", hint, code="store-no-run")
    return mark.text("config"), mark.text("id")


def put_run(store: Store, config_yaml: str) -> None:
    """Write the configuration of a run that starts or resumes; raises StoreError."""
    mark = store.mark(SETTINGS)
    store.put_note(SETTINGS, {"config": config_yaml, "id": secrets.token_hex(8) if mark is None else mark.text("id")})


def removable(names: Iterable[str], ledger: Ledger) -> list[str]:
    """Return the counted rollouts, except each collector's newest, from which its numbering continues."""
    places = {name: place_of(name) for name in names}
    newest = dict(sorted(places.values()))
    return [name for name, place in places.items() if ledger.has(*place) and newest[place[0]] != place[1]]
