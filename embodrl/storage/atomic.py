"""Atomic writing of files and directories: the target is either complete or absent, whenever the writer is interrupted.

Content is written under a hidden name next to the target, synced, and renamed. Syncing before the rename matters: after
a power failure the disk may hold the rename but not the content. The parent directory is synced afterwards to make the
rename durable. Modes follow the umask. Imports no torch, since simulator processes use this module too.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from embodrl.errors import OutputError

_BLOCK = 16 * 2**20
FILE_SIZE_HINT = "the file is larger than the shell allows: raise the limit (ulimit -f unlimited)"
ELSEWHERE = "choose a writable directory on another disk"
ELSEWHERE_OF_RUNS = "move the run to another disk; then `embodrl resume` it"


@contextlib.contextmanager
def atomic_file(path: Path, elsewhere: str = ELSEWHERE, concurrent: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to ``path``, renamed to ``path`` when the block succeeds.

    On an error, or if the process is killed, ``path`` is unchanged. Creates missing parent directories. Several
    processes may write a file with ``concurrent``: the last one wins. ``elsewhere`` tells in the error hint how to
    choose another location. Raises OutputError if the file can't be written.
    """
    # Keep the suffix last: video encoders choose the container by it.
    writer = f".{os.getpid()}" if concurrent else ""
    partial = path.with_name(f".{path.stem}{writer}.partial{path.suffix}")
    with output_errors(f"{path} can't be written", path, elsewhere):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)  # left by a killed process
        try:
            yield partial
            _sync(partial)
            partial.replace(path)
        except BaseException:  # signals too must not leave a partial file; re-raised
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        sync_directory(path.parent)


@contextlib.contextmanager
def atomic_directory(target: Path, elsewhere: str = ELSEWHERE) -> Iterator[Path]:
    """Yield a new directory next to ``target``, renamed to ``target`` when the block succeeds.

    On an error ``target`` is unchanged. Creates missing parent directories. ``elsewhere`` tells in the error hint how
    to choose another location. Raises OutputError if the directory can't be written.
    """
    staging, replaced = (target.with_name(f".{target.name}.{kind}") for kind in ("partial", "replaced"))
    with output_errors(f"{target} can't be written", target, elsewhere):
        target.parent.mkdir(parents=True, exist_ok=True)
        if replaced.exists() and not target.exists():  # an earlier call was killed between its two renames
            replaced.rename(target)
        for left in (staging, *target.parent.glob(f".{glob.escape(staging.name)}.*")):  # left by a killed process
            remove(left)
        try:
            staging.mkdir()
            yield staging
            sync_tree(staging)
            publish_directory(staging, target, replaced)
        except BaseException:  # signals too must not leave a partial directory; re-raised
            shutil.rmtree(staging, ignore_errors=True)
            raise


def publish_directory(
    staging: Path, target: Path, replaced: Path | None = None, find_problem: Callable[[Path], str] = lambda _: ""
) -> None:
    """Rename a synced directory to its target, keeping the directory it replaces until the rename has succeeded.

    Args:
        staging: complete, synced directory in the same parent directory.
        target: final path, which may exist.
        replaced: interim name of the old target, by default ``.NAME.replaced``. A process killed between the two
            renames leaves it behind, and the next writer must rename it back.
        find_problem: returns a description of what is wrong with the published directory; "" to accept it.

    Raises:
        OSError: the rename failed or ``find_problem`` reported a problem; the target is unchanged.
    """
    replaced = replaced or target.with_name(f".{target.name}.replaced")
    if target.exists():
        remove(replaced)
        target.rename(replaced)
    try:
        staging.rename(target)
        sync_directory(target.parent)
        if problem := find_problem(target):
            target.rename(staging)
            raise OSError(errno.EIO, f"it reads back differently: {problem}")
    except OSError:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)  # the next write removes any remainder


def write_file(path: Path, chunks: Iterator[bytes | memoryview]) -> int:
    """Write and sync a new file non-atomically, for directories published as a whole; return its size in bytes.

    Raises OSError if the file exists or can't be written.
    """
    num_bytes = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for chunk in chunks:
            view = memoryview(chunk)
            num_bytes += len(view)
            while view:
                view = view[os.write(descriptor, view[:_BLOCK]) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return num_bytes


def sync_tree(directory: Path) -> None:
    """Sync a directory and everything below it."""
    for path in directory.rglob("*"):
        _sync(path)
    _sync(directory)


def sync_directory(path: Path) -> None:
    """Sync a directory, making creations, renames and removals in it durable."""
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or directory tree, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def output_errors(message: str, path: Path, elsewhere: str = ELSEWHERE) -> Iterator[None]:
    """Convert an OSError raised in the block to ``output_error``."""
    try:
        yield
    except OSError as error:
        raise output_error(message, path, error, elsewhere) from error


def output_error(message: str, path: Path, error: OSError, elsewhere: str = ELSEWHERE) -> OutputError:
    """Return the error for output at ``path``, with a hint and, if the disk is full, the free space."""
    causes = {
        errno.ENOSPC: "free disk space, or ",
        errno.EDQUOT: "your disk quota is used up: free disk space, or ",
        errno.EROFS: "the file system is read-only: ",
        errno.EACCES: "permission denied: ",
        errno.EPERM: "permission denied: ",
        errno.EIO: "the disk reports I/O errors: ",
        errno.ENOENT: "the file system takes no new files there: ",
        errno.ENOTDIR: "a path component is a file: ",
        errno.EEXIST: "a path component is a file: ",
        errno.EFBIG: f"{FILE_SIZE_HINT}, or ",
    }
    hint = causes.get(error.errno or 0, "") + elsewhere
    message = f"{message}: {error.strerror or error}"
    if error.errno in (None, errno.ENOSPC, errno.EDQUOT):  # None: the writer gave no cause
        # Free space can only be queried on an existing path.
        existing = next(place for place in (path, *path.absolute().parents) if place.exists())
        message = f"{message} ({format_size(shutil.disk_usage(existing).free)} free)"
    return OutputError(message, hint)


def format_size(num_bytes: int) -> str:
    """Format a size in MiB or GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.2f} MiB"
