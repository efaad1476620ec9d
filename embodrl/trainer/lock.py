"""One process per run: locks on its directory, and checks that the directory stays the same."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embodrl.errors import OutputError
from embodrl.fields import open_descriptor, open_regular_file

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
# ``BEST`` of storage/checkpoint, which imports torch. Never written through; the second is left by a process killed
# between two steps.
_OWN_LINKS = ("checkpoints/best", "checkpoints/.best.partial")
_LINKS_OF_OTHERS = ("wandb",)
_DIRECTORIES = (
    *("checkpoints", "controllers", "logs", "mlflow", "policy", "policy_best", "swanlab", "tensorboard", "videos"),
    "weights",
)


class RunLock:
    """The locks of a run; see ``run_lock``.

    There are two, because a user may delete ``.lock``: one on that file and one on the directory itself.

    Raises:
        OutputError: another process holds one of them.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self._file = -1
        try:
            self._lock(self._place)
            self._file = open_descriptor(directory / LOCK_FILE, _FLAGS, 0o644)
            self._lock(self._file)
        except BaseException:  # raised again
            self.close()
            raise

    def check(self) -> None:
        """Check that the run still owns its directory; called before files are replaced or removed.

        Raises:
            OutputError: the directory was removed or replaced, or another process has taken it.
        """
        try:
            same = os.path.samestat(self.directory.stat(), os.fstat(self._place))
        except FileNotFoundError:
            same = False
        if not same:
            raise OutputError(
                f"{self.directory} was removed or replaced during the run, and its contents are lost",
                "start the run again; there is nowhere to save to",
                code="run-directory-removed",
            )
        path = self.directory / LOCK_FILE
        try:
            if os.path.samestat(path.lstat(), os.fstat(self._file)):
                return
        except FileNotFoundError:
            pass
        logger.warning("%s was deleted during the run; it is locked again", path)
        replacement = open_descriptor(path, _FLAGS, 0o644)
        try:
            self._lock(replacement)
        except OutputError as error:
            os.close(replacement)
            error.add("another process has taken over after the lock file was deleted: this one stops without saving")
            raise
        os.close(self._file)
        self._file = replacement

    def close(self) -> None:
        """Release the locks."""
        for descriptor in (self._file, self._place):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._place = -1

    def release(self) -> None:
        """Empty the lock file at the end of a run, and release the locks."""
        if self._file >= 0:
            os.ftruncate(self._file, 0)
        self.close()

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._taken() from error
        except OSError as error:  # some network file systems have no locks, or none for directories
            log = logger.debug if descriptor == self._place else logger.warning
            log("%s can't be locked: %s; let only one process use it", self.directory, error)
            return
        if descriptor == self._place:
            return
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        except OSError as error:  # a full disk; the lock holds anyway
            logger.warning("the process id could not be written to %s: %s", self.directory / LOCK_FILE, error)

    def _taken(self) -> OutputError:
        holder = ""
        with contextlib.suppress(OSError), open_regular_file(self.directory / LOCK_FILE) as file:
            holder = file.read(32).decode(errors="replace").strip()
        return OutputError(
            f"another process (pid {holder or 'unknown'}) uses {self.directory}",
            "wait until it has ended, or stop it; a new run needs its own runner.output_dir",
            code="run-in-use",
        )


@contextmanager
def run_lock(directory: Path) -> Iterator[RunLock]:
    """Keep other processes from writing to a run's directory, created if missing, until this process ends.

    Raises:
        OutputError: another process uses it, it is not writable, or it contains links to elsewhere.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        refuse_links(directory)
        refuse_files(directory)
        lock = RunLock(directory)
    except OSError as error:
        raise OutputError(
            f"output directory {directory} can't be written: {error}",
            "set runner.output_dir to a writable directory",
        ) from error
    try:
        yield lock
        lock.release()
    finally:
        lock.close()


def is_locked(directory: Path) -> bool:
    """Whether a process of this machine carries out the run in ``directory``."""
    try:
        descriptor = open_descriptor(directory / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def refuse_files(directory: Path) -> None:
    """Reject a run directory in which a file has the name of a run's subdirectory; found late, it would cost the run.

    Raises:
        OutputError: names the first one.
    """
    for name in _DIRECTORIES:
        path = directory / name
        if path.exists() and not path.is_dir():
            raise OutputError(
                f"{path} is a file, and a run writes a directory of that name",
                "move it elsewhere, or set runner.output_dir to another directory",
                code="run-directory-file",
            )


def refuse_links(directory: Path) -> None:
    """Reject a run directory with symbolic links: the run would append to or replace files elsewhere.

    Raises:
        OutputError: names the first one.
    """
    for place, directories, files in os.walk(directory):
        links = (Path(place) / name for name in (*directories, *files) if (Path(place) / name).is_symlink())
        for path in links:
            if "/".join(path.parts[-2:]) in _OWN_LINKS:  # of a run, or of one below the directory of a sweep
                continue
            raise OutputError(
                f"{path} is a symbolic link to {path.readlink()}; a run does not write through links",
                "replace it with its target, or set runner.output_dir to the directory on the other disk",
                code="run-directory-link",
            )
        directories[:] = [name for name in directories if name not in _LINKS_OF_OTHERS]
