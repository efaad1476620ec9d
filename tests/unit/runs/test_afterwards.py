"""What follows a result costs one warning where it fails: the run, its exit code and its last words stand."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.console import Console as RichConsole

from embodrl.config import load_config
from embodrl.reporting.console import Console
from embodrl.runs import eval_output
from embodrl.tools.sweep import runs as sweep
from embodrl.tools.sweep.combinations import SweptRun
from embodrl.tools.sweep.runs import COMPARISON_FILE, Sweep, run_sweep
from embodrl.trainer import result
from embodrl.workers.evaluator import EvalResult

CODE = "result-without-page"


def fail(*_: object) -> NoReturn:
    raise ZeroDivisionError("float division by zero")


def write_metrics(run_dir: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    row = {"iteration": 1, "eval/success_rate": 0.5, "eval/episodes": 4.0}
    (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")


@pytest.mark.parametrize(
    ("finished", "last_words"),
    [(True, "next: embodrl eval"), (False, "stopped by a signal; `embodrl resume '")],
)
def test_a_training_ends_without_its_report(
    finished: bool,
    last_words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_dir = tmp_path / "a run"
    write_metrics(run_dir)
    exported: list[Path] = []

    def export(policy: Any, path: Path, *_: Any, **facts: Any) -> None:
        exported.append(path)

    monkeypatch.setattr(result, "write_report", fail)
    monkeypatch.setattr(result, "export_policy", export)
    shown = io.StringIO()
    policy: Any = None
    with Console("plain", 1, "run", RichConsole(file=shown, width=200)) as console:
        config = load_config(["env=toy", "model.warm_start=null"]).config
        result.conclude(config, run_dir, policy, console, 1, finished=finished, saved=True)
    (warning,) = (each for each in caplog.records if each.levelname == "WARNING")
    assert CODE in warning.getMessage() and f"`embodrl resume '{run_dir}'`" in warning.getMessage()
    assert last_words in shown.getvalue() and bool(exported) == finished


def test_metrics_that_can_not_be_read_cost_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    policy: Any = None
    with Console("off", 1) as console:
        config = load_config(["env=toy", "model.warm_start=null"]).config
        result.conclude(config, tmp_path, policy, console, 1, finished=False, saved=True)
    assert [CODE in each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == [True]


def test_an_evaluation_ends_without_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(eval_output, "eval_page", fail)
    config = load_config(["env=toy", "env.video.enabled=false", "model.warm_start=null"]).config
    lines = eval_output.EvalDirectory(config, tmp_path / "out").write(EvalResult(0.5, 4, {}, 1.0, 5.0, 1.0, 1.0))
    assert lines[0].startswith("success rate") and not any(line.startswith("report") for line in lines)
    assert json.loads((tmp_path / "out" / "eval.json").read_text())["success_rate"] == 0.5
    assert [CODE in each.getMessage() for each in caplog.records] == [True]


def test_a_sweep_ends_without_its_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    swept = Sweep(tmp_path, (SweptRun("seed=0", ()),), None, (1,), 1, "local", ())
    write_metrics(swept.path(0))
    (swept.path(0) / "policy").mkdir()
    (swept.path(0) / "report.html").write_text("")
    monkeypatch.setattr(sweep, "comparison_page", fail)
    assert run_sweep(swept) == 0
    (message,) = (each.getMessage() for each in caplog.records if each.levelname == "WARNING")
    assert CODE in message and f"embodrl compare {tmp_path} --html {tmp_path / COMPARISON_FILE}" in message
