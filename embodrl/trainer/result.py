"""The result of a training run."""

from __future__ import annotations

import logging
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from embodrl.config.schema import Config
from embodrl.models.base import VLAPolicy
from embodrl.reporting.console import Console
from embodrl.reporting.metrics_file import METRICS_FILE, Row, read_metrics, restore_metrics
from embodrl.reporting.report import write_report
from embodrl.storage.checkpoint import Checkpoint
from embodrl.trainer.afterwards import afterwards
from embodrl.trainer.files import (
    POLICY_DIR,
    REPORT_FILE,
    export_policy,
    offline_lines,
    saved_metrics,
    summary_lines,
    unsaved_run_message,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run.

    Attributes:
        run_dir: configuration, metrics, checkpoints, videos, report.html and, if finished, ``policy/``.
        exit_code: 0 finished, 1 the last iteration could not be saved, 128 + N stopped by signal N.
        policy: current policy, on its device; None if ``resume`` had nothing left to do.
    """

    run_dir: Path
    exit_code: int
    policy: VLAPolicy | None = field(repr=False)  # its repr would list every layer

    @property
    def metrics(self) -> list[Row]:
        """One dictionary per iteration, as in metrics.jsonl."""
        return read_metrics(self.run_dir / METRICS_FILE)

    @property
    def success_rate(self) -> float | None:
        """Success rate (0 to 1) of the last evaluation, with greedy actions; None without one."""
        rates = [row["eval/success_rate"] for row in self.metrics if row.get("eval/success_rate") is not None]
        return float(rates[-1]) if rates else None

    @property
    def videos(self) -> list[Path]:
        """Videos of evaluation episodes, oldest first."""
        return sorted(self.run_dir.glob("videos/*/[!.]*.mp4"))


def already_complete(
    config: Config, directory: Path, checkpoint: Checkpoint, done: int, overrides: list[str]
) -> TrainResult:
    """Report that a run has nothing left to do; restore its metrics if they are damaged."""
    restore_metrics(directory / METRICS_FILE, saved_metrics(checkpoint))
    with Console(config.runner.logger.console, done, directory.name) as console:
        console.restore(read_metrics(directory / METRICS_FILE))
        console.message(
            f"run already complete ({done}/{done} iterations); to train further, pass runner.max_iterations={2 * done}"
        )
        if overrides:
            console.message(f"nothing was trained, so these settings had no effect: {' '.join(overrides)}")
    return TrainResult(directory, 0, None)


def conclude(
    config: Config, run_dir: Path, policy: VLAPolicy, console: Console, iteration: int, finished: bool, saved: bool
) -> None:
    """Export the policy of a finished run, write the report, and print the next steps.

    A report that cannot be written costs a warning, not the run.
    """
    if finished:
        export_policy(policy, run_dir / POLICY_DIR, config, iteration=iteration)
    if not saved:
        logger.error("%s", unsaved_run_message(run_dir, iteration))
    rows: list[Row] = []
    quoted = shlex.quote(str(run_dir))
    with afterwards(REPORT_FILE, f"embodrl resume {quoted}"):
        rows = read_metrics(run_dir / METRICS_FILE)
        if rows:
            console.message(f"report: {write_report(run_dir)}")
    for line in offline_lines(config, run_dir):
        console.message(line)
    if rows and finished:
        console.phase("finished")
        with afterwards("the summary", f"embodrl compare {quoted}"):
            for line in summary_lines(run_dir, rows):
                console.message(line)
    if saved and not finished:
        console.message(f"stopped by a signal; `embodrl resume {quoted}` continues")
