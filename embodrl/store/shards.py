"""Finished episodes on their way from a collector into a store, as LeRobot datasets (shards) that never change.

A finished episode is committed to a local dataset first, which becomes a shard when it is full and is then copied into
the store. Whatever kills the collector, or however long the store is away: the next start finds committed episodes on
the disk, and what was under way in ``progress``, which is saved with them.
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
from embodrl.errors import StoreError
from embodrl.fields import Fields, read_fields
from embodrl.storage.atomic import remove
from embodrl.store.store import Store

EPISODES = "episodes"
"""What shards are below, in a store."""
REMOVED = ".removed"
"""A shard in the spool that is being deleted."""
MERGED = "="
"""In the name of a merged shard, ``COLLECTOR=FIRST-LAST``; no name of a collector has it."""


def place_of(name: str) -> tuple[str, int]:
    """Return the collector of a shard, and the number of its first part: shards are read in this order."""
    collector, _, span = name.rpartition("/")[2].rpartition(MERGED)
    return (collector, int(span[:6])) if collector else (span[:-7], int(span[-6:]))


def newest_of_each(names: Sequence[str]) -> set[str]:
    """Return the newest shard that each collector itself has written: without its disk, it continues after that."""
    own = sorted((name for name in names if MERGED not in name), key=place_of)
    return set({place_of(name)[0]: name for name in own}.values())


class ShardWriter:
    """Writes the episodes of one collector.

    Args:
        store: gets the shards.
        spool: directory of this collector alone, on a disk that outlives the process.
        collector: its name.
        make_writer: returns the writer of a dataset in a directory, of which an interrupted one is continued.
        capacity: episodes in a shard.
        longest_s: seconds after which a shard with fewer is complete.
        meta: what else ``embodrl.json`` of a shard says.

    Attributes:
        progress: what the last ``add`` was given, by this process or an earlier one; None for a new collector.
    """

    def __init__(
        self,
        store: Store,
        spool: Path,
        collector: str,
        make_writer: Callable[[Path], LeRobotWriter],
        capacity: int,
        longest_s: float,
        meta: Mapping[str, object] | None = None,
    ) -> None:
        self._meta = dict(meta or {})
        self._store = store
        self._spool = spool
        self._collector = collector
        self._make_writer = make_writer
        self._capacity = capacity
        self._longest_s = longest_s
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
        """Find the newest progress, on the disk or else in the store; return the number of the next shard."""
        if complete := self._complete():
            self.progress = read_fields(complete[-1] / OWN_META).fields("collector")
            return int(complete[-1].name[-6:]) + 1
        mine = [name for name in self._store.names(EPISODES) if name[:-7] == f"{EPISODES}/{self._collector}"]
        if mine and (mark := self._store.mark(mine[-1])) is not None:
            self.progress = mark.fields("collector")
            return int(mine[-1][-6:]) + 1
        return 0

    def add(self, episodes: Sequence[DemoEpisode], progress: Mapping[str, object]) -> None:
        """Make episodes survive a kill, together with what their collector needs to continue after them.

        Raises:
            OutputError: the disk is full.
        """
        for episode in episodes:
            assert episode.id is not None, "the store counts episodes by it"
            self._writer.add(episode)
            self._ids.append(episode.id)
        self._writer.commit({"collector": dict(progress), "ids": self._ids})
        if len(self._ids) >= self._capacity or time.monotonic() - self._since > self._longest_s:
            self.finish(progress)

    def finish(self, progress: Mapping[str, object]) -> None:
        """Complete the present shard, and begin the next one."""
        if self._ids:
            self._writer.close({**self._meta, "collector": dict(progress), "ids": self._ids})
            self._number = self._number + 1
            self._ids = []
            self._writer = self._make_writer(self._path(self._number))
        self._since = time.monotonic()

    def upload(self) -> None:
        """Copy complete shards into the store; the newest stays on the disk, too, until there is another.

        Raises:
            StoreError: the store can't be reached; the shards stay on the disk.
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
            path.rename(self._spool / REMOVED)  # a kill leaves no part of a shard that the store would refuse
            remove(self._spool / REMOVED)

    def close(self) -> None:
        """Release the present shard, whose committed episodes stay on the disk."""
        self._writer.abort()


@dataclass
class _Part:
    """What the window has of a shard: ``ids`` of the episodes that were read for it, and the usable ones of them."""

    shard: str
    ids: list[str]
    demos: Demos


