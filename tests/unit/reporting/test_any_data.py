"""Pages and lines from any data that a run may have: 10,000 random cases, the same in every run of the tests.

3,000 line charts, 2,000 scales, 1,500 histograms, 1,500 lines of the console, 800 stacked charts, 500 rows judged by
health and verdict, 400 pages of evaluations, 200 reports and 100 comparisons.
"""

from __future__ import annotations

import io
import json
import math
import random
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

from embodrl.config import load_config
from embodrl.reporting.charts import Series, histogram, integer_ticks, line_chart, nice_ticks, stacked_chart
from embodrl.reporting.console import Console
from embodrl.reporting.eval_report import eval_page
from embodrl.reporting.health import find_warnings
from embodrl.reporting.intervals import eval_interval, wilson_interval
from embodrl.reporting.report import report_page
from embodrl.reporting.verdict import is_solved, regression
from embodrl.runs.eval_output import EvalDirectory
from embodrl.tools.compare.comparison import comparison_page, differing_settings, figure_rows, read_runs
from embodrl.workers.evaluator import EvalResult

Random = random.Random
COORDINATE = re.compile(r'\b(?:x|y|x1|x2|y1|y2|cx|cy|width|height|points|d)="([^"]*)"')
NUMBER = re.compile(r"[-\w.+]+")
EXTREME = (0.0, 5e-324, -5e-324, 1e-310, 1e-290, 1e-13, -1.0, 1.0, 1e15, 1.7e308, -1.7e308, sys.float_info.max)


