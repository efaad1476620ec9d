"""Detects a hung batch: its thread uses no processor time."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from types import TracebackType

MAX_STEP_S = 2.0
"""Limit on the idle seconds added per look, since the whole process may have been suspended in between."""
MIN_CPU = 0.03
"""Fraction of one core that counts as progress."""


class BatchWatch:
    """Entered by the policy's thread for each batch; polled from another thread about once per second.

    Waiting for a GPU uses processor time too: CUDA spins by default.

    Args:
        limit_s: seconds without processor time after which a batch counts as hung.

    Attributes:
        found: why the batch counts as hung; "" otherwise.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._batch = 0
        self._thread: int | None = None
        self._looked = time.monotonic()
        self._used = 0.0
        self._seen = 0
        self.found = ""
        self.idle_s = 0.0

    def __enter__(self) -> None:
        self._batch += 1
        self._thread = threading.get_ident()

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._thread = None

    @property
    def is_entered(self) -> bool:
        return self._thread is not None

    def look(self) -> str:
        """Return why the batch counts as hung; "" otherwise."""
        now = time.monotonic()
        thread = self._thread
        batch = self._batch
        elapsed = min(now - self._looked, MAX_STEP_S)
        self._looked = now
        used = 0.0 if thread is None else time.clock_gettime(time.pthread_getcpuclockid(thread))
        is_same = thread is not None and batch == self._seen
        self.idle_s = self.idle_s + elapsed if is_same and used - self._used < MIN_CPU * elapsed else 0.0
        self._used = used
        self._seen = batch
        hangs = self.idle_s >= self._limit_s
        text = f"the policy hangs: a batch has used no processor time for {self.idle_s:.0f} s"
        self.found = (self.found or text) if hangs else ""
        return self.found

    def stack(self) -> str:
        frame = sys._current_frames().get(self._thread or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