class ShardReader:
    """Follows the episodes of a store: each is read once, by its id.

    Args:
        store: with the shards.
        cache: directory for copies of them.
        cameras: in the order of the policy's.
        size: height and width of pictures.
        window: newest usable episodes kept.
        successes_only: episodes that were not solved are counted, and not used.
        corrections_only: the same of those in which the policy alone acted.

    Attributes:
        shards: names of those read so far, in their order.
        ids: of the episodes in them.
        demos: the usable episodes of the window; None before there is one.
    """

    def __init__(
        self,
        store: Store,
        cache: Path,
        cameras: Sequence[str],
        size: tuple[int, int],
        window: int,
        successes_only: bool,
        corrections_only: bool = False,
    ) -> None:
        self._store = store
        self._cache = cache
        self._cameras = cameras
        self._size = size
        self._window = window
        self._successes_only = successes_only
        self._corrections_only = corrections_only
        self.shards: list[str] = []
        self.ids: set[str] = set()
        self._parts: list[_Part] = []
        self.demos: Demos | None = None

    def poll(self) -> bool:
        """Read the shards that are new; return whether there were any.

        Raises:
            StoreError: the store can't be reached, or a shard is damaged.
        """
        known = set(self.shards)
        names = sorted((name for name in self._store.names(EPISODES) if name not in known), key=place_of)
        new = [name for name in names if self._follow(name)]
        if new:
            self._trim()
        return bool(new)

    def restore(self, state: Fields) -> None:
        """Be as the reader that ``state`` was called of, from merged shards where those of that time are gone.

        Raises:
            StoreError: a shard of the window can't be read any more.
        """
        used = [(part.text("shard"), part.texts("ids")) for part in state.objects("used")]
        self.shards = state.texts("shards")
        self.ids = set(state.texts("ids"))
        for name, ids in used:
            self._read(self._source(name, set(ids)), set(ids))
        self._trim()

    @property
    def finished(self) -> list[str]:
        """The shards that are not needed any more, not even after a restart from here."""
        used = {part.shard for part in self._parts}
        return [name for name in self.shards if name not in used]

    def state(self) -> dict[str, object]:
        """Return what ``restore`` takes, as JSON."""
        return {
            "shards": self.shards,
            "used": [{"shard": part.shard, "ids": part.ids} for part in self._parts],
            "ids": sorted(self.ids.difference(*(part.ids for part in self._parts))),
        }

    def _source(self, name: str, ids: set[str]) -> str:
        """Return the shard if it is there, else the merged one that its episodes went into."""
        if self._store.mark(name) is not None:
            return name
        for other in self._store.names(EPISODES):
            mark = self._store.mark(other) if MERGED in other else None
            if mark is not None and ids.issubset(mark.texts("ids")):
                return other
        return name

    def _follow(self, name: str) -> bool:
        """Read a shard; False if it is gone again, since its episodes were merged into another."""
        mark = self._store.mark(name)
        if mark is None:
            return False
        ids = set(mark.texts("ids"))
        for part in self._parts:  # from now on, from where they are kept
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
        """Take the expected episodes of a shard that are not known yet."""
        directory = self._cache / name.rpartition("/")[2]
        mark = self._store.get(name, directory)
        demos = load_demos(directory, None, self._cameras, self._size)
        shutil.rmtree(directory)
        ids = mark.texts("ids")
        if len(ids) != len(demos.success):
            raise StoreError(f"{name} has {len(demos.success)} episodes and {len(ids)} ids", code="store-damaged")
        fresh = [number for number, one in enumerate(ids) if one in expected and one not in self.ids]
        wanted = [number for number in fresh if demos.success[number] or not self._successes_only]
        if self._corrections_only:
            corrected = set[int]() if demos.acted_by is None else set(demos.episode[demos.acted_by != POLICY].tolist())
            wanted = [number for number in wanted if number in corrected]
        self.ids.update(ids[number] for number in fresh)
        if wanted:
            self._parts.append(_Part(name, [ids[number] for number in fresh], demos.select(wanted)))

    def _trim(self) -> None:
        parts = [part.demos for part in self._parts]
        while parts and sum(demos.num_episodes for demos in parts[1:]) >= self._window:
            self._parts.pop(0)
            parts.pop(0)
        self.demos = Demos.concat(parts) if parts else None