def value(rng: Random) -> float:
    """A finite number of any size."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(EXTREME)
    return rng.choice((-1, 1)) * rng.random() * 10.0 ** (rng.uniform(-320, 308) if kind == 1 else rng.randrange(-16, 6))


def values(rng: Random, count: int) -> list[float]:
    """Constant ones, such as differ in the last bits, or any."""
    base, kind = value(rng), rng.randrange(4)
    if kind == 0:
        return [base] * count
    if kind == 1:
        return [rng.choice((base, math.nextafter(base, 0.0), math.nextafter(base, 1.0))) for _ in range(count)]
    if kind == 2:
        return [base * (1 - rng.randrange(4) * 10.0 ** rng.randrange(-16, -6)) for _ in range(count)]
    return [value(rng) for _ in range(count)]


def with_gaps(rng: Random, found: list[float]) -> list[float]:
    return [rng.choice((math.nan, math.inf, -math.inf)) if rng.random() < 0.1 else each for each in found]


def check(drawn: str) -> None:
    """Every coordinate is a number on the drawing."""
    for text in COORDINATE.findall(drawn):
        for number in NUMBER.findall(text.replace("H", " ").replace("M", " ").replace("v", " ")):
            assert -1.0 <= float(number) <= 1000.0, text


def test_scales() -> None:
    rng = Random(1)
    for _ in range(2000):
        low, high = sorted(values(rng, 2))
        ticks = nice_ticks(low, high, rng.choice((4, 5, 12)))
        assert all(a < b for a, b in pairwise(ticks.values)) and 2 <= len(ticks.values) <= 14, (low, high)
        assert -1e-5 <= ticks.part(low) <= ticks.part(high) <= 1 + 1e-5, (low, high)
        for texts in (ticks.texts(), ticks.texts(100)):
            assert len({*texts}) == len(texts), (low, high)
        whole = integer_ticks(low, high, 6).values
        assert all(low <= tick <= high and tick == int(tick) for tick in whole) and len(whole) <= 8, (low, high)


def test_line_charts() -> None:
    rng = Random(2)
    for _ in range(3000):
        count = rng.randrange(0, 6)
        xs = sorted(values(rng, count)) if rng.random() < 0.3 else list(range(count))
        ys, others = with_gaps(rng, values(rng, count)), with_gaps(rng, values(rng, count))
        intervals = [rng.choice((None, (low, high))) for low, high in zip(ys, others, strict=True)]
        series = [
            Series("a", list(zip(xs, ys, strict=True)), intervals=intervals, tips=[f"tip {y}" for y in ys], dots=True),
            Series("b", list(zip(xs, others, strict=True))),
        ]
        drawn = line_chart("t", series, percent=rng.random() < 0.5, y_range=rng.choice((None, (0.0, 1.0))))
        check(drawn)
        assert drawn.count("<title>tip") == sum(map(math.isfinite, ys))


def test_histograms_and_stacked_charts() -> None:
    rng = Random(3)
    for _ in range(1500):
        groups = [(name, "c0", with_gaps(rng, values(rng, rng.randrange(0, 5)))) for name in ("good", "bad")]
        drawn = histogram("t", groups, "x")
        check(drawn)
        counted = sum(map(int, re.findall(r"(\d+) (?:good|bad)</title>", drawn)))
        assert counted == sum(math.isfinite(each) for *_, group in groups for each in group)
    for _ in range(800):
        columns = {rng.randrange(0, 10 ** rng.randrange(1, 9)): with_gaps(rng, values(rng, 2)) for _ in range(4)}
        check(stacked_chart("t", ["a", "b"], ["c0", "c1"], columns))


METRICS = (
    *("rollout/success_rate", "eval/success_rate", "eval/episodes", "rollout/return", "rollout/episode_length"),
    *("train/policy_loss", "train/approx_kl", "train/lr", "train/explained_variance", "train/entropy", "env_steps"),
    *("time/env_s", "time/train_s", "time/total_s", "time/elapsed_s", "time/env_steps_per_s", "train/num_updates"),
    *("usage/cores_main", "usage/idle_env", "usage/sent_env_mib", "usage/gpu_0_busy", "usage/gpu_0_memory_gib"),
    *("staleness/queue", "usage/queue_rewards"),
    *("eval/red/success_rate", "eval/green/success_rate", "rollout/cut_episodes", "rollout/success_rate_started"),
)
STRANGE = (None, "x", True, 10**400, -(10**400), [], {}, math.nan, math.inf)


def rows_of(rng: Random, strange: float) -> list[dict[str, Any]]:
    """A few rows; ``strange`` is the share of values that only a damaged or foreign file has."""
    count = rng.randrange(1, 4)
    columns = {name: values(rng, count) for name in METRICS if rng.random() < 0.7}
    rows = [{"iteration": i, **{name: column[i] for name, column in columns.items()}} for i in range(count)]
    for row in rows:
        row |= {name: rng.choice(STRANGE) for name in METRICS if name in row and rng.random() < strange}
    return rows


def test_the_console() -> None:
    rng = Random(4)
    for number in range(1500):
        console = Console("plain", 3, "run", RichConsole(file=io.StringIO(), width=100))
        for row in rows_of(rng, 0.2):
            console.update(row)
            console.late(row)
        if number % 50 == 0:
            RichConsole(file=io.StringIO(), width=100).print(console._render())


def test_health_and_verdict() -> None:
    rng = Random(5)
    for _ in range(500):
        rows = rows_of(rng, 0.2)
        find_warnings(rows, warm_started=True)
        is_solved(rows, 0.5, 1)
        regression(rows, 0.1)
        for interval in filter(None, map(eval_interval, rows)):
            assert 0.0 <= interval[0] <= interval[1] <= 1.0


def write_run(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def test_reports_and_comparisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(6)
    for number in range(200):
        strange = 0.2 * (number % 2)
        paths = [write_run(tmp_path / name, rows_of(rng, strange)) for name in ("a", "b")]
        check(report_page(paths[0]))
        if number < 100:
            runs = read_runs(paths)
            check(comparison_page(runs))
            figure_rows(runs)
            assert differing_settings(runs) == []


def test_pages_of_evaluations(tmp_path: Path) -> None:
    rng = Random(7)
    config = load_config(["env=toy", "env.video.enabled=false", "model.warm_start=null"]).config
    empty = EvalResult(0.0, 0, {}, 0.0, 0.0, 0.0, 0.0)
    content: Any = EvalDirectory(config, tmp_path / "out").content(empty)
    for _ in range(400):
        returns = values(rng, rng.randrange(1, 6))
        episodes: list[Any] = [
            {"number": i, "seed": i, "task": "a", "instruction": "go", "success": rng.random() < 0.5}
            | {"success_at_end": None, "episode_return": each, "length": rng.randrange(1, 100)}
            for i, each in enumerate(returns)
        ]
        count, solved = len(episodes), sum(each["success"] for each in episodes)
        rate, interval = solved / count, wilson_interval(solved, count)
        task: dict[str, Any] = {"success_rate": rate, "interval": interval, "successes": solved, "episodes": count}
        figures = task | {"mean_return": returns[0], "mean_length": 5.0}
        more = {"tasks": {"a": task | {"instruction": "go"}}, "per_episode": episodes}
        check(eval_page(content | figures | more, "t", tmp_path, None, []))
