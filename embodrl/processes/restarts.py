"""Restart limits per time window, so that the rare faults of a long run do not add up."""

from __future__ import annotations

import threading
import time
from collections import deque

WINDOW_S = 3600.0


class RestartBudget:
    """Allows ``limit`` restarts per window of ``window_s`` seconds; thread-safe."""

    def __init__(self, limit: int, window_s: float = WINDOW_S) -> None:
        self.limit = limit
        self.window_s = window_s
        self._times: deque[float] = deque()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Count a restart; return False if the window already has ``limit`` of them."""
        now = time.monotonic()
        with self._lock:
            while self._times and now - self._times[0] > self.window_s:
                self._times.popleft()
            if len(self._times) >= self.limit:
                return False
            self._times.append(now)
            return True

    @property
    def used(self) -> str:
        """Used part of the budget, as ``2 of 3``."""
        return f"{len(self._times)} of {self.limit}"

    def __str__(self) -> str:
        window = f"{self.window_s / 60:.0f} min" if self.window_s >= 120 else f"{self.window_s:g} s"
        return f"{self.limit} restarts within {window}"
