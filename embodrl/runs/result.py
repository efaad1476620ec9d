"""What a training run leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from embodrl.config.schema import Config
from embodrl.models.base import VLAPolicy
from embodrl.reporting.console import Console
from embodrl.reporting.metrics_file import METRICS_FILE, Row, read_metrics, restore_metrics
from embodrl.runs.files import saved_metrics
from embodrl.storage.checkpoint import Checkpoint


@dataclass(frozen=True)
class TrainResult:
    """What a training run leaves behind.

    Attributes:
        run_dir: configuration, metrics, checkpoints, videos, report.html and, if finished, ``policy/``.
        exit_code: 0 finished, 1 the last iteration could not be saved, 128 + N stopped by signal N.
        policy: as trained so far, on its device; None where ``resume`` found nothing left to do.
    """

    run_dir: Path
    exit_code: int
    policy: VLAPolicy | None = field(repr=False)  # its text is that of every layer

    @property
    def metrics(self) -> list[Row]:
        """One dictionary per iteration, as in metrics.jsonl."""
        return read_metrics(self.run_dir / METRICS_FILE)

    @property
    def videos(self) -> list[Path]:
        """Videos of evaluation episodes, oldest first."""
        return sorted(self.run_dir.glob("videos/*/[!.]*.mp4"))


def already_complete(
    config: Config, directory: Path, checkpoint: Checkpoint, done: int, overrides: list[str]
) -> TrainResult:
    """Say that a run has nothing left to do; its metrics are restored where they are damaged."""
    restore_metrics(directory / METRICS_FILE, done, saved_metrics(checkpoint))
    with Console(config.runner.logger.console, done, directory.name) as console:
        console.restore(read_metrics(directory / METRICS_FILE))
        console.message(
            f"run already complete ({done}/{done} iterations); to train further, pass runner.max_iterations={2 * done}"
        )
        if overrides:
            console.message(f"nothing was trained, so these settings had no effect: {' '.join(overrides)}")
    return TrainResult(directory, 0, None)
