"""Two evaluations of the same episodes: the paired difference, its interval and McNemar's test."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from embodrl.cli.main import app
from embodrl.reporting.paired import change_text, compare_pairs, paired_interval
from embodrl.runs.eval_output import EvalDirectory
from embodrl.types import Decoding
from embodrl.workers.evaluator import EpisodeRecord, EvalResult


@pytest.mark.parametrize(
    ("table", "interval"),
    [
        ((36, 12, 2, 0), (0.0569, 0.3404)),  # Newcombe 1998, table III, method 10
        # Equal rates and no correlation: sqrt(2) times the half-widths of Wilson's (0.403832, 0.596168) around 0.5.
        ((25, 25, 25, 25), (-0.136002, 0.136002)),
        ((0, 0, 0, 0), (-1.0, 1.0)),
    ],
)
def test_the_interval_of_a_paired_difference(table: tuple[int, int, int, int], interval: tuple[float, float]) -> None:
    assert paired_interval(*table) == pytest.approx(interval, abs=5e-5)


def test_pairs_are_shared_episodes() -> None:
    first = {1: True, 2: True, 3: False, 4: True, 9: True}
    second = {1: True, 2: False, 3: False, 4: False, 8: True}
    found = compare_pairs(first, second)
    assert (found["pairs"], found["only_first"], found["only_second"]) == (4, 2, 0)
    assert found["difference"] == -0.5 and found["interval"] == paired_interval(1, 0, 2, 1)
    assert found["p_value"] == 0.5  # 2 of 2 on one side, twice: 2 / 2^2
    assert compare_pairs({1: True}, {1: True})["p_value"] == 1.0
    assert change_text(found).startswith("-50.0 points (-")


def evaluation(
    path: Path, solved: str, *, steps: int = 50, axis: str = "", seed: int = 0, decoding: Decoding = "greedy"
) -> Path:
    from embodrl.config import load_config

    config = load_config(
        ["env=toy", "env.video.enabled=false", "model.warm_start=null", f"env.max_episode_steps={steps}"]
    )
    output = EvalDirectory(config.config, path)
    output.axes = {"light": result(axis, seed)} if axis else {}
    output.write(replace(result(solved, seed), decoding=decoding))
    return path


def result(solved: str, seed: int) -> EvalResult:
    records = [
        EpisodeRecord(i, seed + i, ("red", "green")[i % 2], "go", mark == "1", None, 0.0, 5)
        for i, mark in enumerate(solved)
    ]
    return EvalResult(0.5, len(records), {}, 0.0, 5.0, records=records)


def compare(*arguments: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    return found.exit_code, found.output


def test_evaluations_are_compared_pair_by_pair(tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", "1100", axis="1000")
    b = evaluation(tmp_path / "b", "1011", axis="1111")
    code, text = compare(a, b, "--json")
    assert code == 0
    (found,) = json.loads(text)
    assert (found["first"], found["second"]) == ("a", "b")
    parts = {name: (one["pairs"], one["only_first"], one["only_second"]) for name, one in found["parts"].items()}
    assert parts == {"unperturbed": (4, 1, 2), "red": (2, 0, 1), "green": (2, 1, 1), "axis light": (4, 0, 3)}
    code, text = compare(a, b)
    assert code == 0 and "+25.0 points" in text and "axis light" in text


@pytest.mark.parametrize("other", [{"steps": 40}, {"seed": 100}, {"decoding": "sampled"}])
def test_other_episodes_and_decodings_are_not_compared(tmp_path: Path, other: dict[str, Any]) -> None:
    a, b = evaluation(tmp_path / "a", "11"), evaluation(tmp_path / "b", "10", **other)
    assert "evals-not-comparable" in compare(a, b)[1]
    assert "evals-not-comparable" in compare(a)[1]


def test_axes_are_in_the_files_and_on_the_console(tmp_path: Path) -> None:
    evaluation(tmp_path / "a", "1100", axis="1000")
    content = json.loads((tmp_path / "a" / "eval.json").read_text())
    light = content["axes"]["light"]
    assert (light["group"], light["successes"], light["episodes"]) == ("vision", 1, 4)
    assert light["change"]["difference"] == -0.25 and len(light["per_episode"]) == 4
    page = (tmp_path / "a" / "eval.html").read_text()
    assert "Generalisation" in page and "-25.0 points" in page


def test_many_discordant_pairs_are_summed_in_linear_time() -> None:
    first = {i: i < 15_000 for i in range(30_000)}
    found = compare_pairs(first, {i: not solved for i, solved in first.items()})
    assert (found["only_first"], found["only_second"], found["p_value"]) == (15_000, 15_000, 1.0)
    few = {i: i < 400 for i in range(1000)}
    exact = 2 * sum(math.comb(1000, i) for i in range(401)) / 2**1000
    assert compare_pairs(few, {i: not solved for i, solved in few.items()})["p_value"] == pytest.approx(exact, rel=1e-9)
