"""Early stopping and the gate against regressions, with a learner that does what the test says."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from expect import raises_code
from scripted_learner import scripted_trainer

from embodrl.config import load_config
from embodrl.errors import ConfigError, EmbodrlError
from embodrl.fields import Fields
from embodrl.reporting.verdict import is_solved, regression
from embodrl.tools.compare.comparison import read_runs
from embodrl.trainer.async_evaluation import PendingEvaluation, unfinished_evaluation
from embodrl.trainer.loop import Trainer
from embodrl.trainer.schedule import Schedule


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


@pytest.fixture(autouse=True)
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodrl.trainer.evaluations.export_policy", lambda *_, **__: None)


def saves(did: list[str]) -> list[str]:
    return [line for line in did if line.startswith("saved ") and line[6:].isdigit()]


def test_a_run_ends_early_with_a_checkpoint_and_says_why(tmp_path: Path) -> None:
    trainer, did = scripted_trainer(tmp_path / "a", [1.0, 0.5, 0.875], "runner.stop_at_success=0.8")
    assert trainer.run("") == 0
    assert trainer.iteration == 4 and saves(did) == ["saved 4"] and "0.8" in did[-1]
    twice = ("runner.stop_at_success=0.8", "runner.stop_evaluations=2")
    trainer, _ = scripted_trainer(tmp_path / "b", [1.0, 0.9, 0.5, 0.9], *twice)
    assert trainer.run("") == 0 and trainer.iteration == 6
    trainer, _ = scripted_trainer(tmp_path / "c", [1.0, 1.0, 1.0, 1.0])
    assert trainer.run("") == 0 and trainer.iteration == 6


def test_a_regression_fails_the_run_after_a_checkpoint(tmp_path: Path) -> None:
    trainer, did = scripted_trainer(tmp_path, [0.25, 0.75, 0.375], "runner.max_regression=0.25")
    with raises_code("evaluation-regressed", EmbodrlError, "0.375", "0.750", "iteration 2"):
        trainer.run("")
    assert trainer.iteration == 4 and saves(did) == ["saved 4"]
    assert trainer.pending is None and not trainer.is_finished
    with raises_code("evaluation-regressed"):
        trainer.run("")  # as `embodrl resume` does
    assert saves(did) == ["saved 4"]


def test_the_error_says_where_the_best_policy_is() -> None:
    for rates, text in (([0.5, 0.25], "model.warm_start"), ([0.0, 0.5, 0.25], "policy_best/")):
        error = regression([{"iteration": i, "eval/success_rate": rate} for i, rate in enumerate(rates)], 0.1)
        assert error is not None and text in error.hint


class Late:
    """Evaluates beside training; a result is there ``behind`` iterations after its own, or when it is waited for."""

    def __init__(self, rates: list[float], behind: int) -> None:
        self.rates, self.behind = rates, behind
        self.trainer: Trainer | None = None
        self.in_progress: PendingEvaluation | None = None
        self.best: list[float | None] = []
        self.every_decoding: list[bool] = []

    def continue_from(self, version: int, weights: object, unfinished: object) -> None: ...

    def begin(self, wanted: PendingEvaluation, weights: object) -> None:
        assert self.in_progress is None
        self.in_progress = wanted
        self.best.append(wanted.best)
        self.every_decoding.append(wanted.every_decoding)

    def take(self, wait: bool, should_stop: object) -> tuple[PendingEvaluation, dict[str, Any]] | None:
        done = self.in_progress
        assert self.trainer is not None
        if done is None or not (wait or self.trainer.iteration >= done.iteration + self.behind):
            return None
        self.in_progress = None
        rate = self.rates.pop(0)
        figures = {"eval/success_rate": rate, "time/eval_s": 1.0}
        is_best = done.best is not None and rate > done.best
        return done, {"metrics": figures, "is_best": is_best, "problem": ""}


def evaluated_beside(
    directory: Path, rates: list[float], behind: int, *settings: str
) -> tuple[Trainer, list[str], Late]:
    late = Late(rates, behind)
    trainer, did = scripted_trainer(directory, [], *settings, beside=late)
    late.trainer = trainer
    return trainer, did, late


def test_late_evaluations_end_a_run_when_they_are_known(tmp_path: Path) -> None:
    trainer, did, late = evaluated_beside(tmp_path, [1.0, 0.5, 0.875, 0.0], 1, "runner.stop_at_success=0.8")
    assert trainer.run("") == 0
    assert trainer.iteration == 5  # that of iteration 4 is known after iteration 5
    rates = [row.get("eval/success_rate") for row in trainer.journal.rows]
    assert rates == [1.0, None, 0.5, None, 0.875, None]
    assert trainer.journal.rows[4]["time/eval_behind_iterations"] == 1
    assert [line for line in did if line.startswith("best")] == ["best 2", "best 4"] and saves(did) == ["saved 5"]
    assert late.best == [None, -1.0, 0.5]


def test_an_evaluation_waits_for_the_one_before_and_the_last_one_is_waited_for(tmp_path: Path) -> None:
    trainer, _, _ = evaluated_beside(tmp_path, [0.0, 0.25, 0.5, 0.75], 100)
    assert trainer.run("") == 0 and trainer.iteration == 6
    rows = trainer.journal.rows
    assert [row.get("eval/success_rate") for row in rows] == [0.0, None, 0.25, None, 0.5, None, 0.75]
    assert [row.get("time/eval_behind_iterations") for row in rows[::2]] == [2, 2, 2, 0]


def test_only_the_first_and_the_last_evaluation_have_every_decoding(tmp_path: Path) -> None:
    trainer, _ = scripted_trainer(tmp_path / "between", [0.0, 0.25, 0.5, 0.75])
    assert trainer.run("") == 0
    assert trainer.learner.every_decoding == [True, False, False, True]  # type: ignore[attr-defined]
    trainer, _, late = evaluated_beside(tmp_path / "beside", [0.0, 0.25, 0.5, 0.75], 1)
    assert trainer.run("") == 0 and late.every_decoding == [True, False, False, True]
    imitation = Schedule(total=10, eval_interval=4, save_interval=0)  # evaluated after 4 and 8
    assert [imitation.is_first_or_last(iteration) for iteration in (4, 8)] == [False, True]


@pytest.mark.parametrize("flag", [True, False, None])
def test_a_saved_evaluation_in_progress_keeps_its_decodings(flag: bool | None) -> None:
    saved = asdict(PendingEvaluation(2, 3, None, 0.5, bool(flag)))
    if flag is None:  # a checkpoint of an earlier version
        del saved["every_decoding"]
    checkpoint: Any = SimpleNamespace(state=Fields({"evaluation": saved}, "the state"))
    found = unfinished_evaluation(checkpoint)
    assert found == PendingEvaluation(2, 3, None, 0.5, flag is not False)


def test_a_late_regression_fails_the_run_after_a_checkpoint(tmp_path: Path) -> None:
    trainer, did, _ = evaluated_beside(tmp_path, [0.25, 0.75, 0.375], 1, "runner.max_regression=0.25")
    with raises_code("evaluation-regressed", EmbodrlError, "0.375", "0.750", "iteration 4"):
        trainer.run("")
    assert trainer.iteration == 5 and saves(did)[-1] == "saved 5"


def test_more_evaluations_than_a_run_has_can_not_be_asked_for() -> None:
    base = ["env=toy", "runner.stop_at_success=0.9", "runner.max_iterations=20", "runner.eval_interval=10"]
    load_config([*base, "runner.stop_evaluations=2"])
    with pytest.raises(ConfigError) as caught:
        load_config([*base, "runner.stop_evaluations=3"])
    assert [(each.key, each.code) for each in caught.value.problems] == [
        ("runner.stop_evaluations", "early-stop-can-happen")
    ]
    codes = {note.code for note in load_config(["env=toy", "runner.stop_evaluations=2"]).notes}
    assert "setting-applies" in codes


def test_a_run_that_ended_early_counts_as_finished(tmp_path: Path) -> None:
    rows = '{"iteration": 0, "eval/success_rate": 0.0}\n{"iteration": 2, "eval/success_rate": 0.9}\n'
    (tmp_path / "metrics.jsonl").write_text(rows)
    for threshold, status in (("0.9", "finished"), ("0.95", "stopped"), ("null", "stopped")):
        settings = f"runner: {{max_iterations: 4, stop_at_success: {threshold}, stop_evaluations: 1}}\n"
        (tmp_path / "config.yaml").write_text(settings)
        assert read_runs([tmp_path])[0].status == status
