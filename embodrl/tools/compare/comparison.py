"""Comparison of runs: figures, curves, success per task and differing settings."""

from __future__ import annotations

import html
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from embodrl.config.load import leaf_keys
from embodrl.errors import OutputError, UsageError, without_controls
from embodrl.reporting.charts import Series, line_chart
from embodrl.reporting.intervals import CONFIDENCE_TEXT, eval_interval
from embodrl.reporting.metrics_file import METRICS_FILE, Row, is_imitation, metrics_path, read_metrics
from embodrl.reporting.page import Html, page, table
from embodrl.reporting.rows import elapsed_s, is_number, lookup, number, points, setting_text, task_names
from embodrl.reporting.run_files import CONFIG_FILE, read_run_config
from embodrl.reporting.verdict import is_solved

MAX_DEPTH = 4
"""Run status for runs found below a searched directory."""
COLOURS = 6
SILENT_S = 120.0
ABSENT = "–"
OWN_SETTINGS = ("runner.output_dir", "sft.output_dir", "eval.output_dir")
"""Settings that may differ between any two runs without meaning."""
STARTED = "rollout/success_rate_started"
MOST_WITH_INTERVALS = 4
"""Limit on runs whose evaluations get whiskers in one chart; with more, whiskers hide the lines."""
CURVES = (
    ("Return per training episode", "rollout/return", False),
    ("KL of an update (nats per token)", "train/approx_kl", False),
    ("Clipped ratios", "train/clip_fraction", True),
    ("Entropy (nats per token)", "train/entropy", False),
    ("Value loss", "train/value_loss", False),
    ("Explained variance of the critic", "train/explained_variance", False),
    ("Gradient norm", "train/grad_norm", False),
    ("Seconds per iteration", "time/total_s", False),
    ("Imitation loss", "loss", False),
    ("Imitation loss of held-out episodes", "sft/val_loss", False),
)


@dataclass(frozen=True)
class RunView:
    """Content of a run's files.

    Attributes:
        name: name, unique among the compared runs.
        rows: rows of metrics.jsonl, or of sft_metrics.jsonl.
        config: content of config.yaml; empty without one.
        status: ``running``, ``finished`` or ``stopped``.
        age_s: seconds since the last row was written.
        problems: unreadable files, and why.
    """

    directory: Path
    name: str
    rows: list[Row]
    config: Mapping[str, object]
    status: str
    age_s: float
    problems: tuple[str, ...] = ()


def find_runs(directories: Iterable[Path]) -> list[Path]:
    """Return the runs in or below directories, sorted by path; does not search inside a run.

    Raises:
        UsageError: one of them is not a directory, or contains no run.
    """
    found: dict[Path, None] = {}
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(
                f"{directory} is not a directory", "name run directories, or directories above them", code="no-run"
            )
        below = list(_runs_below(directory, MAX_DEPTH))
        if not below:
            raise UsageError(
                f"{directory} holds no run: there is no {METRICS_FILE} in it or up to {MAX_DEPTH} levels below",
                "name a run directory, or a directory above runs",
                code="no-run",
            )
        found |= dict.fromkeys(below)
    return list(found)


def _runs_below(directory: Path, depth: int) -> Iterable[Path]:
    if metrics_path(directory).is_file():
        yield directory
        return
    if depth:
        with os.scandir(directory) as entries:
            names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith("."))
        for name in names:
            yield from _runs_below(directory / name, depth - 1)


def read_runs(directories: Sequence[Path]) -> list[RunView]:
    """Return the views of runs, named by the distinguishing parts of their paths."""
    return [_read(path, name) for path, name in zip(directories, run_names(directories), strict=True)]


def run_names(directories: Sequence[Path]) -> list[str]:
    """Return the last part of each path, without control characters; more parts where needed to make it unique."""
    paths = [directory.resolve().parts for directory in directories]
    names: list[str] = []
    for parts in paths:
        count = next((n for n in range(1, len(parts)) if sum(p[-n:] == parts[-n:] for p in paths) == 1), len(parts))
        names.append(without_controls("/".join(parts[-count:]).replace("\n", "\\n")))
    return names


