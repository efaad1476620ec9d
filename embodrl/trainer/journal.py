"""The rows of a run: written, shown, and checked for signs that it does not learn."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from embodrl.errors import EmbodrlError
from embodrl.reporting.health import HealthMonitor, HealthWarning
from embodrl.reporting.metrics_file import Row, read_metrics
from embodrl.reporting.sinks import MetricsLogger, MetricValue
from embodrl.reporting.usage import UsageMonitor
from embodrl.reporting.verdict import is_solved, regression
from embodrl.trainer.training_share import ShareMeter

logger = logging.getLogger(__name__)


class View(Protocol):
    """The user's view of a run."""

    def phase(self, text: str, chunks: int = 0) -> None:
        """Show the current phase, of so many chunks; 0: unknown."""
        ...

    def restore(self, rows: list[Row]) -> None:
        """Adopt the rows of earlier processes, without showing each one."""
        ...

    def update(self, row: Mapping[str, MetricValue]) -> None:
        """Show the metrics of an iteration."""
        ...

    def late(self, row: Mapping[str, MetricValue]) -> None:
        """Show an evaluation that ran in parallel with training."""
        ...

    def message(self, text: str) -> None:
        """Show a permanent line."""
        ...


class Journal:
    """The rows of a run, including earlier processes'.

    ``usage`` adds the machine's use since the last one, ``meter`` measures by the rows of this process.
    """

    def __init__(
        self,
        metrics: MetricsLogger,
        view: View,
        is_warm: bool,
        usage: UsageMonitor | None = None,
        meter: ShareMeter | None = None,
    ) -> None:
        self._usage = usage
        self._meter = meter
        self.metrics = metrics
        self.view = view
        self.rows = read_metrics(metrics.path)
        self._health = HealthMonitor(list(self.rows), is_warm)

    def add(self, row: Row) -> Row:
        """Write and show the row of an iteration; return it as written."""
        if self._usage is not None:
            row = row | self._usage.take(row)
        warnings = self._health.check(row)
        written = self.metrics.log(row | _codes(warnings))
        self.rows.append(written)
        self.view.update(written)
        _warn(warnings)
        if self._meter is not None and (line := self._meter.take(written)):
            self.view.message(line)
        return written

    def add_late(self, row: Row) -> int:
        """Write and show late results of an iteration that has a row; return the row's index."""
        warnings = self._health.check(row)
        written = self.metrics.log_late(row | _codes(warnings))
        index = next(i for i, known in enumerate(self.rows) if known["iteration"] == row["iteration"])
        self.rows[index] |= written
        self.view.late(written)
        _warn(warnings)
        return index

    def is_solved(self, success_rate: float | None, evaluations: int) -> bool:
        """Return whether the run may end early; see ``reporting.verdict.is_solved``."""
        return is_solved(self.rows, success_rate, evaluations)

    def regression(self, until: int, allowed: float | None) -> EmbodrlError | None:
        """Return the error of an evaluation far below the best one, among the rows before an index."""
        return regression(self.rows[:until], allowed)


def _codes(warnings: list[HealthWarning]) -> Row:
    return {f"health/{each.code}": 1.0 for each in warnings}


def _warn(warnings: list[HealthWarning]) -> None:
    for warning in warnings:
        logger.warning("%s", warning)
