"""Finished episodes on their way from a collector into a store, as immutable LeRobot datasets (shards).

A finished episode is first committed to a local dataset, which becomes a shard when full and is then copied into the
store. After any kill or store outage, the next start finds committed episodes on disk, and pending attempts in
``progress``, which is saved with them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from embodrl.data.demos import DemoEpisode, Demos
from embodrl.data.lerobot import OWN_META
from embodrl.data.lerobot_writer import LeRobotWriter
from embodrl.data.load import load_demos
from embodrl.data.replay import POLICY
from embodrl.data.store_shards import EPISODES
from embodrl.errors import StoreError
from embodrl.fields import Fields, read_fields
from embodrl.storage.atomic import remove
from embodrl.store.store import Store

_EVERY = 2**62
REMOVED = ".removed"
"""A shard in the spool that is being deleted."""
MERGED = "="
"""Separator in the name of a merged shard, ``COLLECTOR=FIRST-LAST``; no collector name contains it."""


def place_of(name: str) -> tuple[str, int]:
    """Return the collector and first part number of a shard: the reading order."""
    collector, _, span = name.rpartition("/")[2].rpartition(MERGED)
    return (collector, int(span[:6])) if collector else (span[:-7], int(span[-6:]))


def newest_of_each(names: Sequence[str]) -> set[str]:
    """Return the newest unmerged shard of each collector, from which it resumes if it has lost its disk."""
    own = sorted((name for name in names if MERGED not in name), key=place_of)
    return set({place_of(name)[0]: name for name in own}.values())


@dataclass(frozen=True)
class ShardSize:
    """When a shard is complete: after so many episodes, or after so many seconds with fewer."""

    episodes: int
    seconds: float


@dataclass(frozen=True)
class EpisodeFilter:
    """The episodes that are used; the others are only counted.

    Attributes:
        successes_only: no failed ones.
        corrections_only: none without corrections.
    """

    successes_only: bool
    corrections_only: bool = False


class ShardWriter:
    """Writes the episodes of one collector.

    Args:
        spool: directory of this collector alone, on a disk that outlives the process.
        make_writer: returns the writer of a dataset in a directory, resuming an interrupted one.
        meta: further entries of ``embodrl.json`` of a shard.

    Attributes:
        progress: argument of the last ``add``, by this process or an earlier one; None for a new collector.
    """

    def __init__(
        self,
        store: Store,
        spool: Path,
        collector: str,
        make_writer: Callable[[Path], LeRobotWriter],
        size: ShardSize,
        meta: Mapping[str, object] | None = None,
    ) -> None:
        self._meta = dict(meta or {})
        self._store = store
        self._spool = spool
        self._collector = collector
        self._make_writer = make_writer
        self._size = size
        self._ids: list[str] = []
        self._uploaded: set[Path] = set()
        self._since = time.monotonic()
        self.progress: Fields | None = None
        spool.mkdir(parents=True, exist_ok=True)
        self._number = self._recover()
        self._writer = make_writer(self._path(self._number))
        if self._writer.progress is not None:
            self.progress = self._writer.progress.fields("collector")
            self._ids = self._writer.progress.texts("ids")

    def _path(self, number: int) -> Path:
        return self._spool / f"{self._collector}-{number:06d}"

    def _complete(self) -> list[Path]:
        return sorted(self._spool.glob(f"{self._collector}-{'[0-9]' * 6}"))

    def _recover(self) -> int:
        """Find the newest progress, on disk or else in the store; return the number of the next shard."""
        if complete := self._complete():
            self.progress = read_fields(complete[-1] / OWN_META).fields("collector")
            return int(complete[-1].name[-6:]) + 1
        mine = [name for name in self._store.names(EPISODES) if name[:-7] == f"{EPISODES}/{self._collector}"]
        if mine and (mark := self._store.mark(mine[-1])) is not None:
            self.progress = mark.fields("collector")
            return int(mine[-1][-6:]) + 1
        return 0

    def add(self, episodes: Sequence[DemoEpisode], progress: Mapping[str, object]) -> None:
        """Save episodes durably, together with the state their collector resumes from.

        Raises:
            OutputError: the disk is full.
        """
        for episode in episodes:
            assert episode.id is not None, "the store counts episodes by it"
            self._writer.add(episode)
            self._ids.append(episode.id)
        self._writer.commit({"collector": dict(progress), "ids": self._ids})
        if len(self._ids) >= self._size.episodes or time.monotonic() - self._since > self._size.seconds:
            self.finish(progress)

    def finish(self, progress: Mapping[str, object]) -> None:
        if self._ids:
            self._writer.close({**self._meta, "collector": dict(progress), "ids": self._ids})
            self._number = self._number + 1
            self._ids = []
            self._writer = self._make_writer(self._path(self._number))
        self._since = time.monotonic()

    def upload(self) -> None:
        """Copy complete shards into the store; the newest also stays on disk until the next one.

        Raises:
            StoreError: the store can't be reached; the shards stay on disk.
        """
        complete = self._complete()
        for path in complete:
            if path in self._uploaded:
                continue
            meta = read_fields(path / OWN_META)
            facts = {"collector": meta.fields("collector").content, "ids": meta.texts("ids")}
            self._store.put(path, f"{EPISODES}/{path.name}", facts)
            self._uploaded.add(path)
        for path in complete[:-1]:
            remove(self._spool / REMOVED)
            path.rename(self._spool / REMOVED)  # so that a kill leaves no partial shard, which the store would refuse
            remove(self._spool / REMOVED)

    def close(self) -> None:
        """Release the current shard, whose committed episodes stay on disk."""
        self._writer.abort()


@dataclass
class ShardPart:
    """A shard's part of the window: ``ids`` of the episodes read for it, and the usable episodes among them."""

    shard: str
    ids: list[str]
    demos: Demos


