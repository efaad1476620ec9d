"""Files and directories that are either complete or absent, whatever interrupts their writing.

Content is written under a hidden name beside its target, synced, and renamed onto the target. It is synced before the
rename, because the disk may see the rename first: after a power failure the target would exist without its content.
The parent directory is synced after the rename, so that the rename itself survives. Modes follow the umask.
Simulator processes use this module, too: it imports no torch.
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
    """Yield a temporary path beside ``path``; what the block writes there becomes ``path`` when the block ends.

    After an error, or if the process is killed, ``path`` is unchanged. Missing parent directories are created.

    Args:
        path: the file to write or replace.
        elsewhere: how to choose another place, for the hint of the error.
        concurrent: several processes may write the same file at once; the last one wins.

    Raises:
        OutputError: the file can't be written.
    """
    # The suffix stays last: video encoders choose the container by it.
    writer = f".{os.getpid()}" if concurrent else ""
    partial = path.with_name(f".{path.stem}{writer}.partial{path.suffix}")
    with output_errors(f"{path} can't be written", path, elsewhere):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)  # left by a process that was killed
        try:
            yield partial
            _sync(partial)
            partial.replace(path)
        except BaseException:  # a signal too must not leave the partial file; raised again
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        sync_directory(path.parent)


@contextlib.contextmanager
def atomic_directory(target: Path, elsewhere: str = ELSEWHERE) -> Iterator[Path]:
    """Yield a new directory beside ``target``; it becomes ``target`` when the block ends.

    After an error ``target`` is unchanged. Missing parent directories are created.

    Args:
        target: the directory to write or replace.
        elsewhere: how to choose another place, for the hint of the error.

    Raises:
        OutputError: the directory can't be written.
    """
    staging, replaced = (target.with_name(f".{target.name}.{kind}") for kind in ("partial", "replaced"))
    with output_errors(f"{target} can't be written", target, elsewhere):
        target.parent.mkdir(parents=True, exist_ok=True)
        if replaced.exists() and not target.exists():  # killed between the two renames of an earlier call
            replaced.rename(target)
        for left in (staging, *target.parent.glob(f".{glob.escape(staging.name)}.*")):  # by a process that was killed
            remove(left)
        try:
            staging.mkdir()
            yield staging
            sync_tree(staging)
            publish_directory(staging, target, replaced)
        except BaseException:  # a signal too must not leave the partial directory; raised again
            shutil.rmtree(staging, ignore_errors=True)
            raise


def publish_directory(
    staging: Path, target: Path, replaced: Path | None = None, find_problem: Callable[[Path], str] = lambda _: ""
) -> None:
    """Rename a synced directory to its target; the directory that it replaces is kept until that has succeeded.

    Args:
        staging: complete and synced, in the same parent directory.
        target: the final name, which may exist.
        replaced: name of the old target in between, by default ``.NAME.replaced``. A process killed between the two
            renames leaves it behind, and the next writer has to rename it back.
        find_problem: function that returns what is wrong with the directory in its final place; "" to accept it.

    Raises:
        OSError: it failed, or there is a problem; the target is as it was.
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
    shutil.rmtree(replaced, ignore_errors=True)  # what is left of it goes with the next write


def write_file(path: Path, chunks: Iterator[bytes | memoryview]) -> int:
    """Write and sync a new file, not atomically: for files in a directory that is published as a whole.

    Returns:
        its size in bytes.

    Raises:
        OSError: it exists, or can't be written.
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
    """Sync every file and directory below a directory, and the directory itself."""
    for path in directory.rglob("*"):
        _sync(path)
    _sync(directory)


def sync_directory(path: Path) -> None:
    """Make creations, renames and removals in a directory survive a power failure."""
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a directory with its content, or a file, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def output_errors(message: str, path: Path, elsewhere: str = ELSEWHERE) -> Iterator[None]:
    """Turn an OSError of the block into ``output_error``."""
    try:
        yield
    except OSError as error:
        raise output_error(message, path, error, elsewhere) from error


def output_error(message: str, path: Path, error: OSError, elsewhere: str = ELSEWHERE) -> OutputError:
    """Return the error of output that can't be written, with a hint that fits the cause, and the space if that lacks.

    Args:
        message: what can't be written.
        path: where; it need not exist.
        error: error of the operating system.
        elsewhere: how to choose another place.
    """
    causes = {
        errno.ENOSPC: "free disk space, or ",
        errno.EDQUOT: "your disk quota is used up: free disk space, or ",
        errno.EROFS: "the file system is read-only: ",
        errno.EACCES: "permission denied: ",
        errno.EPERM: "permission denied: ",
        errno.EIO: "the disk reports faults: ",
        errno.ENOENT: "the file system takes no new files there: ",
        errno.ENOTDIR: "a part of the path is a file: ",
        errno.EEXIST: "a part of the path is a file: ",
        errno.EFBIG: f"{FILE_SIZE_HINT}, or ",
    }
    hint = causes.get(error.errno or 0, "") + elsewhere
    message = f"{message}: {error.strerror or error}"
    if error.errno in (None, errno.ENOSPC, errno.EDQUOT):  # None: a writer that does not say why it failed
        # The free space can only be asked of a path that exists.
        existing = next(place for place in (path, *path.absolute().parents) if place.exists())
        message = f"{message} ({format_size(shutil.disk_usage(existing).free)} free)"
    return OutputError(message, hint)


def format_size(num_bytes: int) -> str:
    """Return a size for messages, in MiB or GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.2f} MiB"
