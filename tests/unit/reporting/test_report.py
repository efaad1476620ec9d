"""report.html and its charts."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from expect import raises_code

from embodrl.errors import OutputError
from embodrl.reporting import page as pages
from embodrl.reporting.charts import Series, integer_ticks, line_chart, nice_ticks
from embodrl.reporting.report import write_report


def row(iteration: int, **more: Any) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "env_steps": 100 * iteration,
        "time/total_s": 30.0,
        "rollout/success_rate": 0.5,
    } | more


def write_run(path: Path, rows: list[dict[str, Any]], config: str = "") -> str:
    path.mkdir(exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    if config:
        (path / "config.yaml").write_text(config)
    return write_report(path).read_text()


def evaluated(iteration: int, rate: float, **more: Any) -> dict[str, Any]:
    return row(iteration, **{"eval/success_rate": rate, "eval/episodes": 64.0} | more)


def test_the_page_stands_alone_and_is_drawn_in_its_own_colours(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "embodrl.log").write_text("")
    page = write_run(
        tmp_path,
        [evaluated(0, 0.25), *(row(i) for i in range(1, 4)), evaluated(4, 0.75)],
        "env:\n  env_type: toy\n  tasks: [PushCube-v1, '<script>']\nrunner: {seed: 7, max_iterations: 4}\n",
    )
    assert "25.0 → 75.0 %" in page and "95 % interval 63 to 84 %" in page  # Wilson: 48 of 64
    assert "&lt;script&gt;" in page and "<script" not in page
    assert "http" not in page and "data:image" not in page and "<svg" in page
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page
    assert not re.findall(r'(?:fill|stroke)="#', page)  # all colours follow the page
    assert 'href="logs/embodrl.log"' in page and "training: 7" in page
    assert not (tmp_path / "curves.png").exists()


def test_other_decodings_have_figures_and_curves(tmp_path: Path) -> None:
    others = {"eval/success_rate_sampled": 0.625, "eval/success_rate_mean": 0.875}
    page = write_run(tmp_path, [evaluated(0, 0.25, **others), row(1), evaluated(2, 0.75, **others)])
    for text in ("62.5 %", "evaluation success, sampled actions", "87.5 %", "evaluation, mean actions"):
        assert text in page
    page = write_run(tmp_path / "stopped", [evaluated(0, 0.25, **others), evaluated(2, 0.75)])
    assert "sampled actions, iteration 0" in page and "75.0 %" in page
    assert "sampled actions" not in write_run(tmp_path / "greedy", [evaluated(0, 0.25), evaluated(1, 0.5)])


def test_only_what_differs_from_the_defaults_is_listed(tmp_path: Path) -> None:
    page = write_run(tmp_path, [row(1)], "algorithm: {gamma: 0.123, gae_lambda: 0.95}\nrunner: {max_iterations: 40}\n")
    table = page[page.index("What differs") : page.index("All settings")]
    assert "algorithm.gamma" in table and "0.123" in table and "max_iterations" not in table


def test_tasks_have_curves_of_their_own(tmp_path: Path) -> None:
    rates = {"eval/red/success_rate": 0.5, "eval/green/success_rate": 1.0}
    page = write_run(tmp_path, [evaluated(0, 0.75, **rates), evaluated(1, 0.75, **rates)])
    assert "Evaluation success by task" in page and "</i>red" in page and "</i>green" in page


def test_warnings_provenance_and_changes_are_shown(tmp_path: Path) -> None:
    record = {
        **{
            "kind": "train",
            "command": "embodrl train a=<b>",
            "started": "2026-01-02T03:04:05+0000",
            "from_iteration": 0,
        },
        **{"embodrl": "0.1.0", "commit": "0123456789abcdef", "dirty": True, "host": "h", "platform": "p"},
        **{"python": "3.11", "packages": {"torch": "2.0"}, "changed": {}},
    }
    resumed = record | {"kind": "resume", "from_iteration": 1, "changed": {"algorithm.gamma": [0.97, 0.5]}}
    (tmp_path / "provenance.json").write_text(json.dumps([record, resumed]))
    page = write_run(tmp_path, [row(1, **{"train/approx_kl": 9.0})])
    assert "kl-too-large" in page and "embodrl train a=&lt;b&gt;" in page and "2026-01-02 03:04" in page
    assert "commit 0123456789ab with local changes" in page and "torch 2.0" in page
    assert "algorithm.gamma: 0.97 → 0.5" in page and "from iteration 2" in page


def test_videos_are_embedded_with_their_outcome_until_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("iteration_0001/episode_000_failure", "iteration_0002/episode_000_success"):
        path = tmp_path / "videos" / f"{name}.mp4"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"video")
    page = write_run(tmp_path, [row(1), row(2)])
    assert page.count("data:video/mp4;base64,dmlkZW8=") == 2
    assert '<figure class="success">' in page and '<figure class="failure">' in page
    monkeypatch.setattr(pages, "EMBED_BYTES", 7)  # room for the newest only
    page = write_run(tmp_path, [row(1), row(2)])
    assert page.count("data:video/mp4;base64,") == 1 and 'src="videos/iteration_0001/episode_000_failure.mp4"' in page


def test_a_report_needs_metrics_only(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n{"iteration": 2, "train/entr')
    assert write_report(tmp_path).is_file()


def test_a_report_without_metrics_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with raises_code("no-metrics", OutputError):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('broken\n{"iteration": 2}\n')
    write_report(tmp_path)
    assert "line 1 is left out" in caplog.text


def test_ticks_are_round_and_those_of_iterations_whole() -> None:
    assert integer_ticks(0, 3, 6).values == [0, 1, 2, 3]
    assert integer_ticks(1, 40, 6).values == [10, 20, 30, 40]
    assert integer_ticks(5, 5, 6).values == [5]
    assert nice_ticks(0.0, 1.0, 5).values == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(0.013, 0.031, 5).values == [0.01, 0.015, 0.02, 0.025, 0.03, 0.035]


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.0, 0.0015, "0 5e-4 1e-3 1.5e-3"),
        (0.0, 1.5e-5, "0 5e-6 1e-5 1.5e-5"),
        (1.9, 2.05, "1.90 1.95 2.00 2.05"),
        (1.0, 1.0004, "1.0000 1.0001 1.0002 1.0003 1.0004"),
        (0.0, 12000.0, "0 5k 10k 15k"),
        (999_999.0, 1_000_002.0, "999999 1000000 1000001 1000002"),
        (0.0, 1.7e308, "0 5e307 1e308 1.5e308 2e308"),
        (1e-14, 1.9e-14, "1e-14 1.2e-14 1.4e-14 1.6e-14 1.8e-14 2e-14"),
    ],
)
def test_tick_labels_are_exact(low: float, high: float, texts: str) -> None:
    assert nice_ticks(low, high, 5).texts() == texts.split()


def test_points_lie_where_their_values_say() -> None:
    chart = line_chart("t", [Series("a", [(0, 0.0), (2, 1.0)])], y_range=(0.0, 1.0))
    line = next(ET.fromstring(chart).iter("polyline")).get("points")
    # 360 x 200 with margins of 46, 12, 8 and 36
    assert line == "46.0,164.0 348.0,8.0"
    assert line_chart("t", [Series("a", [])]) == ""
    assert "<svg" in line_chart("one point", [Series("a", [(1, 2.0)])])


def test_a_line_keeps_its_extremes_when_it_is_thinned() -> None:
    values = [0.5] * 100_000
    values[61_234], values[80_001] = 1.0, 0.0
    chart = line_chart("t", [Series("a", list(enumerate(values)))])
    points = str(next(ET.fromstring(chart).iter("polyline")).get("points")).split()
    assert len(points) <= 1002 and {float(point.split(",")[1]) for point in points} >= {8.0, 164.0}
