"""A sweep: its runs, their commands and files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from embodrl.config.argument_file import PREFIX, text_of_arguments
from embodrl.config.compose import assignment, code_of, parse_arguments
from embodrl.processes.child import module_command
from embodrl.reporting.metrics_file import METRICS_FILE
from embodrl.storage.json_file import write_text_file
from embodrl.tools.compare.comparison import RunView, read_runs
from embodrl.tools.sweep.combinations import SweptRun
from embodrl.trainer.files import POLICY_DIR, REPORT_FILE

LOGS = "logs"
SETTINGS = "settings"
EMBODRL = module_command("embodrl")


@dataclass(frozen=True)
class Sweep:
    """A sweep, as kept in sweep.json.

    Runs get their settings as files with the trust of sweep.json: on the command line, another user's settings would
    count as the user's own.

    Attributes:
        runs: runs in starting order.
        config_file: YAML file of all runs, absolute; None for none.
        slurm: options of sbatch, e.g. ``--gpus=1``.
        ray: resources of a run as NAME=AMOUNT, e.g. ``num_gpus=1``.
        approved: this user has written or trusted the sweep.
        trust: the runs are started with --trust.
    """

    directory: Path
    runs: tuple[SweptRun, ...]
    config_file: Path | None
    max_iterations: tuple[int, ...]
    jobs: int
    backend: str
    slurm: tuple[str, ...]
    approved: bool = False
    trust: bool = False
    ray: tuple[str, ...] = ()

    def command(self, index: int) -> list[str]:
        """Return the command that starts a run, or resumes it if it has a checkpoint or metrics."""
        path = self.path(index)
        trust = ["--trust"] * self.trust
        if (path / METRICS_FILE).is_file() or any(path.glob("checkpoints/step_*")):
            return [*EMBODRL, "resume", *trust, str(path)]
        config = [] if self.config_file is None else ["--config", str(self.config_file)]
        settings = [f"{PREFIX}{self.settings_file(index)}", assignment("runner.output_dir", path)]
        return [*EMBODRL, "train", *trust, *config, *settings]

    def settings_file(self, index: int) -> Path:
        return self.directory / SETTINGS / f"{self.runs[index].name}.yaml"

    def write_settings(self) -> None:
        """Write the argument files of the remaining runs; raises OutputError."""
        (self.directory / SETTINGS).mkdir(exist_ok=True)
        for index in self.unfinished():
            texts = list(self.runs[index].overrides)
            approved = code_of(parse_arguments(texts)[0]) if self.approved else {}
            write_text_file(self.settings_file(index), text_of_arguments(texts, approved))

    def path(self, index: int) -> Path:
        return self.directory / self.runs[index].name

    def log(self, index: int) -> Path:
        """Return the file with the output of a run."""
        return self.directory / LOGS / f"{self.runs[index].name}.log"

    def is_finished(self, index: int) -> bool:
        return (self.path(index) / POLICY_DIR).is_dir() and (self.path(index) / REPORT_FILE).is_file()

    def unfinished(self) -> list[int]:
        return [index for index in range(len(self.runs)) if not self.is_finished(index)]

    def views(self) -> list[RunView]:
        paths = [self.path(index) for index in range(len(self.runs))]
        return read_runs([path for path in paths if (path / METRICS_FILE).is_file()])
