"""A store of `embodrl store`, read as one dataset: the shards in its directory."""

from __future__ import annotations

from pathlib import Path

from embodrl.data.lerobot import OWN_META
from embodrl.errors import FileDamagedError
from embodrl.fields import read_fields

SIGN = "embodrl-store"
"""File at the root of a store."""
EPISODES = "episodes"
"""Prefix of shards in a store."""
STABLE = "STABLE"
"""File that is written last into a shard."""


def is_store(directory: Path) -> bool:
    """Whether a directory is a store."""
    return (directory / SIGN).is_file()


def shards_of(directory: Path) -> list[Path]:
    """Return the complete shards of a store, in order, each episode in one of them.

    A shard that has been merged into another may still be there: the larger one is taken.

    Raises:
        FileDamagedError: a shard does not list its episodes.
    """
    complete = sorted(path.parent for path in (directory / EPISODES).glob(f"*/{STABLE}"))
    ids = {shard: set(read_fields(shard / OWN_META, FileDamagedError).texts("ids")) for shard in complete}
    known: set[str] = set()
    taken: list[Path] = []
    for shard in sorted(complete, key=lambda shard: -len(ids[shard])):
        if not ids[shard] <= known:
            known |= ids[shard]
            taken.append(shard)
    return sorted(taken)
