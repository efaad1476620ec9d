"""How a process of embodrl ends: the time that it has once it is asked to, and how it leaves."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn

from embodrl.processes.liveness import hurry

HANDLERS_S = 1.0
"""What exit handlers may take."""

OUT_OF_MEMORY = 12
"""Exit code of a worker that could not allocate memory: the number of ENOMEM."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is of the main memory: numpy and the interpreter have a type for it, torch has a text."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def closing_grace_s() -> float:
    """Return how long a process may take to end once it is asked to: less if this one is to end soon."""
    return 1.0 if hurry.is_set() else 5.0


def leave(code: int, handlers_s: float = HANDLERS_S) -> NoReturn:
    """End this process after its exit handlers, without taking down the interpreter.

    Once torch and transformers are loaded, freeing all modules takes a second, and several on busy cores. Threads are
    not waited for.

    Args:
        code: exit code.
        handlers_s: seconds after which the process ends even if an exit handler has not returned.
    """

    def end() -> None:
        os._exit(code)

    late = threading.Timer(handlers_s, end)
    late.daemon = True
    late.start()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(code)
