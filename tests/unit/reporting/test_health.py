"""Warnings about runs that do not learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from embodrl.reporting.health import HealthMonitor, find_warnings

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def rows(name: str, *values: float | None) -> list[dict[str, Any]]:
    return [{"iteration": i, name: value} for i, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("code", "name", "bad", "healthy"),
    [
        ("logprobs-disagree", "train/first_minibatch_kl", [0.018], [0.0, 0.0004]),
        ("kl-too-large", "train/approx_kl", [0.01, 0.3], [0.01, 0.19]),
        ("clip-fraction-too-large", "train/clip_fraction", [0.4, 0.4, 0.4], [0.4, 0.4, 0.1, 0.4, 0.4]),
        ("entropy-collapse", "train/entropy", [2.0, 0.1, 0.1], [2.0, 0.1, 1.0, 0.1]),
        ("no-success", "rollout/success_rate", [0.0] * 5, [0.0] * 4 + [0.1] + [0.0] * 4),
        ("critic-worse-than-mean", "train/explained_variance", [-0.1] * 5, [-0.1] * 4 + [0.1, -0.1]),
        ("no-update", "train/num_updates", [0.0] * 3, [0.0, 0.0, 4.0, 0.0, 0.0]),
    ],
)
def test_each_warning_is_given_once_and_not_below_its_threshold(
    code: str, name: str, bad: list[float], healthy: list[float]
) -> None:
    assert find_warnings(rows(name, *healthy)) == []
    (warning,) = find_warnings(rows(name, *bad, *bad))
    assert (warning.code, warning.iteration) == (code, len(bad))
    assert warning.hint and f"(code: {code})" in str(warning)


def test_a_resumed_run_does_not_repeat_its_warnings_and_continues_counting() -> None:
    assert HealthMonitor(rows("train/approx_kl", 1.0)).check({"iteration": 2, "train/approx_kl": 1.0}) == []
    monitor = HealthMonitor(rows("rollout/success_rate", *[0.0] * 4))
    assert [w.code for w in monitor.check({"iteration": 5, "rollout/success_rate": 0.0})] == ["no-success"]


def test_missing_values_neither_warn_nor_count() -> None:
    assert find_warnings(rows("rollout/success_rate", 0.0, None, 0.0, None, 0.0, None, 0.0)) == []
    assert find_warnings([{"iteration": 0}]) == []


def test_a_policy_that_solves_the_task_may_stop_exploring() -> None:
    solved = [{"iteration": i, "train/entropy": e, "rollout/success_rate": 0.95} for i, e in enumerate([2.0, 0.1, 0.1])]
    assert find_warnings(solved) == []


@pytest.mark.parametrize("name", ["push_cube_seed_0", "push_cube_seed_1", "push_and_pull_seed_0", "lift_peg_seed_0"])
def test_recorded_healthy_runs_have_no_warnings(name: str) -> None:
    recorded = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    assert len(recorded) > 30 and find_warnings(recorded) == []
