"""Checksums of the files in a directory.

``checksums.json`` lists the size and SHA-256 of every file below the directory. It detects damage, not forgery: anyone
who can change a file can change the list. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from pathlib import Path

from embodrl.errors import FileDamagedError
from embodrl.fields import open_regular_file, read_fields
from embodrl.storage.json_file import write_json_file

CHECKSUMS = "checksums.json"
_HINT = "restore the file from its origin or write the directory again, or remove checksums.json to use it unchecked"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits; OSError if it can't be read."""
    with open_regular_file(path, follow_links=True) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(directory: Path, added: Collection[str] | None = None) -> None:
    """Write ``checksums.json`` for all files below ``directory``; must be the last file written.

    With ``added``, relative paths of files added since the last list, only these are read. Raises OutputError.
    """
    path = directory / CHECKSUMS
    content: dict[str, object] = {}
    if added is not None and os.path.lexists(path):
        content.update(read_fields(path, hint=_HINT).content)
        files = [directory / name for name in added]
    else:
        files = sorted(file for file in directory.rglob("*") if file.is_file() and file.name != CHECKSUMS)
    for file in files:
        entry = {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
        content[file.relative_to(directory).as_posix()] = entry
    write_json_file(path, content)


def check_checksums(
    directory: Path, only: Collection[str] | None = None, complete: bool = False, size_only: str | None = None
) -> bool:
    """Compare files with ``checksums.json``.

    Args:
        directory: directory that holds the list.
        only: relative paths of the files to check; by default all listed files. Unlisted files are not checked, since
            users may add some.
        complete: all of ``only`` must be listed.
        size_only: suffix of files compared by size alone, e.g. large files that are checked elsewhere.

    Returns:
        False if the directory has no list because it comes from elsewhere.

    Raises:
        FileDamagedError: a listed file is missing or differs; the message names all such files.
        FileFormatError: the list is invalid or not a regular file.
    """
    path = directory / CHECKSUMS
    # A dangling link is not a missing list; reading it fails below.
    if not os.path.lexists(path):
        return False
    listed = read_fields(path, hint=_HINT)
    # An empty list would accept any file.
    if not listed.content:
        raise FileDamagedError(f"{path} lists no file: it is damaged", _HINT)
    problems = [f"{name}: not in {CHECKSUMS}" for name in only or () if complete and name not in listed]
    for name in listed:
        if only is None or name in only:
            entry = listed.fields(name)
            sha256 = entry.text("sha256")
            is_large = size_only is not None and name.endswith(size_only)
            problems += _problems(directory, name, entry.integer("bytes"), None if is_large else sha256)
    if problems:
        raise FileDamagedError("\n  ".join([f"{directory} is damaged:", *problems]), _HINT)
    return True


def _problems(directory: Path, name: str, num_bytes: int, sha256: str | None) -> list[str]:
    path = directory / name
    # A foreign list must not name files outside its directory.
    if Path(name).is_absolute() or ".." in Path(name).parts:
        return [f"{name}: the path leaves the directory"]
    try:
        size = path.stat().st_size
        if size != num_bytes:
            return [f"{name}: {size:,} bytes, written with {num_bytes:,}"]
        if sha256 is None or sha256_of(path) == sha256:
            return []
        return [f"{name}: the content differs from what was written (SHA-256)"]
    except OSError as error:
        return [f"{name}: {error.strerror or error}"]
