"""Signals: a run that is asked to stop saves first."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopSignal:
    """Remembers SIGINT, SIGTERM and SIGHUP (the terminal was closed), so that the loop can save and leave.

    While it is entered it replaces the handlers of these signals; afterwards the previous ones are back. Outside the
    main thread, where Python allows no handlers, it does nothing.

    Attributes:
        number: of the first signal; 0 without one.
        graceful: there is something to save. Without it, and from the second signal on, a signal ends the process at
            once, through the ``finally`` clauses that close the simulators.
    """

    def __init__(self) -> None:
        self.number = 0
        self.graceful = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the run is to outlive its terminal
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number or not self.graceful:
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
