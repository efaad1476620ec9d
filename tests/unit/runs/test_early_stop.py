"""Early stopping and the gate against regressions, with a runner that only notes what it does."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from expect import raises_code

from embodrl.config import load_config
from embodrl.errors import ConfigError, EmbodrlError
from embodrl.extras.compare.comparison import read_runs
from embodrl.reporting.verdict import is_solved, regression
from embodrl.runs.beside import UnderWay
from embodrl.runs.loop import Runner


def rows_of(*rates: float | None) -> list[dict[str, Any]]:
    """Rows of iterations 0, 1, ...; None is an iteration without evaluation."""
    return [{"iteration": i} | ({} if rate is None else {"eval/success_rate": rate}) for i, rate in enumerate(rates)]


@pytest.mark.parametrize(
    ("rates", "count", "expected"),
    [
        ((1.0,), 1, False),  # before the first update
        ((0.0, 0.9), 1, True),
        ((0.0, 0.9, None, 0.8), 1, False),
        ((0.0, 0.9, None, 0.9), 2, True),
        ((0.0, 0.9, 0.8, 0.95), 2, False),
        ((0.0, 0.8, 0.95, 0.9, None), 2, True),
        ((0.0, 0.95), 2, False),
        ((0.0, float("nan")), 1, False),
    ],
)
def test_a_task_is_solved_when_the_last_evaluations_say_so(
    rates: tuple[float | None, ...], count: int, expected: bool
) -> None:
    assert is_solved(rows_of(*rates), 0.9, count) is expected
    assert not is_solved(rows_of(*rates), None, count)


@pytest.mark.parametrize(
    ("rates", "fails"),
    [
        ((0.75,), False),
        ((0.75, 0.5), False),
        ((0.75, 0.25), True),  # the policy that training began with counts
        ((0.0, 0.5, 0.25, None, 0.125), True),
        ((0.0, 0.5, 0.125, None), False),  # judged when it was evaluated
        ((0.5, 0.75, 1.0), False),
    ],
)
def test_a_regression_is_measured_against_the_best(rates: tuple[float | None, ...], fails: bool) -> None:
    error = regression(rows_of(*rates), 0.25)
    assert (error is not None) == fails
    assert error is None or error.code == "evaluation-regressed"
    assert regression(rows_of(*rates), None) is None


class Noting(Runner):
    """A run whose evaluations find the given success rates."""

    def __init__(self, rates: list[float], *settings: str) -> None:
        self.config = load_config(["env=toy", "runner.max_iterations=6", "runner.eval_interval=2", *settings]).config
        self.run_dir, self.iteration, self.rates = Path("run"), 0, rates
        self.rows, self.did, self.saved, self._last_saved = [], [], False, None
        self.metrics: Any = SimpleNamespace(log=lambda row: row, log_late=lambda row: row)
        self.health: Any = SimpleNamespace(check=lambda row: [])
        self.console: Any = SimpleNamespace(
            update=lambda row: None, late=lambda row: None, phase=lambda name: None, message=self.did.append
        )
        self.collector: Any = SimpleNamespace(reset_history=lambda: None)
        self.beside, self._regressed, self.best = None, None, -1.0
        self.stop: Any = SimpleNamespace(saving=contextlib.nullcontext, can_save=lambda hint: None)

    late: Any

    def walk(self) -> int:
        self.pending = {"iteration": 0}
        self._complete()
        while not self.finished:
            self.iteration += 1
            self.pending = {"iteration": self.iteration}
            self._complete()
        return self.iteration

    def _evaluate(self, last: bool) -> dict[str, Any]:
        return {"eval/success_rate": self.rates.pop(0)}

    def _keep_best(self, success_rate: object) -> None: ...

    def _rest(self) -> None: ...

    def _publish(self) -> None: ...

    def _save(self) -> None:
        self.did.append(f"saved {self.iteration}")


def test_a_run_ends_early_with_a_checkpoint_and_says_why() -> None:
    runner = Noting([1.0, 0.5, 0.875], "runner.stop_at_success=0.8", "runner.save_interval=5")
    assert runner.walk() == 4
    assert runner.did[0] == "saved 4" and "0.8" in runner.did[1] and len(runner.did) == 2
    assert Noting([1.0, 0.9, 0.5, 0.9], "runner.stop_at_success=0.8", "runner.stop_evaluations=2").walk() == 6
    assert Noting([1.0, 1.0, 1.0, 1.0]).walk() == 6


def test_a_regression_fails_the_run_after_a_checkpoint() -> None:
    runner = Noting([0.25, 0.75, 0.375], "runner.max_regression=0.25", "runner.save_interval=5")
    with raises_code("evaluation-regressed", EmbodrlError, "0.375", "0.750", "iteration 2"):
        runner.walk()
    assert (runner.iteration, runner.did) == (4, ["saved 4"])
    assert runner.pending is None and not runner.finished
    with raises_code("evaluation-regressed"):
        runner.run("")  # as `embodrl resume` does
    assert runner.did == ["saved 4"]


def test_the_error_says_where_the_best_policy_is() -> None:
    for rates, text in (([0.5, 0.25], "model.warm_start"), ([0.0, 0.5, 0.25], "policy_best/")):
        error = regression([{"iteration": i, "eval/success_rate": rate} for i, rate in enumerate(rates)], 0.1)
        assert error is not None and text in error.hint


class Late:
    """Evaluates beside training; a result is there ``behind`` iterations after its own, or when it is waited for."""

    def __init__(self, runner: Runner, rates: list[float], behind: int) -> None:
        self.runner, self.rates, self.behind = runner, rates, behind
        self.under_way: UnderWay | None = None
        self.best: list[float | None] = []

    def begin(self, wanted: UnderWay, weights: object) -> None:
        assert self.under_way is None
        self.under_way = wanted
        self.best.append(wanted.best)

    def take(self, wait: bool, should_stop: object) -> tuple[UnderWay, dict[str, Any]] | None:
        done = self.under_way
        if done is None or not (wait or self.runner.iteration >= done.iteration + self.behind):
            return None
        self.under_way = None
        rate = self.rates.pop(0)
        figures = {"eval/success_rate": rate, "time/eval_s": 1.0}
        is_best = done.best is not None and rate > done.best
        return done, {"metrics": figures, "is_best": is_best, "problem": ""}


def beside(rates: list[float], behind: int, *settings: str) -> Noting:
    runner = Noting([], *settings)
    runner.beside = late = Late(runner, rates, behind)  # type: ignore[assignment]
    runner.late = late
    runner.engine = SimpleNamespace(version=0, weights=list)
    runner.checkpoints = SimpleNamespace(keep_best=lambda iteration: runner.did.append(f"best {iteration}"))
    return runner


def test_late_evaluations_end_a_run_when_they_are_known() -> None:
    runner = beside([1.0, 0.5, 0.875, 0.0], 1, "runner.stop_at_success=0.8", "runner.save_interval=5")
    assert runner.walk() == 5  # that of iteration 4 is known after iteration 5
    rates = [row.get("eval/success_rate") for row in runner.rows]
    assert rates == [1.0, None, 0.5, None, 0.875, None]
    assert runner.rows[4]["time/eval_behind_iterations"] == 1
    assert [line for line in runner.did if line[:4] in ("best", "save")] == ["best 2", "best 4", "saved 5"]
    assert runner.late.best == [None, -1.0, 0.5]


def test_an_evaluation_waits_for_the_one_before_and_the_last_one_is_waited_for() -> None:
    runner = beside([0.0, 0.25, 0.5, 0.75], 100)
    assert runner.walk() == 6
    assert [row.get("eval/success_rate") for row in runner.rows] == [0.0, None, 0.25, None, 0.5, None, 0.75]
    assert [row.get("time/eval_behind_iterations") for row in runner.rows[::2]] == [2, 2, 2, 0]


def test_a_late_regression_fails_the_run_after_a_checkpoint() -> None:
    runner = beside([0.25, 0.75, 0.375], 1, "runner.max_regression=0.25", "runner.save_interval=6")
    with raises_code("evaluation-regressed", EmbodrlError, "0.375", "0.750", "iteration 4"):
        runner.walk()
    assert runner.iteration == 5 and runner.did[-1] == "saved 5"


def test_more_evaluations_than_a_run_has_can_not_be_asked_for() -> None:
    base = ["env=toy", "runner.stop_at_success=0.9", "runner.max_iterations=20", "runner.eval_interval=10"]
    load_config([*base, "runner.stop_evaluations=2"])
    with pytest.raises(ConfigError) as caught:
        load_config([*base, "runner.stop_evaluations=3"])
    assert [(each.key, each.code) for each in caught.value.problems] == [
        ("runner.stop_evaluations", "early-stop-can-happen")
    ]
    codes = {note.code for note in load_config(["env=toy", "runner.stop_evaluations=2"]).notes}
    assert "verdicts-have-an-effect" in codes


def test_a_run_that_ended_early_counts_as_finished(tmp_path: Path) -> None:
    rows = '{"iteration": 0, "eval/success_rate": 0.0}\n{"iteration": 2, "eval/success_rate": 0.9}\n'
    (tmp_path / "metrics.jsonl").write_text(rows)
    for threshold, status in (("0.9", "finished"), ("0.95", "stopped"), ("null", "stopped")):
        settings = f"runner: {{max_iterations: 4, stop_at_success: {threshold}, stop_evaluations: 1}}\n"
        (tmp_path / "config.yaml").write_text(settings)
        assert read_runs([tmp_path])[0].status == status
