"""Training's share of the work, as the iterations of a run measure it: for later runs, and for its own placement.

Training on a processes for T seconds is a T of work, rollouts in r processes for R seconds are r R:
training's share of the work is a T / (a T + r R).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from embodrl.config import LoadedConfig
from embodrl.config.training_share import ShareChoice
from embodrl.deployment import Deployment, iteration_cost
from embodrl.errors import OutputError
from embodrl.preflight.placement import weighed
from embodrl.preflight.run_memory import plan_memory
from embodrl.reporting.metrics_file import Row
from embodrl.reporting.rows import is_number, number
from embodrl.reporting.usage import Parallel
from embodrl.storage.json_file import write_json_file

FILE = "training_share.json"
ITERATIONS = 2
TIMES = ("time/train_s", "time/env_s", "time/policy_s")
LIMITS = (0.001, 0.999)
WORTH_MOVING = 0.9
"""Part of the present time below which another placement is worth starting all processes again."""


@dataclass(frozen=True)
class Measured:
    """Seconds of training and rollouts in some iterations, and the processes that took them."""

    train_s: float
    rollout_s: float
    actors: int
    rollouts: int

    @property
    def share(self) -> float:
        """Training's share of the work, between ``LIMITS``; 0.5 if nothing took time."""
        return share_of(self.train_s, self.actors, self.rollout_s, self.rollouts)

    def __str__(self) -> str:
        return (
            f"cluster.training_share = {self.share:g}: training took {self.train_s:.1f} s in {self.actors} process(es),"
            f" rollouts {self.rollout_s:.1f} s in {self.rollouts}"
        )


def measure(loaded: LoadedConfig, rows: Sequence[Row]) -> Measured:
    """Return what the rows of a run say."""
    deployment = loaded.deployment
    parallel = Parallel.of_run(loaded.config, deployment)
    return Measured(
        sum(number(row, "time/train_s") for row in rows),
        sum(number(row, "time/env_s") / parallel.env + number(row, "time/policy_s") / parallel.rollout for row in rows),
        *_sizes(deployment),
    )


def _sizes(deployment: Deployment) -> tuple[int, int]:
    return len(deployment.of("actor")), len(deployment.of("rollout"))


def _are_apart(deployment: Deployment) -> bool:
    actors, rollouts = ({(one.node, one.devices) for one in deployment.of(name)} for name in ("actor", "rollout"))
    return not actors & rollouts


def _is_timed(row: Row) -> bool:
    return all(is_number(row.get(name)) for name in TIMES)


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
        if len(self._rows) == ITERATIONS or not _is_timed(row):
            return ""
        self._rows.append(row)
        return self._write() if len(self._rows) == ITERATIONS else ""

    def _write(self) -> str:
        measured = measure(self._loaded, self._rows)
        content = {
            "training_share": measured.share,
            "train_s": measured.train_s,
            "rollout_s": measured.rollout_s,
            "actor_processes": measured.actors,
            "rollout_processes": measured.rollouts,
            "measured": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": self._choice.settings,
        }
        write_json_file(self._directory / FILE, content)
        kept = f"kept in {self._choice.path}"
        try:
            write_json_file(self._choice.path, content)
        except OutputError as error:  # the run goes on; later ones measure again
            kept = f"not kept for later runs: {error.message}"
        return f"{measured}; {kept}; {self._implied(measured.share)}"

    def _implied(self, share: float) -> str:
        """Return the placement that the next run with these settings gets, if it fits the memories."""
        found = self._loaded.with_training_share(share).deployment
        same = found.processes == self._loaded.deployment.processes
        return "it implies this placement" if same else f"it implies another placement: {found.reasons[-1]}"


class Balancer:
    """Measures training's share again and again (``cluster.rebalance``), and finds a placement that is faster by it."""

    def __init__(self, loaded: LoadedConfig) -> None:
        self._loaded = loaded
        self._rows: list[Row] = []
        self._is_warm = False  # the first iteration of the processes takes longer than others

    def take(self, row: Row) -> tuple[LoadedConfig, str] | None:
        """Return the run on a faster placement and what was measured, in words; None: it stays where it is."""
        if not _is_timed(row) or not self._is_warm:
            self._is_warm = self._is_warm or _is_timed(row)
            return None
        self._rows.append(row)
        if len(self._rows) < self._loaded.config.cluster.rebalance:
            return None
        measured = measure(self._loaded, self._rows)
        self._rows = []
        other = weighed(self._loaded.with_training_share(measured.share))
        assert other.check is not None, "a loaded configuration has been checked"
        before = iteration_cost(measured.share, *_sizes(self._loaded.deployment))
        after = iteration_cost(measured.share, *_sizes(other.deployment))
        is_worth_it = after < WORTH_MOVING * before and _are_apart(other.deployment)
        if not is_worth_it or other.check(other.config, other.solution).errors:
            return None
        if not all(memory.fits for memory in plan_memory(other.config, other.deployment).memories):
            return None
        return other, f"{measured}; {other.deployment.reasons[0]}: {after / before:.0%} of the time"


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
