"""The report of a run: one self-contained report.html with charts, videos and provenance."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from embodrl.config import load_config
from embodrl.config.load import leaf_keys
from embodrl.config.schema import Config
from embodrl.errors import EmbodrlError, OutputError
from embodrl.reporting.charts import Series, line_chart, stacked_chart
from embodrl.reporting.health import find_warnings
from embodrl.reporting.intervals import CONFIDENCE_TEXT, eval_interval
from embodrl.reporting.metrics_file import METRICS_FILE, SFT_METRICS_FILE, is_imitation, metrics_path, read_metrics
from embodrl.reporting.page import Embedder, Html, figures, page, relative, table
from embodrl.reporting.provenance import PROVENANCE_FILE, read_provenance
from embodrl.reporting.rows import (
    elapsed_s,
    is_number,
    last_other_rates,
    lookup,
    number,
    points,
    setting_text,
    task_names,
)
from embodrl.reporting.run_files import CONFIG_FILE, own_files, read_run_config
from embodrl.reporting.usage_text import USAGE_HEAD, USAGE_NOTE, usage_table
from embodrl.storage.json_file import write_text_file

Rows = list[dict[str, Any]]

TIMES = (
    *(("simulation", "time/env_s", "c0"), ("policy", "time/policy_s", "c4")),
    *(("training", "time/train_s", "c2"), ("evaluation", "time/eval_s", "c1")),
)
CURVES = (
    ("Return per training episode", "rollout/return", "c1"),
    ("Steps per training episode", "rollout/episode_length", "c5"),
    ("Policy loss", "train/policy_loss", "c0"),
    ("Value loss", "train/value_loss", "c1"),
    ("KL of an update (nats per token)", "train/approx_kl", "c3"),
    ("Clipped ratios", "train/clip_fraction", "c4"),
    ("Entropy (nats per token)", "train/entropy", "c2"),
    ("Explained variance of the critic", "train/explained_variance", "c5"),
    ("Gradient norm", "train/grad_norm", "c0"),
    ("Learning rate", "train/lr", "grey"),
    ("Gradient norm", "grad_norm", "c0"),
    ("Learning rate", "lr", "grey"),
)
IMITATION_CURVES = (("training", "loss", "c0"), ("held-out episodes", "sft/val_loss", "c1"))
PERCENT = ("train/clip_fraction",)
SEEDS = (("training", "runner.seed"), ("first evaluation episode", "env.eval.seed"))
MAX_LOGS = 40


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` from a run's metrics, config.yaml, provenance.json, videos and logs; return its path.

    ``run_dir`` may lack any file but the metrics; that part is then left out.

    Raises:
        OutputError: the metrics are missing or can't be read, or the directory can't be written.
    """
    run_dir = Path(run_dir)
    write_text_file(run_dir / "report.html", report_page(run_dir))
    return run_dir / "report.html"


def report_page(run_dir: Path) -> str:
    """Return the page about a run, which may still be training.

    Raises:
        OutputError: the metrics are missing or can't be read.
    """
    rows = read_metrics(metrics_path(run_dir))
    if not rows:
        raise OutputError(
            f"{run_dir} has no metrics",
            "name the directory of a run that has completed an iteration",
            code="no-metrics",
        )
    config, text, unreadable = read_run_config(run_dir)
    records = read_provenance(run_dir)
    parts = [
        f"<h1>{html.escape(run_dir.name)}</h1>",
        f'<p class="sub">{html.escape(_subtitle(config, records))}</p>',
        figures(_figures(rows)),
        _warnings(rows, config),
        _success(rows, config),
        _curves(rows),
        _usage(rows),
        _videos(run_dir),
        _origin(records, config, run_dir),
        _unreadable(unreadable),
        _differences(config, text),
        _files(run_dir),
    ]
    return page(run_dir.name, parts)


def _subtitle(config: Mapping[str, Any], records: list[dict[str, Any]]) -> str:
    facts = [lookup(config, key) for key in ("env.env_type", "env.tasks", "model.model_type", "algorithm.adv_type")]
    date = records[0]["started"] if records else time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return " · ".join([*(setting_text(fact) for fact in facts if fact), _readable(date)])


def _readable(stamp: str) -> str:
    try:
        return datetime.strptime(stamp, "%Y-%m-%dT%H:%M:%S%z").strftime("%Y-%m-%d %H:%M %z").strip()
    except ValueError:
        return stamp


