"""Versions of weights in a store: what a directory of ``DiskSender`` holds is copied there, and from there to readers.

A store is where directories can't be shared, such as an object store; see ``embodrl/store/store.py``.
"""

from __future__ import annotations

from pathlib import Path

from embodrl.errors import StoreError
from embodrl.fields import read_fields
from embodrl.hybrid_engines.weight_sync.disk import STABLE, version_path, versions_in
from embodrl.storage.atomic import remove
from embodrl.storage.json_file import write_json_file
from embodrl.store.store import Store

WEIGHTS = "weights"
"""What versions are below, in a store."""


def newest_version(store: Store) -> int | None:
    """Return the newest version in a store; None if there is none.

    Raises:
        StoreError: the store can't be reached.
    """
    names = store.names(WEIGHTS)
    return int(names[-1].rpartition("/v")[2]) if names else None


def upload_versions(store: Store, directory: Path) -> None:
    """Make the versions in a store those of a sender's directory.

    Raises:
        StoreError: the store can't be reached; readers keep what they have.
    """
    versions = versions_in(directory)
    for version in reversed(versions):  # a version comes after the one that it builds on
        path = version_path(directory, version)
        marked = dict(read_fields(path / STABLE).content)
        store.put(path, f"{WEIGHTS}/{path.name}", {"weights": marked})
    kept = {f"{WEIGHTS}/{version_path(directory, version).name}" for version in versions}
    for name in store.names(WEIGHTS):
        if name not in kept:
            store.remove(name)


def download_versions(store: Store, directory: Path) -> None:
    """Make the versions in a directory those of a store.

    Raises:
        StoreError: the store can't be reached, or a version is damaged.
        OutputError: they can't be written here.
    """
    names = store.names(WEIGHTS)
    for name in names:
        path = directory / name.rpartition("/")[2]
        if (path / STABLE).is_file():
            continue
        try:
            mark = store.get(name, path)
        except StoreError:
            if store.mark(name) is None:
                continue  # the sender has removed it meanwhile
            raise
        write_json_file(path / STABLE, dict(mark.fields("weights").content))
    for version in versions_in(directory):
        path = version_path(directory, version)
        if f"{WEIGHTS}/{path.name}" not in names:
            remove(path)
