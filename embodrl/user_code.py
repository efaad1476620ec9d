"""Exits of user code: ``sys.exit`` and ``os._exit`` would end the process without an explanation."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from embodrl.errors import EmbodrlError

_exit = os._exit
_guarded = threading.local()
_reporting: set[int] = set()
"""Guarded process ids; a forked child has another, and may exit without a report."""


@contextmanager
def guard_user_code(name: str) -> Generator[None, None, None]:
    """Turn an exit of user code, or a BaseException that is not an Exception, into an error that names the code.

    Forked children, other threads and embodrl's own code (such as a second SIGTERM) exit as usual.

    Raises:
        EmbodrlError: the code called ``sys.exit`` or ``os._exit``, or raised another BaseException.
    """

    def refused(call: str) -> EmbodrlError:
        hint = "return from the function, or raise an exception with a message"
        return EmbodrlError(f"{name} called {call}", hint, code="function-exit")

    try:
        with exits_raise(lambda status: refused(f"os._exit({status})")):
            yield
    except SystemExit as error:
        if raised_by_embodrl(error):
            raise
        raise refused(f"sys.exit({error.code!r})") from error
    except (Exception, KeyboardInterrupt):  # Ctrl-C may arrive anywhere in the interpreter
        raise
    except BaseException as error:
        text = f"{name} raised {type(error).__name__}, which is not an Exception: {error}"
        raise EmbodrlError(text, "raise an Exception with a message", code="function-exit") from error


@contextmanager
def exits_raise(make_error: Callable[[int], Exception]) -> Generator[None, None, None]:
    """Let ``os._exit`` in this thread's user code raise ``make_error(status)`` instead."""
    os._exit = _guarded_exit
    outer = getattr(_guarded, "by", None)
    _guarded.by = (os.getpid(), make_error)
    try:
        yield
    finally:
        _guarded.by = outer


def report_exits() -> None:
    """Let ``os._exit`` in this process's user code print its location, for the log that a parent reads."""
    os._exit = _guarded_exit
    _reporting.add(os.getpid())


def _guarded_exit(status: int) -> NoReturn:
    """Replacement of ``os._exit`` from the first guard on."""
    caller = sys._getframe(1)
    if not _is_embodrl(caller):
        pid, make_error = getattr(_guarded, "by", None) or (None, None)
        if make_error is not None and pid == os.getpid():
            raise make_error(status)
        if os.getpid() in _reporting:
            code = caller.f_code
            where = f"{code.co_filename}:{caller.f_lineno} in {code.co_name}"
            os.write(2, f"os._exit({status}) was called in {where}\n".encode(errors="replace"))
    _exit(status)


def raised_by_embodrl(error: BaseException) -> bool:
    """Return whether embodrl itself raised an exit, e.g. in a signal handler, while user code ran."""
    last = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        last = frame
    return last is not None and _is_embodrl(last)


def ends_process(error: BaseException) -> bool:
    """Return whether an import was interrupted by Ctrl-C or an exit of embodrl, rather than failing by itself."""
    return not isinstance(error, Exception) and (isinstance(error, KeyboardInterrupt) or raised_by_embodrl(error))


def _is_embodrl(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "embodrl"