def _figures(rows: Rows) -> list[tuple[str, str]]:
    evaluated = [row for row in rows if is_number(row.get("eval/success_rate"))]
    found: list[tuple[str, str]] = []
    if evaluated:
        first = evaluated[0]
        last = evaluated[-1]
        start = f"{100 * first['eval/success_rate']:.1f} → " if first is not last else ""
        interval = eval_interval(last)
        how = f", {CONFIDENCE_TEXT} interval {100 * interval[0]:.0f} to {100 * interval[1]:.0f} %" if interval else ""
        found.append((f"{start}{100 * last['eval/success_rate']:.1f} %", f"evaluation success{how}"))
        best = max(evaluated, key=lambda row: row["eval/success_rate"])
        if best["eval/success_rate"] > max(first["eval/success_rate"], last["eval/success_rate"]):
            found.append(
                (f"{100 * best['eval/success_rate']:.1f} %", f"best evaluation, iteration {best['iteration']}")
            )
        others, iteration = last_other_rates(evaluated)
        when = "" if iteration is None else f", iteration {iteration}"
        found += [(f"{100 * rate:.1f} %", f"evaluation success, {name} actions{when}") for name, rate in others.items()]
    seconds = elapsed_s(rows)[-1]
    found.append((f"{seconds / 60:.1f} min", "wall time"))
    if is_imitation(rows):
        found.append((f"{rows[-1]['iteration']}", "steps"))
        losses = [(what, points(rows, name)) for what, name, _ in IMITATION_CURVES]
        return [*found, *((f"{values[-1][1]:.3f}", f"last loss, {what}") for what, values in losses if values)]
    steps = int(number(rows[-1], "env_steps"))
    found.append((f"{rows[-1]['iteration']}", "iterations"))
    found.append((f"{steps:,}", "environment steps"))
    return [*found, (f"{steps / seconds:.0f}", "environment steps per second of wall time")] if seconds else found


def _warnings(rows: Rows, config: Mapping[str, Any]) -> str:
    found = find_warnings(rows, lookup(config, "model.warm_start") is not None)
    if not found:
        return ""
    items = "".join(
        f"<li><b>Iteration {w.iteration}: {html.escape(w.message)}.</b><br>"
        f"{html.escape(w.hint[0].upper() + w.hint[1:])}. <code>{w.code}</code></li>"
        for w in found
    )
    return f'<h2>Warnings</h2>\n<ul class="warnings">{items}</ul>'


def _success(rows: Rows, config: Mapping[str, object]) -> str:
    evaluated = [row for row in rows if is_number(row.get("eval/success_rate"))]
    intervals = [eval_interval(row) for row in evaluated]
    minutes = {row["iteration"]: seconds / 60 for row, seconds in zip(rows, elapsed_s(rows), strict=True)}
    tips = [
        f"iteration {row['iteration']}: {100 * row['eval/success_rate']:.1f} %, {minutes[row['iteration']]:.1f} min,"
        f" {number(row, 'env_steps'):,.0f} steps"
        for row in evaluated
    ]
    series = [
        Series("training, of ended episodes", points(rows, "rollout/success_rate"), "grey"),
        Series("training, of started episodes", points(rows, "rollout/success_rate_started"), "grey", dashed=True),
        Series(
            f"evaluation on fixed seeds, {CONFIDENCE_TEXT} interval",
            points(evaluated, "eval/success_rate"),
            "c0",
            intervals,
            tips,
            dots=True,
        ),
    ]
    for name, colour in (("sampled", "c1"), ("mean", "c2"), ("greedy", "c3")):
        found = points(evaluated, f"eval/success_rate_{name}")
        series += [Series(f"evaluation, {name} actions", found, colour, dots=True)] if found else []
    charts = [line_chart("Success rate", series, percent=True, y_range=(0.0, 1.0), wide=True)]
    charts += [_per_task(rows, prefix, title) for prefix, title in (("eval", "Evaluation"), ("rollout", "Training"))]
    if not any(charts):  # imitation without evaluations
        return ""
    note = (
        '<p class="sub">Training actions are sampled. Episodes that a rollout cuts off have no outcome: the rate of'
        " ended episodes leaves them out and is too high, that of started episodes counts them as failures.</p>"
        if any(row.get("rollout/cut_episodes") for row in rows)
        else ""
    )
    return f'<h2>Success</h2>\n{note}<div class="charts">{"".join(charts)}</div>'


def _per_task(rows: Rows, prefix: str, title: str) -> str:
    series = [
        Series(name, points(rows, f"{prefix}/{name}/success_rate"), f"c{i % 6}", dashed=i >= 6, dots=prefix == "eval")
        for i, name in enumerate(task_names(rows, prefix))
    ]
    return line_chart(f"{title} success by task", series, percent=True, y_range=(0.0, 1.0))


def _curves(rows: Rows) -> str:
    losses = [Series(what, points(rows, name), colour) for what, name, colour in IMITATION_CURVES]
    charts = [line_chart("Imitation loss", losses, "step", wide=True)]
    charts += [
        line_chart(title, [Series(title, points(rows, name), colour)], percent=name in PERCENT)
        for title, name, colour in CURVES
    ]
    present = [time for time in TIMES if any(is_number(row.get(time[1])) for row in rows)]
    columns = {int(row["iteration"]): [number(row, name) for _, name, _ in present] for row in rows}
    if present:
        charts.append(stacked_chart("Seconds per iteration", [t[0] for t in present], [t[2] for t in present], columns))
    return f'<h2>Training</h2>\n<div class="charts">{"".join(charts)}</div>'


