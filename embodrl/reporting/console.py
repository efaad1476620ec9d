"""Terminal output of a run: a live panel, or one line per iteration without a terminal."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from embodrl.errors import without_controls
from embodrl.reporting.intervals import eval_interval
from embodrl.reporting.rows import is_number, number
from embodrl.reporting.sinks import MetricValue
from embodrl.reporting.terminal import safe_console
from embodrl.reporting.usage_text import usage_text

logger = logging.getLogger(__name__)

BAR_WIDTH = 24
# Without a terminal, a phase longer than this prints its progress.
PLAIN_INTERVAL_S = 10.0
ABSENT = "–"
SPARKS = "▁▂▃▄▅▆▇█"
PHASES = (
    ("env", "time/env_s", "cyan"),
    ("policy", "time/policy_s", "magenta"),
    ("train", "time/train_s", "green"),
    ("eval", "time/eval_s", "yellow"),
)
LOSSES = (
    ("policy loss", "train/policy_loss"),
    ("value loss", "train/value_loss"),
    ("entropy", "train/entropy"),
    ("kl", "train/approx_kl"),
    ("clipped", "train/clip_fraction"),
    ("grad norm", "train/grad_norm"),
    ("lr", "train/lr"),
)


def sparkline(values: list[float], width: int = 40) -> str:
    """Return the last values, each in 0..1, as a row of block characters."""
    return "".join(SPARKS[round(7 * min(1.0, max(0.0, value)))] for value in values[-width:])


class TimeLeft:
    """Estimates the remaining time of a run from the mean of the last ten iterations and evaluations.

    ``evaluations_after`` maps a number of iterations to the number of later evaluations.
    """

    def __init__(self, total: int, evaluations_after: Callable[[int], int]) -> None:
        self._total = total
        self._evaluations_after = evaluations_after
        self._iterations: deque[float] = deque(maxlen=10)
        self._evaluations: deque[float] = deque(maxlen=10)
        self._done = 0
        self._steps = 0.0
        self._noted_s = time.monotonic()

    def note(self, row: Mapping[str, MetricValue]) -> None:
        """Record an iteration, and separately its evaluation, if any."""
        seconds = number(row, "time/total_s")
        evaluation = number(row, "time/eval_s")
        steps = number(row, "env_steps")
        self._done = int(number(row, "iteration"))
        self._noted_s = time.monotonic()
        has_trained = steps > self._steps
        if evaluation:  # without other work, all of the time belongs to the evaluation
            self._evaluations.append(evaluation if has_trained else max(seconds, evaluation))
        if seconds and has_trained:
            self._iterations.append(max(0.0, seconds - evaluation))
        self._steps = max(self._steps, steps)

    def text(self) -> str:
        """Return the remaining time, less the time since the last iteration; "" if unknown."""
        if not self._iterations:
            return ""
        evaluations = self._evaluations_after(self._done)
        left = (self._total - self._done) * sum(self._iterations) / len(self._iterations)
        if self._evaluations:
            left += evaluations * sum(self._evaluations) / len(self._evaluations)
        unknown = " and evaluations" if evaluations and not self._evaluations else ""
        return f"{_duration(max(0.0, left - (time.monotonic() - self._noted_s)))}{unknown}"


@dataclass
class _Phase:
    """What the run does now, and how much of it is done; ``total`` is 0 if unknown."""

    text: str = "starting"
    total: int = 0
    unit: str = ""
    done: int = 0
    start_s: float = field(default_factory=lambda: time.monotonic())

    def __str__(self) -> str:
        seconds = _duration(time.monotonic() - self.start_s)
        # An evaluation stops before its last possible chunk if its episodes end earlier.
        share = f" {min(self.done, self.total)}/{self.total} {self.unit}" if self.total else ""
        return f"{self.text}{share}, {seconds}"


@dataclass
class _Success:
    """Success rates of the run so far: of rollouts, of evaluations, and the interval of the last evaluation."""

    train: list[float] = field(default_factory=list[float])
    eval: list[float] = field(default_factory=list[float])
    interval: str = ""

    def note(self, row: Mapping[str, MetricValue]) -> None:
        for value, history in ((_started(row), self.train), (row.get("eval/success_rate"), self.eval)):
            if is_number(value):
                history.append(float(value))
        if found := eval_interval(row):
            self.interval = f" [{100 * found[0]:.0f}, {100 * found[1]:.0f}]"


class Console:
    """Shows a run.

    Args:
        mode: auto is rich on a terminal and plain elsewhere.
        stream: replaces the terminal (tests).
        evaluations_after: maps a number of iterations to the number of later evaluations, for the remaining time.
    """

    def __init__(
        self,
        mode: Literal["auto", "rich", "plain", "off"],
        total_iterations: int,
        name: str = "",
        stream: RichConsole | None = None,
        evaluations_after: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self._out = stream or safe_console()
        self.mode = mode if mode != "auto" else ("rich" if self._out.is_terminal else "plain")
        self.total_iterations = total_iterations
        self.name = without_controls(name)
        self._row: dict[str, MetricValue] = {}
        self._success = _Success()
        self._left = TimeLeft(total_iterations, evaluations_after)
        self._messages: deque[str] = deque(maxlen=6)
        self._phase = _Phase()
        self._start_s = self._printed_s = time.monotonic()
        self._earlier_s = 0.0
        self._live: Live | None = None

    def start(self) -> None:
        if self.mode == "rich" and self._live is None:
            # Rendered by its own thread, so that the clock ticks while the main thread works.
            self._live = Live(
                get_renderable=self._render, console=self._out, refresh_per_second=4, redirect_stderr=True
            )
            self._live.start()

    def restore(self, rows: list[dict[str, MetricValue]]) -> None:
        """Load the rows of a resumed run, without showing each."""
        for row in rows:
            self._absorb(row)
        self._earlier_s = self._number("time/elapsed_s")

    def update(self, row: Mapping[str, MetricValue]) -> None:
        self._absorb(row)
        logger.info("%s", self._line())
        self._print(self._line())
        self._refresh()

    def late(self, row: Mapping[str, MetricValue]) -> None:
        """Show a late result of an asynchronous evaluation."""
        self._success.note(row)
        found = eval_interval(row)
        interval = f" [{found[0]:.2f}, {found[1]:.2f}]" if found else ""
        rate = row.get("eval/success_rate")
        shown = f"{rate:.3f}" if is_number(rate) else "not known"
        self.message(f"evaluation after iteration {row['iteration']}: success {shown}{interval}")

    def phase(self, text: str, chunks: int = 0) -> None:
        """Show the current phase; without a terminal, only once it takes longer than ``PLAIN_INTERVAL_S``.

        ``chunks`` is the upper bound on calls of ``advance``; 0 if unknown.
        """
        self._phase = _Phase(text, chunks, "chunks")
        self._refresh()

    def advance(self) -> None:
        self._phase.done += 1
        self._print_phase()

    def step(self, done: int, total: int) -> None:
        self._phase = replace(self._phase, done=done, total=total, unit="updates")
        self._print_phase()

    def _print_phase(self) -> None:
        if self.mode == "plain" and time.monotonic() - max(self._printed_s, self._phase.start_s) >= PLAIN_INTERVAL_S:
            done = self._number("iteration")
            self._print(f"iter {done:.0f}/{self.total_iterations} done, now {self._phase}")

    def message(self, text: str) -> None:
        """Show a permanent line, such as the path of a checkpoint."""
        text = without_controls(text)
        logger.info("%s", text)
        self._messages.append(text)
        self._print(text)
        self._refresh()

    def _print(self, text: str) -> None:
        if self.mode == "plain":
            self._printed_s = time.monotonic()
            self._out.print(text, highlight=False, soft_wrap=True, markup=False)

    def close(self) -> None:
        """Close the panel, leaving its last state on the terminal; may be called twice."""
        if self._live is not None:
            self._refresh()
            self._live.stop()
            self._live = None

    def __enter__(self) -> Console:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _absorb(self, row: Mapping[str, MetricValue]) -> None:
        self._row = dict(row)
        self._success.note(row)
        self._left.note(self._row)

    def _number(self, name: str) -> float:
        return number(self._row, name)

    def _has(self, name: str) -> bool:
        return is_number(self._row.get(name))

    def _steps_per_s(self) -> str:
        name = "time/env_steps_per_s"
        return f"{self._number(name):.0f} env-steps/s" if self._has(name) else ""

    def _line(self) -> str:
        width = len(str(self.total_iterations))
        parts = [f"iter {self._number('iteration'):{width}.0f}/{self.total_iterations}"]
        parts.append(f"env_steps {self._number('env_steps'):.0f}")
        if is_number(success := _started(self._row)):
            parts.append(f"success {success:.3f}")
        if self._has("eval/success_rate"):
            found = eval_interval(self._row)
            interval = f" [{found[0]:.2f}, {found[1]:.2f}]" if found else ""
            parts.append(f"eval {self._number('eval/success_rate'):.3f}{interval}")
        for label, name in LOSSES[:4]:
            if self._has(name):
                parts.append(f"{label} {self._number(name):.4g}")
        if speed := self._steps_per_s():
            parts.append(speed)
        for label, name, _ in PHASES:
            if self._has(name):
                parts.append(f"{label} {self._number(name):.1f}s")
        if eta := self._left.text():
            parts.append(f"eta {eta}")
        return "  ".join(parts)

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def _render(self) -> RenderableType:
        done = self._number("iteration")
        head = Table.grid(padding=(0, 2))
        head.add_row("iteration", f"{_bar(done / self.total_iterations)} {done:.0f}/{self.total_iterations}")
        progress = [f"{self._number('env_steps'):,.0f}", self._steps_per_s(), f"{_duration(self._elapsed())} elapsed"]
        eta = self._left.text()
        progress.append(f"ETA {eta}" if eta else "")
        head.add_row("env-steps", "   ".join(part for part in progress if part))
        head.add_row("now", Text(str(self._phase), style="italic"))

        success = Table.grid(padding=(0, 2))
        for label, history, style in (
            ("success", self._success.train, "yellow"),
            ("eval", self._success.eval, "bold yellow"),
        ):
            if history:
                more = "" if label == "success" else self._success.interval
                success.add_row(label, Text(sparkline(history), style=style), f"{100 * history[-1]:.1f} %{more}")

        split = Table.grid(padding=(0, 2))
        total = self._number("time/total_s") or sum(self._number(name) for _, name, _ in PHASES)
        for label, name, style in PHASES:
            if total and self._has(name):
                seconds = self._number(name)
                bar = Text(_bar(seconds / total), style=style)
                shown = "eval time" if label == "eval" else label
                split.add_row(shown, bar, f"{100 * seconds / total:.0f} %", f"{seconds:.1f} s")

        losses = Table.grid(padding=(0, 3))
        cells = [
            f"{label} {self._number(name):.4g}" if self._has(name) else f"{label} {ABSENT}"
            for label, name in LOSSES
            if name in self._row
        ]
        for start in range(0, len(cells), 4):
            losses.add_row(*cells[start : start + 4])
        parts: list[RenderableType] = [head, Text(), success, Text(), split, Text(), losses]
        if used := usage_text(self._row):
            parts += [Text(), Text(f"usage  {used}")]
        if self._messages:
            parts += [Text(), *(Text(message, style="dim") for message in list(self._messages))]
        return Panel(Group(*parts), title=Text(f"embodrl {self.name}".strip()), title_align="left", padding=(1, 2))

    def _elapsed(self) -> float:
        return self._earlier_s + time.monotonic() - self._start_s


def _started(row: Mapping[str, MetricValue]) -> MetricValue:
    """Return the success rate per started episode; the rate of ended episodes leaves out many failures."""
    return row.get("rollout/success_rate_started", row.get("rollout/success_rate"))


def _bar(part: float) -> str:
    filled = round(BAR_WIDTH * min(1.0, max(0.0, part)))
    return "█" * filled + "░" * (BAR_WIDTH - filled)


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "not known"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
