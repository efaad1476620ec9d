"""Signals: a run that is asked to stop saves first, and ends in time even if something hangs."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

from embodrl.errors import EmbodrlError, user_location
from embodrl.processes.ending import REPEAT_S, SecondSignal, owns_process
from embodrl.processes.guard import CALM, PAUSE, end_family, family, keep_time, release_signals, watch_signals
from embodrl.processes.liveness import Activity, completed_work, stop_requested

TIMEOUT_S = 10.0
_AT_ONCE_S = 2.0
_RAISE_AFTER, _END_AFTER = 0.6, 0.9  # fractions of the timeout
_LOOK_S = 0.2
_JUDGED_S = 1.0
_END = b"\0"
_HANDLED = b"\xff"
# The last three announce a preemption or a limit of CPU time on clusters, or come from Ctrl-\\.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU, signal.SIGQUIT)
_SIGNALS_AS_BYTES = [bytes([number]) for number in _SIGNALS]
Handler = Callable[[int, FrameType | None], object] | int | None


class StopSignal:
    """Records SIGINT, SIGTERM, SIGHUP (terminal closed), and preemption signals, so that the loop can save and stop.

    While entered, it replaces the handlers of these signals; afterwards the previous ones are back. Outside the main
    thread, where Python allows no handlers, it does nothing.

    The loop ends in time even if the main thread waits for a hung process or native code: a thread gets the signals
    from the interpreter's C handler and keeps the time. Late in that time, the main thread is interrupted by an
    exception; near its end, all started processes are killed. The time restarts with every completed piece of work
    (``report_work``): weights in the middle of an update cannot be saved, so an advancing update is finished. Saving
    (``saving``) may take as long as it makes progress.

    The command line ends itself as well, and if native code holds the interpreter lock, so that no thread runs, the
    guard kills it. A user's process that has imported embodrl is never ended: there the block raises.

    Args:
        timeout_s: seconds from the first signal, or the last completed piece of work, to the end.
        clock: measures the time between two signals, in seconds.

    Attributes:
        number: number of the first signal; 0 without one.
        late: that signal, once the work in progress missed its deadline and was interrupted; the state may still be
            saved.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.number = 0
        self.late = 0
        self._second = SecondSignal(clock)
        self._is_second = False
        self._judged: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._hint: str | None = None
        self._owns_process = owns_process()
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
                continue  # nohup: the run must outlive its terminal
            self._before[number] = signal.getsignal(number)
        if owns_process():
            watch_signals(self._pipe[0], self._timeout_s * _END_AFTER)
        self.arm()
        self._thread.start()
        return self

    def arm(self) -> None:
        """Install the handlers; again after a library may have installed its own, as Ray does."""
        for number in self._before:
            signal.signal(number, self._handle)

    def can_save(self, hint: str) -> None:
        """Let the first signal from now on leave time to save.

        Before, and from the second signal on, a signal ends the block immediately, through the ``finally`` clauses that
        close the simulators. A second signal within ``REPEAT_S`` of the first is ignored. ``hint`` says what the user
        can do if nothing more could be saved; it is renewed with every checkpoint.
        """
        self._hint = hint

    def take(self, number: int) -> None:
        """Stop as after a signal that another process of the run has got; 0 for none."""
        self.number = self.number or number

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not self._thread.is_alive():
            return
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.write(self._pipe[1], _END)
        self._thread.join()
        release_signals()
        for descriptor in self._pipe:
            os.close(descriptor)
        stop_requested.clear()
        if self.late and isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise self._not_saved(self.late) from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = not self.number
        self.number = self.number or number
        name = signal.Signals(number).name
        if not self.late and not (is_first and self._hint is None):
            self._await_judgement()
            if is_first and not self._is_second:
                _say(f"{name}: saves, then stops; a signal {REPEAT_S:g} s later ends it without saving")
            if not self._is_second:
                return
            _say(f"{name} again: ends without saving; {self._hint or 'rerun the command'}")
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def _await_judgement(self) -> None:
        """Wait until the thread has processed all signals so far: a handler may run long after a signal's arrival."""
        os.write(self._pipe[1], _HANDLED)
        with contextlib.suppress(queue.Empty):  # the thread is at the end of the time
            self._judged.get(timeout=_JUDGED_S)

    def __bool__(self) -> bool:
        return self.number != 0

    @property
    def exit_code(self) -> int:
        """128 + the signal's number; 0 without a signal."""
        return 128 + self.number if self.number else 0

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """While entered, the time stands still as long as this process or a child process makes progress."""
        self._saving = True
        self._keep_time(PAUSE)  # writers of weights hold the interpreter lock
        try:
            yield
        finally:
            self._saving = False
            self._keep_time(self._timeout_s if self.number else CALM)

    def _keep_time(self, seconds: float) -> None:
        if owns_process():
            keep_time(PAUSE if self._saving else seconds)

    def _read(self) -> bytes:
        """Return the number of a signal; the guard is notified first, since it takes an unread byte for a hang."""
        select.select([self._pipe[0]], [], [])
        self._keep_time(self._timeout_s * _END_AFTER)
        return self._take()

    def _take(self) -> bytes:
        got = os.read(self._pipe[0], 1)
        if got == _HANDLED:
            self._judged.put(None)  # all signals before it are processed
        return got

    def _watch(self) -> None:
        """Keep the time from the first signal on."""
        while (first := self._read()) not in (*_SIGNALS_AS_BYTES, _END):
            self._keep_time(CALM)  # the pipe gets every signal that Python handles
        if first == _END:
            return
        self._second.is_now()  # the time starts here if native code delays the handler
        stop_requested.set()  # hung processes are given up sooner
        activity = Activity(os.getpid())
        asked_again = False
        left_s = self._timeout_s * _END_AFTER
        before = time.monotonic()
        work = completed_work()
        raise_s = self._timeout_s * (_END_AFTER - _RAISE_AFTER)
        while left_s > 0:
            if select.select([self._pipe[0]], [], [], _LOOK_S)[0]:
                got = self._take()
                if got == _END:
                    return
                is_users = got in _SIGNALS_AS_BYTES and not asked_again  # not the signal that this thread sends below
                if is_users and self._second.is_now():
                    self._is_second = True
                    left_s = min(left_s, _AT_ONCE_S)
                    raise_s = 0.0
            self._keep_time(left_s + 1.0)
            now = time.monotonic()
            if not asked_again and (done := completed_work()) != work:
                work = done
                left_s = self._timeout_s * _END_AFTER
            if not (self._saving and raise_s and activity.progressed()):
                left_s -= now - before
            before = now
            if left_s < raise_s and not asked_again:
                asked_again = True
                self.late = first[0]
                signal.pthread_kill(threading.main_thread().ident or 0, first[0])
        self._end(first[0])

    def _end(self, number: int) -> None:
        """Kill all child processes, and end this process if it is ours; report the main thread's position."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        where = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else ""
        with contextlib.suppress(OSError):  # the terminal may be closed
            os.write(2, f"{self._not_saved(number)}\n  the main thread was at\n{where}".encode())
        end_family(family())
        if self._owns_process:
            os._exit(128 + number)
        while os.read(self._pipe[0], 1) != _END:  # code that waited for those processes ends by itself
            continue

    def _not_saved(self, number: int) -> EmbodrlError:
        error = EmbodrlError(
            f"stopped by {signal.Signals(number).name} without saving: the work in progress did"
            f" not end within {self._timeout_s:g} s",
            self._hint or "rerun the command",
            code="stopped-unsaved",
        )
        error.exit_code = 128 + number
        return error


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        os.write(2, f"{text}\n".encode())


def named_exit(error: SystemExit) -> EmbodrlError:
    """Return the error for custom code that exited the process, with its location."""
    where = user_location(error) or "a function of the pipeline"
    return EmbodrlError(
        f"{where} ended the process: SystemExit({error.code!r})",
        "raise an exception, or return a value; a run is stopped by a signal",
        code="pipeline-exit",
    )