def _usage(rows: Rows) -> str:
    found = usage_table(rows)
    if not found:
        return ""
    return f'<h2>Usage</h2>\n<p class="sub">{html.escape(USAGE_NOTE)}</p>{table(USAGE_HEAD, found)}'


def _videos(run_dir: Path) -> str:
    videos, others = own_files(run_dir, "videos/**/[!.]*.mp4")
    folders = sorted({path.parent for path in videos}, reverse=True)
    if not folders and not others:
        return ""
    embedder = Embedder(run_dir)
    parts = ["<h2>Videos</h2>"]
    if others:
        names = html.escape(", ".join(path.relative_to(run_dir).as_posix() for path in others[:MAX_LOGS]))
        parts.append(f'<p class="sub">Left out, since they are not regular files of the run: {names}</p>')
    for folder in folders:  # newest first: embedded while there is room
        name = folder.name.replace("iteration_", "Evaluation after iteration ").replace("_", " ")
        items = "".join(embedder.episode(path) for path in videos if path.parent == folder)
        gallery = f'<div class="videos">{items}</div>'
        heading = " ".join(part.lstrip("0") or "0" if part.isdigit() else part for part in name.split())
        if folder is folders[0]:
            parts.append(f"<h3>{html.escape(heading)}: the first episodes, click to pause</h3>{gallery}")
        else:
            parts.append(f"<details><summary>{html.escape(heading)}</summary>{gallery}</details>")
    return "\n".join(parts)


def _origin(records: list[dict[str, Any]], config: Mapping[str, Any], run_dir: Path) -> str:
    seeds = ", ".join(f"{name}: {lookup(config, key)}" for name, key in SEEDS if lookup(config, key) is not None)
    rows: list[tuple[str, object]] = []
    for record in records:
        when = f"{_readable(record['started'])}, from iteration {record['from_iteration'] + 1}"
        rows.append((f"{record['kind']} at", when))
        rows.append(("command", Html(f"<code>{html.escape(record['command'])}</code>")))
        changed = " with local changes" if record["dirty"] else ""
        commit = f", commit {record['commit'][:12]}{changed}" if record["commit"] else ""
        rows.append(("embodrl", f"{record['embodrl']}{commit}"))
        rows += [("changed", f"{key}: {old} → {new}") for key, (old, new) in record["changed"].items()]
    if records:
        last = records[-1]
        versions = ", ".join(f"{name} {version}" for name, version in last["packages"].items())
        rows += [("host", f"{last['host']}, {last['platform']}, Python {last['python']}"), ("packages", versions)]
    rows += [("seeds", seeds)] if seeds else []
    if (run_dir / "checkpoints" / "best").is_symlink():
        rows.append(("best checkpoint", (run_dir / "checkpoints" / "best").readlink().name))
    return f"<h2>Provenance</h2>\n{table((), rows)}" if rows else ""


def _unreadable(reason: str) -> str:
    if not reason:
        return ""
    return f'<p class="sub">{CONFIG_FILE} can\'t be read, so no settings are shown: {html.escape(reason)}</p>'


def _differences(config: Mapping[str, object], text: str) -> str:
    if not config:
        return ""
    defaults = _defaults()
    rows = [
        (key, setting_text(value), setting_text(lookup(defaults, key)))
        for key in leaf_keys(config)
        if (value := lookup(config, key)) != lookup(defaults, key) and key not in ("runner.output_dir",)
    ]
    changed = table(("setting", "this run", "default"), rows, (0, 1, 2)) if rows else "<p>Nothing.</p>"
    whole = f"<details><summary>All settings</summary><pre>{html.escape(text)}</pre></details>"
    return f"<h2>What differs from the defaults</h2>\n{changed}\n{whole}"


def _defaults() -> dict[str, object]:
    """Return the settings of `embodrl train` without arguments; the schema's values if that is invalid here."""
    try:
        return load_config([]).config.model_dump(mode="json")
    except EmbodrlError:
        return Config().model_dump(mode="json")


def _files(run_dir: Path) -> str:
    paths, _ = own_files(run_dir, METRICS_FILE, SFT_METRICS_FILE, CONFIG_FILE, PROVENANCE_FILE)
    paths += own_files(run_dir, "logs/**/*.log")[0][:MAX_LOGS]
    links = ", ".join(
        f'<a href="{relative(path, run_dir)}">{html.escape(path.relative_to(run_dir).as_posix())}</a>' for path in paths
    )
    return f'<h2>Files of the run</h2>\n<p class="sub">Next to this page: {links}</p>' if links else ""
