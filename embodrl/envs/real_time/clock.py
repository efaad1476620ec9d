"""Time as a robot has it, and a rate of control that is held."""

from __future__ import annotations

import time

import numpy as np


class Clock:
    """Seconds of the robot's time.

    Args:
        speed: seconds of it in a second of wall-clock time.
    """

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed

    def now(self) -> float:
        """Return the time in seconds since some moment."""
        return time.monotonic() * self.speed

    def sleep(self, seconds: float) -> None:
        """Wait for so much of the robot's time."""
        time.sleep(seconds / self.speed)


class Pacer:
    """Lets observations be taken at equal intervals, and measures the time between the commands.

    An observation at time t is answered by a command, and the next one is taken at t + period. Where the command comes
    later than that, the deadline is missed, and the intervals count from there on.

    Args:
        clock: the robot's.
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
        """An observation is taken now, and no command came before it: an episode begins, or a pause ends."""
        self._seen_s = self.clock.now()
        self._sent_s = None
        self._is_waiting = False

    def command(self) -> None:
        """A command is sent now."""
        now = self.clock.now()
        if self._sent_s is not None:
            self._periods_s.append(now - self._sent_s)
        self._sent_s = now
        self._is_waiting = True

    def wait(self) -> None:
        """Return when the observation after the last command is due; at once if that was waited for already."""
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
        """Return percentiles of the time between commands in seconds of the robot, and missed deadlines, since last
        asked.
        """
        periods = np.array(self._periods_s)
        missed = self._missed
        self._periods_s = []
        self._missed = 0
        found: dict[str, float] = {"periods": len(periods), "missed_deadlines": missed}
        if len(periods):
            p50, p99 = np.percentile(periods, (50, 99)).tolist()
            found |= {"period_p50_s": p50, "period_p99_s": p99, "period_max_s": float(periods.max())}
        return found
