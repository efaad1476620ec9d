"""Signals: a run that is asked to stop saves first, and ends within its time whatever it waits for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

from embodrl.errors import EmbodrlError, user_location
from embodrl.processes.guard import end_family, family
from embodrl.processes.liveness import Activity, hurry

TIMEOUT_S = 10.0
_AT_ONCE_S = 2.0
_RAISE_AFTER, _END_AFTER = 0.6, 0.9  # of the timeout
_LOOK_S = 0.2
_END = b"\0"
# The last three announce a preemption or a limit of CPU time on clusters, or come from Ctrl-\\.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU, signal.SIGQUIT)
_SIGNALS_AS_BYTES = [bytes([number]) for number in _SIGNALS]
Handler = Callable[[int, FrameType | None], object] | int | None


class StopSignal:
    """Remembers SIGINT, SIGTERM, SIGHUP (the terminal was closed), and those that announce a preemption, so that the
    loop can save and leave.

    While it is entered it replaces the handlers of these signals; afterwards the previous ones are back. Outside the
    main thread, where Python allows no handlers, it does nothing.

    The process ends in time even if the main thread waits for a process that hangs, or for native code: a thread gets
    the signals from the interpreter's C handler and keeps the time. Late in it, the main thread is interrupted by an
    exception; near its end, everything is killed. What is being saved (``saving``) has as long as it makes
    progress. If native code holds the interpreter lock, so that no thread runs, the second signal kills this process.

    Args:
        timeout_s: seconds from the first signal to the end.

    Attributes:
        number: of the first signal; 0 without one.
        late: what is under way did not end in time, and was interrupted; what there is may still be saved.
        graceful: there is something to save. Without it, and from the second signal on, a signal ends the process at
            once, through the ``finally`` clauses that close the simulators.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.number = 0
        self.late = False
        self.graceful = False
        self._timeout_s = timeout_s
        self._saving = False
        self._before: dict[int, Handler] = {}
        self._pipe = (-1, -1)
        self._wakeup_before = -1
        self._thread = threading.Thread(target=self._watch, name="stop", daemon=True)

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._pipe[1], False)
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the run is to outlive its terminal
            self._before[number] = signal.getsignal(number)
        self.arm()
        self._thread.start()
        return self

    def arm(self) -> None:
        """Take the signals; again, where a library may have installed handlers of its own, as Ray does."""
        for number in self._before:
            signal.signal(number, self._handle)
            if number != signal.SIGHUP:  # shells and the system send it one after the other
                _arm_once(number)

    def __exit__(self, *_: object) -> None:
        if not self._thread.is_alive():
            return
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.write(self._pipe[1], _END)
        self._thread.join()
        for descriptor in self._pipe:
            os.close(descriptor)
        hurry.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, self._handle)  # as it was for one signal only, see _arm_once
        if self.number or not self.graceful:
            self.number = self.number or number
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + number)
        self.number = number

    def __bool__(self) -> bool:
        return self.number != 0

    @property
    def exit_code(self) -> int:
        """128 + the signal's number; 0 without a signal."""
        return 128 + self.number if self.number else 0

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """While it is entered, the time stands still as long as this process or one it has started makes progress."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def _watch(self) -> None:
        """Keep the time from the first signal on."""
        while (first := os.read(self._pipe[0], 1)) not in (*_SIGNALS_AS_BYTES, _END):
            continue  # the pipe gets every signal that Python handles
        if first == _END:
            return
        hurry.set()  # processes that hang are given up sooner
        activity, asked_again = Activity(os.getpid()), False
        left_s, before = self._timeout_s * _END_AFTER, time.monotonic()
        raise_s = self._timeout_s * (_END_AFTER - _RAISE_AFTER)
        while left_s > 0:
            if select.select([self._pipe[0]], [], [], _LOOK_S)[0]:
                got = os.read(self._pipe[0], 1)
                if got == _END:
                    return
                if got in _SIGNALS_AS_BYTES and not asked_again:  # the user's, not the one below
                    left_s = min(left_s, _AT_ONCE_S)
                    raise_s = 0.0
            now = time.monotonic()
            if not (self._saving and raise_s and activity.progressed()):
                left_s -= now - before
            before = now
            if left_s < raise_s and not asked_again:
                asked_again = self.late = True
                signal.pthread_kill(threading.main_thread().ident or 0, first[0])
        _end_now(first[0])


def _arm_once(number: int) -> None:
    """Let the handler serve one signal, and the next one kill this process, unless Python code has run meanwhile.

    Python's handler runs between two instructions of the main thread; where native code never returns, it never does.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "sysv_signal"):  # glibc
        libc.signal.restype = ctypes.c_void_p
        libc.signal.argtypes = libc.sysv_signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.sysv_signal(number, libc.signal(number, None))


def _end_now(number: int) -> None:
    """Kill all that this process has started, and end it; say what the main thread was at."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    where = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else ""
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, f"stopped by signal {number} without saving; the main thread was at\n{where}".encode())
    end_family(family())
    os._exit(128 + number)


def named_exit(error: SystemExit) -> EmbodrlError:
    """Return the error of custom code that ended the process, with its place."""
    where = user_location(error) or "a function of the pipeline"
    return EmbodrlError(
        f"{where} ended the process: SystemExit({error.code!r})",
        "raise an exception, or return a value; a run is stopped by a signal",
        code="pipeline-exit",
    )