def _read(directory: Path, name: str) -> RunView:
    path = metrics_path(directory)
    problems = list[str]()
    try:
        rows = read_metrics(path)
    except OutputError as error:  # affects one run only, which is shown without figures
        problems.append(error.message)
        rows = []
    config, _, unreadable = read_run_config(directory)
    if unreadable:
        problems.append(f"{directory / CONFIG_FILE} can't be read: {unreadable}")
    status = "running" if _is_locked(directory) else "finished" if _is_finished(rows, config) else "stopped"
    age_s = max(0.0, time.time() - path.lstat().st_mtime)
    return RunView(directory, name, rows, config, status, age_s, tuple(problems))


def _is_finished(rows: list[Row], config: Mapping[str, object]) -> bool:
    last, rate, count = (
        lookup(config, f"runner.{name}") for name in ("max_iterations", "stop_at_success", "stop_evaluations")
    )
    if is_imitation(rows):
        last = lookup(config, "sft.max_steps")
    if is_number(rate) and isinstance(count, int) and count > 0 and is_solved(rows, float(rate), count):
        return True
    return bool(rows) and isinstance(last, int) and rows[-1]["iteration"] >= last


def _is_locked(directory: Path) -> bool:
    """Whether a process of this machine works on a run, without touching its lock."""
    try:
        inode = directory.stat().st_ino
        return any(line.split()[5].endswith(f":{inode}") for line in Path("/proc/locks").read_text().splitlines())
    except (OSError, IndexError):
        return False


@dataclass(frozen=True)
class Figures:
    """Figures of a run; None where the run has none.

    Success rates are ``eval/success_rate``, 0 to 1: greedy unless ``env.eval.decoding`` says otherwise.

    Attributes:
        steps_per_s: environment steps per second of wall time.
        first, last, best: success rates of the first, last and best evaluation.
        val_loss: loss on held-out demonstrations after it.
    """

    iterations: int
    env_steps: int
    minutes: float
    steps_per_s: float | None
    first: float | None
    last: float | None
    interval: tuple[float, float] | None
    best: float | None
    best_iteration: int | None
    loss: float | None = None
    val_loss: float | None = None


def figures_of(run: RunView) -> Figures:
    """Return the figures of a run."""
    if not run.rows:
        return Figures(0, 0, 0.0, None, None, None, None, None, None)
    seconds = elapsed_s(run.rows)[-1]
    steps = int(number(run.rows[-1], "env_steps"))
    rate = steps / seconds if seconds and steps else None
    evaluated = [row for row in run.rows if is_number(row.get("eval/success_rate"))]
    losses = [_last(run.rows, name) for name in ("loss", "sft/val_loss")]
    start = Figures(run.rows[-1]["iteration"], steps, seconds / 60, rate, None, None, None, None, None, *losses)
    if not evaluated:
        return start
    best = max(evaluated, key=lambda row: row["eval/success_rate"])
    rates = [float(row["eval/success_rate"]) for row in (evaluated[0], evaluated[-1], best)]
    done = (start.iterations, start.env_steps, start.minutes, start.steps_per_s)
    return Figures(*done, rates[0], rates[1], eval_interval(evaluated[-1]), rates[2], best["iteration"], *losses)


def _last(rows: Sequence[Row], name: str) -> float | None:
    found = points(rows, name)
    return found[-1][1] if found else None


LOSS = "loss"
HELD_OUT = "held out"
COLUMNS: tuple[tuple[str, Callable[[RunView, Figures], str]], ...] = (
    ("run", lambda run, _: run.name),
    ("status", lambda run, _: f"{run.status}{_seconds_silent(run)}"),
    ("iter", lambda _, f: str(f.iterations)),
    ("env steps", lambda _, f: f"{f.env_steps:,}"),
    ("min", lambda _, f: f"{f.minutes:.1f}"),
    ("steps/s", lambda _, f: "" if f.steps_per_s is None else f"{f.steps_per_s:.0f}"),
    (
        "success %",
        lambda _, f: "" if f.first is None or f.last is None else f"{100 * f.first:.1f} → {100 * f.last:.1f}",
    ),
    (CONFIDENCE_TEXT, lambda _, f: f"{100 * f.interval[0]:.0f} to {100 * f.interval[1]:.0f}" if f.interval else ""),
    ("best (iter)", lambda _, f: f"{_percent(f.best)} ({f.best_iteration})" if f.best is not None else ""),
    (LOSS, lambda _, f: "" if f.loss is None else f"{f.loss:.3f}"),
    (HELD_OUT, lambda _, f: "" if f.val_loss is None else f"{f.val_loss:.3f}"),
)


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{100 * rate:.1f}"


