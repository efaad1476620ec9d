"""A progress bar with rate and ETA on a terminal, an occasional plain line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from embodrl.reporting.terminal import safe_console

PLAIN_INTERVAL_S = 10.0


class Progress:
    """Shows the progress of a long task.

    Args:
        total: number of units; 0 if unknown.
        mode: auto, rich, plain or off; auto is rich on a terminal.
        is_even: units take about the same time, so that a rate and the remaining time can be shown.
    """

    def __init__(self, title: str, total: int, unit: str, mode: str = "auto", is_even: bool = True) -> None:
        self.title = title
        self.total = total
        self.unit = unit
        self.is_even = is_even and total > 0
        self._out = safe_console()
        self.mode = ("rich" if self._out.is_terminal else "plain") if mode == "auto" else mode
        self._start_s = self._last_s = time.monotonic()
        self._bar: RichProgress | None = None
        self._first = 0

    def start_at(self, done: int) -> None:
        """Count units from an earlier process as done, but exclude them from the rate."""
        self._first = done
        self._start_s = time.monotonic()
        if self._bar is not None:
            self._bar.reset(self._task, completed=done)

    def __enter__(self) -> Progress:
        if self.mode == "rich":
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(f"{self.unit}  {{task.fields[note]}}"),
                TimeElapsedColumn(),
                *([TextColumn("{task.fields[speed]}"), TimeRemainingColumn()] if self.is_even else []),
                console=self._out,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total or None, note="", speed="")
        return self

    def update(self, done: int, note: str = "") -> None:
        """Show that ``done`` units are done, including those of earlier processes."""
        now_s = time.monotonic()
        rate = (done - self._first) / max(now_s - self._start_s, 1e-9)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note, speed=f"{rate:.1f}/s")
        elif self.mode == "plain" and (now_s - self._last_s >= PLAIN_INTERVAL_S or self._is_over(done)):
            if self._is_over(done) and self._last_s == float("inf"):
                return
            eta = f"{(self.total - done) / rate:.0f} s" if rate > 0 else "unknown"
            of = f"/{self.total}" if self.total else ""
            speed = f", {rate:.1f}/s, ETA {eta}" if self.is_even else ""
            self._print(f"{self.title}: {done}{of} {self.unit}{speed}  {note}")
            self._last_s = float("inf") if self._is_over(done) else now_s

    def _is_over(self, done: int) -> bool:
        return 0 < self.total <= done

    @contextmanager
    def within(self, title: str, total: int, unit: str) -> Iterator[Progress]:
        """Pause for a nested task, which prints its own lines and does not count in this task's rate."""
        began_s = time.monotonic()
        yield Progress(title, total, unit, "off" if self.mode == "off" else "plain")
        self._start_s += time.monotonic() - began_s

    def message(self, text: str) -> None:
        if self.mode != "off":
            self._print(text)

    def _print(self, text: str) -> None:
        self._out.print(text, highlight=False, soft_wrap=True, markup=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
