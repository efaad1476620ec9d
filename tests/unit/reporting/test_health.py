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


def test_a_warm_start_that_solves_nothing_was_not_made_for_the_task() -> None:
    row = {"iteration": 0, "eval/success_rate": 0.0, "eval/episodes": 16.0}
    assert [w.code for w in find_warnings([row], warm_started=True)] == ["warm-start-without-task"]
    assert find_warnings([row]) == [] and find_warnings([row | {"iteration": 5}], warm_started=True) == []
    for other in ({"eval/success_rate": 0.1}, {"eval/episodes": 8.0}):
        assert find_warnings([row | other], warm_started=True) == []


def test_a_reward_that_pays_for_failing() -> None:
    def paid(solved: float | None, failed: float | None) -> dict[str, Any]:
        return {"iteration": 1, "rollout/return_solved": solved, "rollout/return_failed": failed}

    assert [w.code for w in find_warnings([paid(1.0, 1.5)] * 3)] == ["failure-pays"]
    assert find_warnings([paid(1.0, 1.5)] * 2 + [paid(1.5, 1.0)] + [paid(1.0, 1.5)] * 2) == []
    assert find_warnings([paid(None, 1.5)] * 9) == []


def test_runs_with_a_replay_buffer_have_checks_of_their_own() -> None:
    bad = {
        "train/approx_kl": 9.0,
        "train/clip_fraction": 0.9,
        "train/explained_variance": -1.0,
        "train/num_updates": 0.0,
    }
    off = [bad | {"iteration": i, "replay/size": 100.0, "train/entropy": 2.0 - i} for i in range(9)]
    assert find_warnings(off) == []
    q = [
        {"iteration": i, "replay/size": 1.0, "rollout/return": 2.0, "train/q_mean": x}
        for i, x in enumerate([50, 60, 70])
    ]
    (warning,) = find_warnings(q)
    assert (warning.code, warning.iteration) == ("critic-divergence", 2)
    assert find_warnings([row | {"rollout/return": -4.0} for row in q]) == []  # within 20 times the return
    assert find_warnings([row | {"train/q_mean": 60.0} for row in q]) == []  # does not grow


@pytest.mark.parametrize("name", ["push_cube_seed_0", "push_cube_seed_1", "push_and_pull_seed_0", "lift_peg_seed_0"])
def test_recorded_healthy_runs_have_no_warnings(name: str) -> None:
    recorded = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    assert len(recorded) > 30 and find_warnings(recorded) == []
