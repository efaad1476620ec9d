"""Merges the small shards of a store into large ones, while collectors write and trainers read.

A merged shard is complete in the store, with a mark that names the shards it replaces, before the first of those is
removed. If the process is killed, each episode is still in the store, perhaps twice for a while; readers count it once,
by its id, and the next compaction removes replaced shards.

Shapes: N frames.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodrl.data import lerobot as layout
from embodrl.data.demos import REWARDS, DemoEpisode
from embodrl.data.lerobot_info import Info, read_info
from embodrl.data.lerobot_reader import load_lerobot
from embodrl.data.lerobot_writer import LeRobotWriter
from embodrl.data.parquet import Table
from embodrl.errors import StoreError
from embodrl.fields import Fields, read_fields
from embodrl.store.shards import EPISODES, MERGED, newest_of_each, place_of
from embodrl.store.store import Store

Marks = Mapping[str, Fields]


def compact(store: Store, capacity: int, say: Callable[[str], None]) -> None:
    """Merge the shards of each collector except its newest, from which a collector that has lost its disk resumes.

    Args:
        store: store with the shards; one process at a time may compact it.
        capacity: limit on episodes in a merged shard.
        say: prints status lines.

    Raises:
        StoreError: the store can't be reached, or a shard is damaged; unmerged shards are unchanged.
        OutputError: the directory for temporary files has no room for the copies.
    """
    _remove_replaced(store, _marks(store))
    marks = _marks(store)
    groups = _merge_groups(marks, capacity)
    for names in groups:
        name = _merge(store, names, marks)
        mark = store.mark(name)
        if mark is None:
            raise StoreError(f"there is no {name} in {store}", "it may have been removed", code="store-missing")
        _remove_replaced(store, {**{old: marks[old] for old in names}, name: mark})
        say(f"{name} has the {len(mark.texts('ids'))} episodes of {len(names)} shards")
    if not groups:
        say("there is nothing to merge")


def _marks(store: Store) -> dict[str, Fields]:
    found = {name: store.mark(name) for name in sorted(store.names(EPISODES), key=place_of)}
    return {name: mark for name, mark in found.items() if mark is not None}


def _merge_groups(marks: Marks, capacity: int) -> list[list[str]]:
    """Return the groups to merge: adjacent small shards with at most ``capacity`` episodes together."""
    groups: list[list[str]] = []
    kept = newest_of_each(list(marks))
    for _, names in groupby((name for name in marks if name not in kept), key=lambda name: place_of(name)[0]):
        groups.append([])
        total = 0
        for name in names:
            size = len(marks[name].texts("ids"))
            if groups[-1] and total + size > capacity:
                groups.append([])
                total = 0
            groups[-1].append(name)
            total += size
    return [group for group in groups if len(group) > 1]


def _replaced(mark: Fields) -> list[str]:
    return mark.texts("replaces") if "replaces" in mark else []


def _remove_replaced(store: Store, marks: Marks) -> None:
    """Remove shards whose episodes are all in a complete shard that replaces them."""
    for name, mark in marks.items():
        ids = set(mark.texts("ids"))
        for old in _replaced(mark):
            if old != name and old in marks and ids.issuperset(marks[old].texts("ids")):
                store.remove(old)


def _merge(store: Store, names: list[str], marks: Marks) -> str:
    """Copy shards of one collector into the store as one; return its name."""
    collector, first = place_of(names[0])
    name = f"{EPISODES}/{collector}{MERGED}{first:06d}-{max(int(member[-6:]) for member in names):06d}"
    if name in marks:  # a shard within its span was just rewritten; the next compaction removes it
        return name
    with tempfile.TemporaryDirectory(prefix="embodrl-compact-") as directory:
        merged = Path(directory) / "merged"
        ids = _write(store, names, merged, Path(directory) / "shard")
        replaces = [*names, *(old for member in names for old in _replaced(marks[member]))]
        facts = {"collector": marks[names[-1]].fields("collector").content, "ids": ids, "replaces": replaces}
        store.put(merged, name, facts)
    return name


def _write(store: Store, names: list[str], target: Path, copies: Path) -> list[str]:
    """Write the episodes of shards as one dataset, each id once; return the ids."""
    marks = [store.get(name, copies / str(number)) for number, name in enumerate(names)]
    ids = list(dict.fromkeys(one for mark in marks for one in mark.texts("ids")))
    first = read_info(copies / "0")
    written = set[str]()
    # Losslessly, whatever the videos have already lost.
    with LeRobotWriter(target, first.cameras, round(first.fps), 0, first.robot_type) as writer:
        for number, mark in enumerate(marks):
            directory = copies / str(number)
            for one, episode in _episodes(directory, read_info(directory), mark.texts("ids")):
                if one not in written:
                    writer.add(episode)
                    written.add(one)
        rewards = [_rewards(copies / str(number)) for number in range(len(marks))]
        # Shards from before a change of the rewards can only be used for imitation together with later ones.
        meta = {REWARDS: rewards[0]} if all(one == rewards[0] for one in rewards) else {}
        writer.close({**meta, "collector": marks[-1].fields("collector").content, "ids": ids})
    return ids


def _rewards(directory: Path) -> Mapping[str, object]:
    """Return the reward settings recorded in a shard."""
    return read_fields(directory / layout.OWN_META).fields(REWARDS, {}).content


def _episodes(directory: Path, info: Info, ids: list[str]) -> Iterator[tuple[str, DemoEpisode]]:
    """Yield the episodes of a shard by id, with all columns."""
    demos = load_lerobot(directory)
    known = {layout.ACTION, layout.STATE, *layout.COUNTERS, *info.cameras}
    columns = _columns(directory, info, [name for name in info.features if name not in known])
    if len(ids) != len(demos.success):
        raise StoreError(f"{directory.name} has {len(demos.success)} episodes and {len(ids)} ids", code="store-damaged")
    for number, one in enumerate(ids):
        frames = np.flatnonzero(demos.episode == number)
        seed = demos.seeds[number]
        success = demos.success[number]
        if seed is None or success is None:
            raise StoreError(f"episode {one} records neither its seed nor its success", code="store-damaged")
        columns_of = {name: values[frames] for name, values in columns.items()}
        seen = (demos.images[frames], demos.state[frames], demos.actions[frames])
        about = (demos.said(frames[:1])[0], demos.tasks[number])
        yield one, DemoEpisode(*seen, *about, seed, success, None, columns_of, one)


def _columns(directory: Path, info: Info, names: list[str]) -> dict[str, NDArray[np.generic]]:
    """Return columns of all frames ``[N]`` or ``[N,D]``, in the dtypes and order of info.json."""
    tables = [Table(path) for path in sorted((directory / "data").glob("*/*.parquet"))]
    order = np.argsort(np.concatenate([table.integers("index") for table in tables]))
    found: dict[str, NDArray[np.generic]] = {}
    for name in names:
        feature = info.features[name]
        if feature.dtype == "int64":
            values: NDArray[np.generic] = np.concatenate([table.integers(name) for table in tables])
        else:
            parts = [table.vectors(name, feature.size) for table in tables]
            values = np.concatenate(parts).astype(np.dtype(feature.dtype))
            values = values[:, 0] if feature.size == 1 else values
        found[name] = values[order]
    return found
