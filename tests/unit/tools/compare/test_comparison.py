"""Comparing runs: figures, differing settings, the page."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from expect import raises_code
from typer.testing import CliRunner

from embodrl.cli.main import app
from embodrl.errors import UsageError
from embodrl.reporting.page import table
from embodrl.reporting.report import write_report
from embodrl.tools.compare.comparison import (
    ABSENT,
    comparison_page,
    differing_settings,
    figure_rows,
    figures_of,
    find_runs,
    read_runs,
)
from embodrl.trainer.lock import run_lock


def evaluated(iteration: int, rate: float, minutes: float, **more: Any) -> dict[str, Any]:
    row = {"iteration": iteration, "env_steps": 1000 * iteration, "time/elapsed_s": 60 * minutes}
    return row | {"eval/success_rate": rate, "eval/episodes": 64.0, "eval/push/success_rate": rate} | more


def write_run(path: Path, rows: list[dict[str, Any]], config: str) -> Path:
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (path / "config.yaml").write_text(config)
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    config = "runner: {{seed: {}, max_iterations: 4, output_dir: x{}}}\nalgorithm: {{adv_type: gae{}}}\n"
    rows = [evaluated(0, 0.25, 0.5), evaluated(2, 0.875, 2.0), evaluated(4, 0.75, 5.0)]
    return [
        write_run(tmp_path / "a" / "run", rows, config.format(0, 0, "")),
        write_run(tmp_path / "b" / "run", rows[:2], config.format(1, 1, ", gamma: 0.5")),
    ]


def test_figures_of_a_run(runs: list[Path]) -> None:
    first, second = read_runs(runs)
    found = figures_of(first)
    assert (found.iterations, found.env_steps, found.minutes) == (4, 4000, 5.0)
    assert found.steps_per_s == pytest.approx(4000 / 300)
    assert (found.first, found.last, found.best, found.best_iteration) == (0.25, 0.75, 0.875, 2)
    assert found.interval == pytest.approx((0.6318, 0.8399), abs=1e-4)  # Wilson: 48 of 64
    assert (first.name, first.status) == ("a/run", "finished")
    assert (second.name, second.status) == ("b/run", "stopped")
    with run_lock(runs[1]):
        assert read_runs(runs)[1].status == "running"


def test_a_run_without_rows_has_no_figures(tmp_path: Path) -> None:
    (found,) = map(figures_of, read_runs([write_run(tmp_path / "new", [], "")]))
    assert (found.iterations, found.first, found.steps_per_s) == (0, None, None)


def test_settings_that_differ(runs: list[Path]) -> None:
    assert differing_settings(read_runs(runs)) == [("runner.seed", ["0", "1"]), ("algorithm.gamma", [ABSENT, "0.5"])]
    (runs[1] / "config.yaml").write_text("[")
    assert differing_settings(read_runs(runs)) == []


def test_runs_are_found_below_directories_but_not_in_runs(runs: list[Path], tmp_path: Path) -> None:
    inner = runs[0] / "policy" / "old"
    write_run(inner, [evaluated(0, 0.5, 1.0)], "")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert find_runs([tmp_path]) == runs
    assert find_runs([runs[1], tmp_path]) == [runs[1], runs[0]]
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "empty", tmp_path / "absent"):
        with raises_code("no-run", UsageError, str(wrong)):
            find_runs([runs[0], wrong])


def test_the_page_stands_alone_and_shows_every_run(runs: list[Path]) -> None:
    hostile = write_run(runs[0].parents[1] / "<script>", [{"iteration": 1}], "env: {tasks: ['<b>']}\n")
    page = comparison_page(read_runs([*runs, hostile]))
    assert "<script" not in page and "&lt;script&gt;" in page and "<b>&lt;" not in page and "http" not in page
    drawings = [ET.fromstring(f"<svg{part[: part.index('</svg>')]}</svg>") for part in page.split("<svg")[1:]]
    titles = {each.get("aria-label"): each for each in drawings}
    lines = [each for each in titles["Evaluation success: push"] if each.tag == "polyline"]
    assert [each.get("stroke") for each in lines] == ["var(--c0)", "var(--c1)"]
    assert [len((each.get("points") or "").split()) for each in lines] == [3, 2]
    assert "25.0 → 75.0" in page and "87.5 (2)" in page


def test_training_is_of_started_episodes_and_evaluations_have_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [evaluated(i, 0.25, i) | {"rollout/success_rate": 1.0, "rollout/success_rate_started": 0.1} for i in (0, 2)]
    old = [evaluated(i, 0.5, i) | {"rollout/success_rate": 0.5} for i in (0, 2)]  # of an earlier version
    both = [write_run(tmp_path / "new", rows, "{}"), write_run(tmp_path / "old", old, "{}")]
    drawings = [
        ET.fromstring(f"<svg{part[: part.index('</svg>')]}</svg>")
        for part in comparison_page(read_runs(both)).split("<svg")[1:]
    ]
    by_title = {each.get("aria-label"): each for each in drawings}
    (training,) = [each for title, each in by_title.items() if title is not None and "training episodes" in title]
    heights = [line.get("points").split()[0].split(",")[1] for line in training.iter("polyline")]  # type: ignore[union-attr]
    assert float(heights[0]) > float(heights[1])  # downwards: 10 % below 50 %
    page = comparison_page(read_runs(both))
    monkeypatch.setattr("embodrl.tools.compare.comparison.MOST_WITH_INTERVALS", 1)
    assert len(comparison_page(read_runs(both))) < len(page)  # the whiskers


def test_the_command(runs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["compare", *map(str, runs), "--html", str(page), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [run["last"] for run in found["runs"]] == [0.75, 0.875]
    assert found["differing_settings"]["runner.seed"] == ["0", "1"]
    assert page.read_text().startswith("<!doctype html>")
    shown = CliRunner().invoke(app, ["compare", str(tmp_path)], env={"COLUMNS": "200"})
    assert "25.0 → 75.0" in shown.output and "algorithm.gamma" in shown.output
    wrong = CliRunner().invoke(app, ["compare", str(tmp_path / "none")])
    assert wrong.exit_code == 2


def test_the_table_keeps_keys_whole_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    model = "".join(f", a_setting_of_this_model_{i}: 1" for i in range(50))
    for number in range(5):
        settings = "".join(f", s{i}: {number}" for i in range(45))
        own = model if number == 0 else ""
        config = f"env: {{max_episode_steps: {number}{settings}}}\nonly: {{sub{number}: {{x: 1{own}}}}}\n"
        write_run(tmp_path / f"run{number}", [evaluated(0, 0.5, 1.0)], config)
    shown = CliRunner().invoke(app, ["compare", str(tmp_path)], env={"COLUMNS": "80"}).output
    assert "env.max_episode_steps" in shown and "env.s38" in shown and "env.s39" not in shown
    assert "a_setting" not in shown and f"{6 + 51 + 4} more settings" in shown


def test_cells_carry_the_titles_that_a_narrow_page_shows() -> None:
    shown = table(("run", "95 %"), [("a<b", "1 to 2")])
    assert re.findall(r'<td [^>]*data-title="([^"]*)">([^<]*)<', shown) == [("run", "a&lt;b"), ("95 %", "1 to 2")]
    assert "data-title" not in table((), [("seed", "1")])


def test_fine_tuning_stands_beside_training(runs: list[Path], tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    tuned.mkdir()
    steps = [{"iteration": n, "step": n, "loss": 2.0 / n, "lr": 1e-4, "time/total_s": 1.0} for n in (1, 2)]
    steps[-1]["sft/val_loss"] = 1.5
    (tuned / "sft_metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in steps))
    (tuned / "config.yaml").write_text("sft: {max_steps: 2}\n")
    assert tuned in find_runs([tmp_path])
    (view,) = read_runs([tuned])
    assert view.status == "finished"
    titles, (alone,) = figure_rows([view])
    assert (alone[titles.index("loss")], alone[titles.index("held out")]) == ("1.000", "1.500")
    assert "loss" not in figure_rows(read_runs(runs))[0]
    assert "Imitation loss of held-out episodes" in comparison_page([view, *read_runs(runs)])
    report = write_report(tuned).read_text()
    assert "Imitation loss" in report and "last loss, held-out episodes" in report and "environment steps" not in report
