"""One process a run: a lock on the run's directory."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embodrl.errors import OutputError

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Keep other processes from writing to a run's directory; the lock ends with the process, however that ends.

    Args:
        directory: of the run; made if missing.

    Raises:
        OutputError: another process uses it, or it can't be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise OutputError(
            f"output directory {directory} can't be written: {error}", "set runner.output_dir to a directory of yours"
        ) from error
    try:
        _lock(directory, descriptor)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _lock(directory: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        raise OutputError(
            f"another process (pid {holder}) uses {directory}",
            "wait until it has ended, or stop it; a new run needs a runner.output_dir of its own",
        ) from error
    except OSError as error:  # some network file systems have no locks
        logger.warning("%s can't be locked: %s; let only one process use it", directory, error)
        return
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    except OSError as error:  # a full disk; the lock holds all the same
        logger.warning("the process id could not be written to %s: %s", directory / LOCK_FILE, error)