class ShardReader:
    """Follows the episodes of a store: each is read once, by its id.

    Args:
        cache: directory for copies of them.
        cameras: cameras, in the order of the policy's.
        window: number of newest usable episodes kept.
        wanted: episodes to use.

    Attributes:
        shards: names of the shards read so far, in order.
        ids: ids of the episodes in them.
        demos: usable episodes of the window; None before the first.
    """

    _with_outcomes = False

    def __init__(
        self,
        store: Store,
        cache: Path,
        cameras: Sequence[str],
        size: tuple[int, int],
        window: int,
        wanted: EpisodeFilter,
    ) -> None:
        self._store = store
        self._cache = cache
        self._cameras = cameras
        self._size = size
        self._window = window
        self._wanted = wanted
        self.shards: list[str] = []
        self.ids: set[str] = set()
        self._parts: list[ShardPart] = []
        self._ids_of: dict[str, set[str]] = {}  # of the shards followed since the start of the process
        self.demos: Demos | None = None

    def poll(self) -> bool:
        """Read new shards; return whether there were any.

        Raises:
            StoreError: the store can't be reached, or a shard is damaged.
        """
        new = [name for name in sorted(self._unknown(), key=place_of) if self._follow(name)]
        if new:
            self._trim()
        return bool(new)

    def _unknown(self) -> list[str]:
        known = set(self.shards)
        return [name for name in self._store.names(EPISODES) if name not in known]

    def restore(self, state: Fields) -> None:
        """Restore a ``state``, reading merged shards in place of removed ones.

        Raises:
            StoreError: a shard of the window can no longer be read.
        """
        used = [(part.text("shard"), part.texts("ids")) for part in state.objects("used")]
        self.shards = state.texts("shards")
        self.ids = set(state.texts("ids"))
        for name, ids in used:
            self._read(self._source(name, set(ids)), set(ids))
        self._trim()

    @property
    def finished(self) -> list[str]:
        """The shards that are no longer needed, not even after a restart from here."""
        used = {part.shard for part in self._parts}
        return [name for name in self.shards if name not in used]

    def state(self) -> dict[str, object]:
        """Return the argument of ``restore``, as JSON."""
        return {
            "shards": self.shards,
            "used": [{"shard": part.shard, "ids": part.ids} for part in self._parts],
            "ids": sorted(self.ids.difference(*(part.ids for part in self._parts))),
        }

    def _source(self, name: str, ids: set[str]) -> str:
        """Return the shard if it still exists, else the merged one with its episodes."""
        if self._store.mark(name) is not None:
            return name
        for other in self._store.names(EPISODES):
            mark = self._store.mark(other) if MERGED in other else None
            if mark is not None and ids.issubset(mark.texts("ids")):
                return other
        return name

    def _follow(self, name: str) -> bool:
        """Read a shard; False if it was removed meanwhile, since its episodes were merged into another."""
        mark = self._store.mark(name)
        if mark is None:
            return False
        ids = self._ids_of[name] = set(mark.texts("ids"))
        for part in self._parts:  # read from their current shard from now on
            if ids.issuperset(part.ids):
                part.shard = name
        if not ids <= self.ids:
            try:
                self._read(name, ids)
            except StoreError as error:
                if error.code != "store-missing":
                    raise
                return False
        self.shards.append(name)
        return True

    def _read(self, name: str, expected: set[str]) -> None:
        """Read the expected episodes of a shard that are not yet known."""
        directory = self._cache / name.rpartition("/")[2]
        mark = self._store.get(name, directory)
        self._check(directory)
        demos = load_demos(directory, None, self._cameras, self._size)
        shutil.rmtree(directory)
        ids = mark.texts("ids")
        if len(ids) != len(demos.success):
            raise StoreError(f"{name} has {len(demos.success)} episodes and {len(ids)} ids", code="store-damaged")
        fresh = [number for number, one in enumerate(ids) if one in expected and one not in self.ids]
        wanted = [number for number in fresh if demos.success[number] or not self._wanted.successes_only]
        if self._wanted.corrections_only:
            corrected = set[int]() if demos.acted_by is None else set(demos.episode[demos.acted_by != POLICY].tolist())
            wanted = [number for number in wanted if number in corrected]
        self.ids.update(ids[number] for number in fresh)
        if wanted:
            chosen = demos.select(wanted, self._with_outcomes)
            self._parts.append(ShardPart(name, [ids[number] for number in fresh], chosen))

    def _check(self, directory: Path) -> None:
        """Raise if the episodes of a shard in this directory do not fit the run; here all do."""

    def _trim(self) -> None:
        parts = [part.demos for part in self._parts]
        while parts and sum(demos.num_episodes for demos in parts[1:]) >= self._window:
            self._parts.pop(0)
            parts.pop(0)
        self.demos = Demos.concat(parts) if parts else None


