"""Robot time, and a fixed control rate."""

from __future__ import annotations

import time

import numpy as np


class Clock:
    """Clock of the robot's time in seconds; ``speed`` is robot seconds per second of wall-clock time."""

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed

    def now(self) -> float:
        """Return the time in seconds since an arbitrary moment."""
        return time.monotonic() * self.speed

    def sleep(self, seconds: float) -> None:
        """Wait for the given robot time."""
        time.sleep(seconds / self.speed)


class Pacer:
    """Spaces observations at equal intervals, and measures the time between commands.

    An observation at time t is answered by a command, and the next one is taken at t + period. If the command comes
    later, the deadline is missed, and the intervals count from there on.

    Args:
        clock: robot clock.
        hz: commands per second.
    """

    def __init__(self, clock: Clock, hz: float) -> None:
        self.clock = clock
        self.period_s = 1 / hz
        self._seen_s = clock.now()
        self._sent_s: float | None = None
        self._is_waiting = False
        self._periods_s: list[float] = []
        self._missed = 0

    def begin(self) -> None:
        """Take an observation not preceded by a command: an episode begins, or a pause ends."""
        self._seen_s = self.clock.now()
        self._sent_s = None
        self._is_waiting = False

    def command(self) -> None:
        """Record that a command is sent now."""
        now = self.clock.now()
        if self._sent_s is not None:
            self._periods_s.append(now - self._sent_s)
        self._sent_s = now
        self._is_waiting = True

    def wait(self) -> None:
        """Wait until the observation after the last command is due; return at once if it was already awaited."""
        if not self._is_waiting:
            return
        due = self._seen_s + self.period_s
        now = self.clock.now()
        if now <= due:
            self.clock.sleep(due - now)
        else:
            self._missed += 1
        self._seen_s = max(due, now)
        self._is_waiting = False

    def status(self) -> dict[str, float]:
        """Return percentiles of the time between commands (robot seconds) and missed deadlines since the last call."""
        periods = np.array(self._periods_s)
        missed = self._missed
        self._periods_s = []
        self._missed = 0
        found: dict[str, float] = {"periods": len(periods), "missed_deadlines": missed}
        if len(periods):
            p50, p99 = np.percentile(periods, (50, 99)).tolist()
            found |= {"period_p50_s": p50, "period_p99_s": p99, "period_max_s": float(periods.max())}
        return found
