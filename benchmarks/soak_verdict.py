"""Whether a soak was passed: what the samples of its processes and the metrics of its run say."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WARM_UP = 0.25  # of the time, at the beginning
MAX_GROWTH = 0.05
MAX_NEW_FDS = 2


@dataclass(frozen=True)
class Sample:
    """What the processes of a run used at one moment.

    Attributes:
        time_s: since the start.
        driver_mib: memory that only the driver uses (USS).
        workers_mib: the same of each simulator process that is ready, the oldest first.
        driver_fds: open files of the driver.
        memory_files: shared memories that the owner of the simulators maps, one per simulator process.
        children: descendants of the driver.
    """

    time_s: float
    driver_mib: float
    workers_mib: tuple[float, ...]
    driver_fds: int
    memory_files: int
    children: int


@dataclass(frozen=True)
class Check:
    """One question and its answer.

    Attributes:
        name: what was asked.
        passed: the answer is as it should be.
        found: the figures.
    """

    name: str
    passed: bool
    found: str


def growth(values: Sequence[float]) -> float:
    """Return how much larger the median of the last third is than that of the first, as a fraction of the first."""
    third = max(1, len(values) // 3)
    first, last = statistics.median(values[:third]), statistics.median(values[-third:])
    return last / first - 1


def warm(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples after the warm-up."""
    return [sample for sample in samples if sample.time_s >= WARM_UP * samples[-1].time_s]


def check_memory(samples: Sequence[Sample]) -> list[Check]:
    """Check that the memory of driver and simulators is flat within 5 % after the warm-up."""
    after = warm(samples)
    series = {
        "memory of the driver": [sample.driver_mib for sample in after],
        "memory of the simulator process that is spared": [s.workers_mib[0] for s in after if s.workers_mib],
    }
    checks: list[Check] = []
    for name, values in series.items():
        if len(values) < 6:
            checks.append(Check(name, False, f"{len(values)} samples after the warm-up are too few to tell"))
            continue
        grown = growth(values)
        third = max(1, len(values) // 3)
        first, last = statistics.median(values[:third]), statistics.median(values[-third:])
        found = f"{first:.1f} -> {last:.1f} MiB, {grown:+.1%}; at most {MAX_GROWTH:+.0%}"
        checks.append(Check(name, grown <= MAX_GROWTH, found))
    return checks


def check_leaks(samples: Sequence[Sample], processes: int, children: int) -> list[Check]:
    """Check that files, shared memories and children do not pile up during the run."""
    after = warm(samples)
    third = max(1, len(after) // 3)
    fds = [statistics.median(s.driver_fds for s in part) for part in (after[:third], after[-third:])]
    memories = statistics.median(s.memory_files for s in after[-third:])
    alive = statistics.median(s.children for s in after[-third:])
    return [
        Check("open files of the driver", fds[1] - fds[0] <= MAX_NEW_FDS, f"{fds[0]:.0f} -> {fds[1]:.0f}"),
        Check("shared memories in use", memories <= processes, f"{memories:.0f} for {processes} processes"),
        Check("child processes", alive <= children, f"{alive:.0f} of {children}"),
    ]


def check_steps(rows: Sequence[dict[str, Any]], steps_per_iteration: int, chunk: int) -> list[Check]:
    """Check every row of metrics.jsonl: no iteration missing or twice, and every step counted but those lost.

    Args:
        rows: of metrics.jsonl, beginning with iteration 1.
        steps_per_iteration: of a rollout without faults.
        chunk: steps that an episode which was lost did not play.
    """
    numbers = [int(row["iteration"]) for row in rows]
    expected, wrong = 0, 0
    for row in rows:
        expected += steps_per_iteration - chunk * int(row["rollout/lost_episodes"])
        wrong += int(row["env_steps"]) != expected
    lost = sum(int(row["rollout/lost_episodes"]) for row in rows)
    return [
        Check("iterations", bool(rows) and numbers == list(range(1, len(rows) + 1)), f"1 to {len(rows)}, each once"),
        Check(
            "step counter",
            bool(rows) and wrong == 0,
            f"{int(rows[-1]['env_steps']) if rows else 0} steps, {expected} expected; {lost} chunks lost to faults"
            + f"; wrong in {wrong} rows" * bool(wrong),
        ),
    ]


def check_faults(restarts: int, sent: int, unnoticed: int) -> Check:
    """Check that each fault cost one restart, but those that came too late to be noticed, at most ``unnoticed``."""
    passed = restarts > 0 and 0 <= sent - restarts <= unnoticed
    return Check("restarts", passed, f"{restarts} for {sent} faults; at most {unnoticed} came too late to be noticed")