def _seconds_silent(run: RunView) -> str:
    """Return the time since a running run's last row, if longer than most iterations take."""
    if run.status != "running" or run.age_s < SILENT_S:
        return ""
    size, unit = next(each for each in ((86400, "d"), (3600, "h"), (60, "min")) if run.age_s >= each[0])
    return f", last row {run.age_s / size:.0f} {unit} ago"


def figure_rows(runs: Sequence[RunView]) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells of the table of figures; losses are left out if no run imitates."""
    cells = [[text(run, found) for _, text in COLUMNS] for run in runs for found in (figures_of(run),)]
    titles = [title for title, _ in COLUMNS]
    shown = [n for n, title in enumerate(titles) if title not in (LOSS, HELD_OUT) or any(row[n] for row in cells)]
    return [titles[n] for n in shown], [[row[n] for n in shown] for row in cells]


def differing_settings(runs: Sequence[RunView]) -> list[tuple[str, list[str]]]:
    """Return (key, value per run) of the settings that differ among the runs with settings."""
    known = [run for run in runs if run.config]
    keys = dict.fromkeys(key for run in known for key in leaf_keys(run.config) if key not in OWN_SETTINGS)
    values = [(key, [_setting(run, key) for run in runs]) for key in keys]
    present = [index for index, run in enumerate(runs) if run.config]
    return [(key, texts) for key, texts in values if len({texts[i] for i in present}) > 1]


def in_sections_of_all(runs: Sequence[RunView], key: str) -> bool:
    """Whether all runs with settings have the section of a key: another model's settings are not comparable."""
    parent = key.rpartition(".")[0]
    return all(isinstance(lookup(run.config, parent), Mapping) for run in runs if run.config and parent)


def _run_label(run: RunView, index: int, link: Callable[[RunView], str] | None) -> Html:
    """Return the name of a run, with its colour in the charts."""
    name = html.escape(run.name)
    shown = name if link is None else f'<a href="{html.escape(link(run))}">{name}</a>'
    colour, kind = _line_style(index)
    return Html(f'<span class="legend"><span><i class="{kind}" style="color:var(--{colour})"></i>{shown}</span></span>')


def _line_style(index: int) -> tuple[str, str]:
    return f"c{index % COLOURS}", "dashed" if index // COLOURS % 2 else ""


def _setting(run: RunView, key: str) -> str:
    parent, _, name = key.rpartition(".")
    section = lookup(run.config, parent) if parent else run.config
    known = isinstance(section, Mapping) and name in section
    return setting_text(section[name]) if known else ABSENT


def comparison_parts(runs: Sequence[RunView], link: Callable[[RunView], str] | None = None) -> list[str]:
    """Return the comparison of runs as HTML parts: figures, curves, success per task, settings.

    ``link`` returns the URL of a page about a run; None for no links.
    """
    titles, cells = figure_rows(runs)
    rows = [[_run_label(run, index, link), *row[1:]] for index, (run, row) in enumerate(zip(runs, cells, strict=True))]
    note = f"Success of the first and the last evaluation on fixed seeds; {CONFIDENCE_TEXT} interval of the last."
    parts = [table(titles, rows), f'<p class="sub">{note}</p>', "<h2>Success</h2>", _charts(_success_charts(runs))]
    parts[2:2] = [f'<p class="sub">{html.escape(problem)}</p>' for run in runs for problem in run.problems]
    tasks = dict.fromkeys(name for run in runs for name in task_names(run.rows, "eval"))
    per_task = [
        _chart(runs, f"Evaluation success: {task}", f"eval/{task}/success_rate", percent=True, dots=True)
        for task in tasks
    ]
    if per_task:
        parts += ["<h2>Success per task</h2>", _charts(per_task)]
    parts += ["<h2>Training</h2>", _charts(_chart(runs, title, key, percent) for title, key, percent in CURVES)]
    differing = [(key, *texts) for key, texts in differing_settings(runs)]
    heads = ("setting", *(run.name for run in runs))
    same = "<p>None, except the output directories.</p>"
    parts += ["<h2>Settings that differ</h2>", table(heads, differing, range(len(heads))) if differing else same]
    return parts