class TransitionReader(ShardReader):
    """Reads all episodes once, with the rewards of actions and the weights that chose them; ``demos`` stays None.

    Args:
        check: called with the directory of each shard; raises if its episodes do not fit the run.
    """

    _with_outcomes = True

    def __init__(
        self, store: Store, cache: Path, cameras: Sequence[str], size: tuple[int, int], check: Callable[[Path], None]
    ) -> None:
        super().__init__(store, cache, cameras, size, _EVERY, EpisodeFilter(successes_only=False))
        self._fits = check

    def _check(self, directory: Path) -> None:
        self._fits(directory)

    def poll(self, most: int | None = None) -> bool:
        """Read new shards, at most so many, of all collectors in turn; see ShardReader."""
        names = sorted(self._unknown(), key=lambda name: place_of(name)[::-1])
        new = [name for name in names[:most] if self._follow(name)]
        return bool(new)

    def take(self) -> list[ShardPart]:
        """Return the parts that were read and not taken yet, and keep them no longer; their ids stay known."""
        taken = self._parts
        self._parts = []
        return taken

    def unread(self, parts: Sequence[ShardPart]) -> dict[str, object]:
        """Return the argument of ``restore`` for a reader that has not read these taken parts, nor those not taken."""
        ids = {one for part in (*parts, *self._parts) for one in part.ids}
        left = [name for name in self.shards if not ids & self._ids_of.get(name, set())]
        return {"shards": left, "used": [], "ids": sorted(self.ids - ids)}
