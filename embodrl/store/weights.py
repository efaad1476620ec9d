"""Weight versions in a store: uploaded from the directory of a ``DiskSender``, and downloaded by readers.

For setups without a shared directory, such as an object store; see ``embodrl/store/store.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from embodrl.errors import FileFormatError, StoreError
from embodrl.fields import read_fields
from embodrl.hybrid_engines.weight_sync.disk import STABLE, version_path, versions_in
from embodrl.storage.atomic import remove
from embodrl.storage.json_file import write_json_file
from embodrl.store.store import Store

WEIGHTS, RESULTS = "weights", "results"
"""Prefixes of versions in a store, and of their evaluations."""


def newest_version(store: Store) -> int | None:
    """Return the newest version in a store; None if there is none. Raises StoreError."""
    names = store.names(WEIGHTS)
    return _version_of(names[-1]) if names else None


def _version_of(name: str) -> int:
    return int(name.rpartition("/v")[2])


def remove_newer(store: Store, version: int) -> None:
    """Remove versions above this one, which their run has gone back from, and their results; raises StoreError."""
    for name in (*store.names(WEIGHTS), *store.names(RESULTS)):
        if _version_of(name) > version:
            store.remove(name)


def upload_versions(store: Store, directory: Path) -> None:
    """Sync a sender's versions to a store; raises StoreError, and readers keep the versions they have."""
    versions = versions_in(directory)
    for version in reversed(versions):  # a version must follow its base version
        path = version_path(directory, version)
        marked = dict(read_fields(path / STABLE).content)
        store.put(path, f"{WEIGHTS}/{path.name}", {"weights": marked})
    kept = {f"{WEIGHTS}/{version_path(directory, version).name}" for version in versions}
    for name in store.names(WEIGHTS):
        if name not in kept:
            store.remove(name)


def _held(path: Path) -> Mapping[str, object] | None:
    """Return the mark of a version on this machine; None if it is damaged."""
    try:
        return read_fields(path / STABLE).content
    except FileFormatError:
        return None


def download_versions(store: Store, directory: Path) -> None:
    """Sync a store's versions to a directory.

    Raises:
        StoreError: the store can't be reached, or a version is damaged.
        OutputError: a version can't be written.
    """
    names = store.names(WEIGHTS)
    for name in names:
        path = directory / name.rpartition("/")[2]
        try:
            if (path / STABLE).is_file():
                if (mark := store.mark(name)) is None or mark.fields("weights").content == _held(path):
                    continue
                remove(path)  # damaged, or its run has gone back and made this version again
            mark = store.get(name, path)
        except StoreError:
            if store.mark(name) is None:
                continue  # removed meanwhile by the sender
            raise
        write_json_file(path / STABLE, dict(mark.fields("weights").content))
    for version in versions_in(directory):
        path = version_path(directory, version)
        if f"{WEIGHTS}/{path.name}" not in names:
            remove(path)