def comparison_page(runs: Sequence[RunView]) -> str:
    """Return the comparison as one self-contained HTML page."""
    title = "Comparison of " + (", ".join(run.name for run in runs) if len(runs) < 5 else f"{len(runs)} runs")
    return page(title, [f"<h1>{html.escape(title)}</h1><br>", *comparison_parts(runs)])


def _success_charts(runs: Sequence[RunView]) -> list[str]:
    by_iteration = line_chart("Evaluation success", _evaluations(runs), percent=True, y_range=(0.0, 1.0), wide=True)
    minutes = [_by(run, lambda row, seconds: seconds / 60) for run in runs]
    steps = [_by(run, lambda row, _: number(row, "env_steps")) for run in runs]
    others = [
        line_chart(f"Evaluation success by {what}", _coloured(runs, columns, True), what, True, (0.0, 1.0))
        for what, columns in (("minutes", minutes), ("environment steps", steps))
    ]
    started = _coloured(runs, [points(_of_started(run.rows), STARTED) for run in runs], dots=False)
    training = line_chart("Success of training episodes, of started ones", started, percent=True)
    return [by_iteration, *others, training]


def _evaluations(runs: Sequence[RunView]) -> list[Series]:
    evaluated = [[row for row in run.rows if is_number(row.get("eval/success_rate"))] for run in runs]
    lines = _coloured(runs, [points(rows, "eval/success_rate") for rows in evaluated], dots=True)
    if len(runs) > MOST_WITH_INTERVALS:
        return lines
    return [
        replace(line, intervals=[eval_interval(row) for row in rows])
        for line, rows in zip(lines, evaluated, strict=True)
    ]


def _of_started(rows: Sequence[Row]) -> list[Row]:
    """Return rows with the rate of started episodes: the rate of ended ones is too high, as failures end later."""
    return [{**row, STARTED: row.get(STARTED, row.get("rollout/success_rate"))} for row in rows]


def _by(run: RunView, x_of: Callable[[Row, float], float]) -> list[tuple[float, float]]:
    return [
        (x_of(row, seconds), float(row["eval/success_rate"]))
        for row, seconds in zip(run.rows, elapsed_s(run.rows), strict=True)
        if is_number(row.get("eval/success_rate"))
    ]


def _chart(
    runs: Sequence[RunView], title: str, key: str, percent: bool = False, dots: bool = False, wide: bool = False
) -> str:
    series = _coloured(runs, [points(run.rows, key) for run in runs], dots)
    return line_chart(title, series, percent=percent, y_range=(0.0, 1.0) if dots else None, wide=wide)


def _coloured(runs: Sequence[RunView], columns: Sequence[Sequence[tuple[float, float]]], dots: bool) -> list[Series]:
    lines = map(_line_style, range(len(runs)))
    return [
        Series(run.name, column, colour, dashed=bool(kind), dots=dots)
        for run, column, (colour, kind) in zip(runs, columns, lines, strict=True)
    ]


def _charts(charts: Iterable[str]) -> str:
    return f'<div class="charts">{"".join(charts)}</div>'


def comparison_json(runs: Sequence[RunView]) -> dict[str, object]:
    """Return the figures and differing settings as JSON; success rates are 0 to 1."""
    found = [
        {"run": str(run.directory), "name": run.name, "status": run.status, **asdict(figures_of(run))} for run in runs
    ]
    return {"runs": found, "differing_settings": dict(differing_settings(runs))}
