"""How a process of embodrl ends: the time that it has once it is asked to, and how it leaves."""

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
"""What exit handlers may take."""
REPEAT_S = 1.0
"""A signal sooner after the first is the same wish: GNU timeout and schedulers signal a group and its members."""


class SecondSignal:
    """Tells a second wish to stop from the first, which may come as several signals.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_at: float | None = None

    def is_now(self) -> bool:
        """Return whether a signal that comes now is a second one; the first call notes the time of the first."""
        now = self._clock()
        if self._first_at is None:
            self._first_at = now
        return now - self._first_at >= REPEAT_S


class _Process:
    is_ours = False


def own_process() -> None:
    """Declare that this process is the command line's, not one of a user's that has imported embodrl."""
    _Process.is_ours = True


def owns_process() -> bool:
    """Return whether this process may be ended: it is the command line's."""
    return _Process.is_ours


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def stop_with_parent() -> None:
    """Let this new process get SIGTERM, on which a run saves, once its parent is gone, were it killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


_WITH_BUFFERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)

OUT_OF_MEMORY = 12
"""Exit code of a worker that could not allocate memory: the number of ENOMEM."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is of the main memory: numpy and the interpreter have a type for it, torch has a text."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def closing_grace_s() -> float:
    """Return how long a process may take to end once it is asked to: less if this one is to end soon."""
    return 1.0 if stop_requested.is_set() else 5.0


def leave(code: int, handlers_s: float = HANDLERS_S) -> NoReturn:
    """End this process after its exit handlers, without taking down the interpreter.

    Once torch and transformers are loaded, freeing all modules takes a second, and several on busy cores. What the
    interpreter would do at its end and users may rely on is done: functions registered with ``atexit`` run, open files
    are flushed, those of C as well. Threads are not waited for, and ``__del__`` is not called.

    Args:
        code: exit code.
        handlers_s: seconds after which the process ends even if exit handlers and files are not done.
    """

    def end() -> None:
        os._exit(code)

    # An exit handler or a full pipe may block, and the process must end anyway.
    late = threading.Timer(handlers_s, end)
    late.daemon = True
    late.start()
    atexit._run_exitfuncs()
    flush_files()
    os._exit(code)


def flush_files() -> None:
    """Write out what the open files of this process have buffered."""
    # Files that were never closed are reachable through the garbage collector only.
    for found in gc.get_objects():
        if issubclass(type(found), _WITH_BUFFERS):
            with contextlib.suppress(OSError, ValueError):  # closed, or it can't be written any more
                found.flush()
    ctypes.CDLL(None).fflush(None)
