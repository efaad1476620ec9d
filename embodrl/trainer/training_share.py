"""``cluster.training_share=auto``: what the first iterations of a run say about its placement.

Training on a processes for T seconds is a T of work, rollouts in r processes for R seconds are r R:
training's share of the work is a T / (a T + r R).
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from embodrl.config import LoadedConfig
from embodrl.config.training_share import ShareChoice
from embodrl.deployment import solve
from embodrl.errors import OutputError
from embodrl.reporting.metrics_file import Row
from embodrl.reporting.rows import is_number, number
from embodrl.reporting.usage import Parallel
from embodrl.storage.json_file import write_json_file

FILE = "training_share.json"
ITERATIONS = 2
TIMES = ("time/train_s", "time/env_s", "time/policy_s")
LIMITS = (0.001, 0.999)


class ShareMeter:
    """Measures training's share of the work by the first rows of a run, and writes it where later runs look."""

    def __init__(self, loaded: LoadedConfig, choice: ShareChoice, directory: Path) -> None:
        self._loaded = loaded
        self._choice = choice
        self._directory = directory
        self._rows: list[Row] = []

    def take(self, row: Row) -> str:
        """Return what was measured, in words, at the last row that it needs; "" at the others.

        Raises:
            OutputError: the result can't be written to the run directory.
        """
        if len(self._rows) == ITERATIONS or not all(is_number(row.get(name)) for name in TIMES):
            return ""
        self._rows.append(row)
        return self._write() if len(self._rows) == ITERATIONS else ""

    def _write(self) -> str:
        deployment = self._loaded.deployment
        actors = len(deployment.of("actor"))
        rollouts = len(deployment.of("rollout"))
        parallel = Parallel.of_run(self._loaded.config, deployment)
        train_s = sum(number(row, "time/train_s") for row in self._rows)
        rollout_s = sum(
            number(row, "time/env_s") / parallel.env + number(row, "time/policy_s") / parallel.rollout
            for row in self._rows
        )
        share = share_of(train_s, actors, rollout_s, rollouts)
        content = {
            "training_share": share,
            "train_s": train_s,
            "rollout_s": rollout_s,
            "actor_processes": actors,
            "rollout_processes": rollouts,
            "measured": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": self._choice.settings,
        }
        write_json_file(self._directory / FILE, content)
        kept = f"kept in {self._choice.path}"
        try:
            write_json_file(self._choice.path, content)
        except OutputError as error:  # the run goes on; later ones measure again
            kept = f"not kept for later runs: {error.message}"
        return (
            f"cluster.training_share = {share:g}: training took {train_s:.1f} s in {actors} process(es), rollouts"
            f" {rollout_s:.1f} s in {rollouts}; {kept}; {self._implied(share)}"
        )

    def _implied(self, share: float) -> str:
        """Return the placement that the next run with these settings gets, if it fits the memories."""
        config = self._loaded.config
        cluster = config.cluster.model_copy(update={"training_share": share})
        solution = self._loaded.solution
        found = solve(config.model_copy(update={"cluster": cluster}), solution.machine, solution.planning).deployment
        same = found.processes == self._loaded.deployment.processes
        return "it implies this placement" if same else f"it implies another placement: {found.reasons[-1]}"


def share_of(train_s: float, actors: int, rollout_s: float, rollouts: int) -> float:
    """Return training's share of the work, between ``LIMITS``; 0.5 if nothing took time."""
    work = train_s * actors + rollout_s * rollouts
    share = train_s * actors / work if work else 0.5
    return round(min(max(share, LIMITS[0]), LIMITS[1]), 3)


def share_meter(loaded: LoadedConfig, directory: Path) -> ShareMeter | None:
    """Return what measures the share of a run; None where it was given or measured, or does not matter."""
    choice = loaded.share
    if choice is None or choice.measured or not loaded.config.divides_devices:
        return None
    return ShareMeter(loaded, choice, directory)
