"""Shutdown of an embodrl process: its remaining time after a request to stop, and its exit."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from embodrl.processes.liveness import stop_requested

HANDLERS_S = 1.0
"""Time limit of exit handlers."""
REPEAT_S = 1.0
"""Signals within this time after the first belong to the same request: GNU timeout and schedulers signal a group and
its members.
"""


class SecondSignal:
    """Distinguishes a second request to stop from the first, which may arrive as several signals."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_at: float | None = None

    def is_now(self) -> bool:
        """Return whether a signal arriving now is a second request; the first call stores the time of the first."""
        now = self._clock()
        if self._first_at is None:
            self._first_at = now
        return now - self._first_at >= REPEAT_S


class _Process:
    is_ours = False


def own_process() -> None:
    """Declare that this process is the command line's, not a user's process that imported embodrl."""
    _Process.is_ours = True


def owns_process() -> bool:
    """Return whether this process is the command line's and may be ended."""
    return _Process.is_ours


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def stop_with_parent() -> None:
    """Let this new process get SIGTERM, on which a run saves, when its parent dies, even by SIGKILL."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


_WITH_BUFFERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)

OUT_OF_MEMORY = 12
"""Exit code of a worker that could not allocate memory: the number of ENOMEM."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that main memory ran out: numpy and the interpreter have a type for it, torch a
    text.
    """
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def closing_grace_s() -> float:
    """Return how long a process may take to end once asked to: less if this process itself ends soon."""
    return 1.0 if stop_requested.is_set() else 5.0


def leave(code: int, handlers_s: float = HANDLERS_S) -> NoReturn:
    """End this process after its exit handlers, without tearing down the interpreter.

    Once torch and transformers are loaded, freeing all modules takes a second, and several on busy cores. Cleanup that
    users may rely on still happens: ``atexit`` functions run, and open files, including C's, are flushed. Threads are
    not joined, and ``__del__`` is not called.

    Args:
        code: exit code.
        handlers_s: seconds after which the process ends even if exit handlers and flushing are not done.
    """

    def end() -> None:
        os._exit(code)

    # An exit handler or a full pipe may block, but the process must end anyway.
    late = threading.Timer(handlers_s, end)
    late.daemon = True
    late.start()
    atexit._run_exitfuncs()
    flush_files()
    os._exit(code)


def flush_files() -> None:
    """Flush the buffers of all open files of this process."""
    # Files that were never closed are only reachable through the garbage collector.
    for found in gc.get_objects():
        if issubclass(type(found), _WITH_BUFFERS):
            with contextlib.suppress(OSError, ValueError):  # closed, or no longer writable
                found.flush()
    ctypes.CDLL(None).fflush(None)
