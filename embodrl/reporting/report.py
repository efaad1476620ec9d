"""The report of a run: curves.png and a self-contained report.html."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import yaml

from embodrl.errors import OutputError
from embodrl.reporting.sinks import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = list[dict[str, Any]]

HIGHLIGHTS = (
    "env.env_type",
    "env.tasks",
    "env.train.total_num_envs",
    "env.eval.num_episodes",
    "env.num_processes",
    "model.model_type",
    "model.model_path",
    "model.warm_start",
    "model.num_action_chunks",
    "algorithm.adv_type",
    "algorithm.loss_type",
    "algorithm.gamma",
    "algorithm.gae_lambda",
    "algorithm.clip_ratio_low",
    "algorithm.clip_ratio_high",
    "algorithm.update_epoch",
    "algorithm.sampling.temperature",
    "actor.global_batch_size",
    "actor.precision",
    "actor.optim.lr",
    "actor.optim.value_lr",
    "cluster.device",
    "runner.max_iterations",
    "runner.seed",
)
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2a6fbb", "#d9730d", "#2f8f4e", "#b3261e", "#7b4bb3", "#8a8a8a"
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
img { width: 100%; background: #fff; border: 1px solid #8884; border-radius: 6px; }
.figures { display: flex; gap: 2.5rem; flex-wrap: wrap; } .figures b { display: block; font-size: 1.6rem; }
table { border-collapse: collapse; } td { padding: .2rem 1.5rem .2rem 0; border-bottom: 1px solid #8884; }
td:last-child { font-family: ui-monospace, monospace; }
video { width: 240px; margin: 0 .6rem .6rem 0; border-radius: 6px; vertical-align: top; }
figure { display: inline-block; margin: 0; } figcaption { font-size: .85rem; opacity: .75; }
"""


def write_report(run_dir: Path) -> Path:
    """Write ``curves.png`` and ``report.html`` from a run's metrics.jsonl, config.yaml and videos.

    Args:
        run_dir: directory of the run; without config.yaml or videos their parts are left out.

    Returns:
        the path of report.html.

    Raises:
        OutputError: there are no metrics, or the directory can't be written.
    """
    run_dir = Path(run_dir)
    rows = read_metrics(run_dir / METRICS_FILE)
    if not rows:
        raise OutputError(f"{run_dir} has no metrics", "name the directory of a run that has done an iteration")
    config_path = run_dir / "config.yaml"
    config = yaml.safe_load(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
    try:
        draw_curves(rows, run_dir / "curves.png", _lookup(config, "env.eval.num_episodes"))
        page = _page(run_dir, rows, config)
        (run_dir / "report.html").write_text(page, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"the report can't be written: {error}", "free some room in the run's directory") from error
    return run_dir / "report.html"


def success_standard_error(rate: float, num_episodes: int) -> float:
    """Return the standard error of a success rate: ``sqrt(p (1 - p) / n)``, that of a binomial proportion."""
    return math.sqrt(max(0.0, rate * (1.0 - rate)) / num_episodes)


def draw_curves(rows: Rows, path: Path, num_eval_episodes: int | None = None) -> None:
    """Draw the curves of a run.

    Args:
        rows: of metrics.jsonl.
        path: of the PNG.
        num_eval_episodes: for the error bars, where the rows have no ``eval/num_episodes``.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(12, 9.5), dpi=110)
        FigureCanvasAgg(figure)
        # A constrained layout draws everything twice.
        figure.subplots_adjust(left=0.085, right=0.92, bottom=0.05, top=0.965, wspace=0.4, hspace=0.32)
        axes = figure.subplots(3, 2)
        iterations = [row["iteration"] for row in rows]
        minutes = [seconds / 60 for seconds in _elapsed_s(rows)]
        steps = [row.get("env_steps", 0) / 1000 for row in rows]
        _draw_success(axes[0, 0], rows, minutes, num_eval_episodes, "wall time (minutes)")
        _draw_success(axes[0, 1], rows, steps, num_eval_episodes, "environment steps (thousands)")
        _draw_losses(axes[1, 0], rows, iterations)
        _draw_update_size(axes[1, 1], rows, iterations)
        _draw_time(axes[2, 0], rows, iterations)
        _draw_health(axes[2, 1], rows, iterations)
        figure.savefig(path, format="png")


def _draw_success(ax: Axes, rows: Rows, x: list[float], num_episodes: int | None, label: str) -> None:
    _plot(ax, rows, x, "rollout/success_rate", "training rollouts (sampled)", GREY, alpha=0.7)
    points = [(at, row) for at, row in zip(x, rows, strict=True) if _is_number(row.get("eval/success_rate"))]
    if points:
        rates = [float(row["eval/success_rate"]) for _, row in points]
        counts = [int(row.get("eval/num_episodes") or num_episodes or 0) for _, row in points]
        errors = [success_standard_error(p, n) if n else 0.0 for p, n in zip(rates, counts, strict=True)]
        times = [at for at, _ in points]
        name = "evaluation, fixed seeds, ± standard error"
        ax.errorbar(times, rates, yerr=errors, fmt="o-", color=BLUE, capsize=3, markersize=4, linewidth=1.6, label=name)
    ax.set(xlabel=label, ylabel="success rate", ylim=(-0.02, 1.02), title="Success rate")
    ax.grid(alpha=0.25)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="lower right", framealpha=0.8, edgecolor="none", fontsize=8)


def _draw_losses(ax: Axes, rows: Rows, x: list[float]) -> None:
    _plot(ax, rows, x, "train/policy_loss", "policy loss (left)", BLUE)
    other = ax.twinx()
    _plot(other, rows, x, "train/value_loss", "value loss (right)", ORANGE)
    other.spines["right"].set_visible(True)
    ax.set(xlabel="iteration", ylabel="policy loss", title="Losses")
    other.set(ylabel="value loss")
    ax.grid(alpha=0.25)
    _legend(ax, other)


def _draw_update_size(ax: Axes, rows: Rows, x: list[float]) -> None:
    _plot(ax, rows, x, "train/approx_kl", "KL per token (left)", RED)
    other = ax.twinx()
    _plot(other, rows, x, "train/clip_fraction", "clip fraction (right)", PURPLE)
    other.spines["right"].set_visible(True)
    ax.set(xlabel="iteration", ylabel="approximate KL (nats)", title="Size of the updates", ylim=(0, None))
    other.set(ylabel="part of the ratios clipped", ylim=(0, None))
    ax.grid(alpha=0.25)
    _legend(ax, other)


def _draw_time(ax: Axes, rows: Rows, x: list[float]) -> None:
    names = (
        ("time/env_s", "environment", BLUE),
        ("time/policy_s", "policy", PURPLE),
        ("time/train_s", "training", GREEN),
        ("time/eval_s", "evaluation", ORANGE),
    )
    present = [entry for entry in names if any(_is_number(row.get(entry[0])) for row in rows)]
    if present:
        parts = [[float(row.get(name) or 0.0) for row in rows] for name, _, _ in present]
        labels, colours = [label for _, label, _ in present], [colour for _, _, colour in present]
        ax.stackplot(x, parts, labels=labels, colors=colours, alpha=0.8, step="mid", linewidth=0)
    ax.set(xlabel="iteration", ylabel="seconds", title="Where the time goes", ylim=(0, None))
    ax.grid(alpha=0.25)
    _legend(ax)


def _draw_health(ax: Axes, rows: Rows, x: list[float]) -> None:
    _plot(ax, rows, x, "train/entropy", "entropy per token (left)", GREEN)
    other = ax.twinx()
    _plot(other, rows, x, "train/explained_variance", "explained variance (right)", GREY)
    other.spines["right"].set_visible(True)
    ax.set(xlabel="iteration", ylabel="entropy (nats)", title="Entropy and critic")
    other.set(ylabel="explained variance", ylim=(-1.05, 1.05))
    ax.grid(alpha=0.25)
    _legend(ax, other)


def _plot(ax: Axes, rows: Rows, x: list[float], name: str, label: str, colour: str, alpha: float = 1.0) -> None:
    points = [(at, float(row[name])) for at, row in zip(x, rows, strict=True) if _is_number(row.get(name))]
    if points:
        marker = "o" if len(points) < 3 else None
        xs, ys = zip(*points, strict=True)
        ax.plot(xs, ys, color=colour, alpha=alpha, label=label, linewidth=1.4, marker=marker, markersize=4)


def _legend(ax: Axes, other: Axes | None = None) -> None:
    """Put one legend for both axes into room made above the curves."""
    handles, labels = ax.get_legend_handles_labels()
    if other is not None:
        more_handles, more_labels = other.get_legend_handles_labels()
        handles, labels = handles + more_handles, labels + more_labels
    for each in (ax, other):
        if each is not None:
            low, high = each.get_ylim()
            each.set_ylim(low, high + 0.15 * (high - low))
    if handles:
        (other or ax).legend(handles, labels, loc="upper left", ncols=4, frameon=False, fontsize=8)


def _page(run_dir: Path, rows: Rows, config: Mapping[str, Any]) -> str:
    image = base64.b64encode((run_dir / "curves.png").read_bytes()).decode("ascii")
    facts = "".join(f"<div><b>{html.escape(value)}</b>{html.escape(label)}</div>" for label, value in _figures(rows))
    found = [(key, _lookup(config, key)) for key in HIGHLIGHTS]
    cells = "".join(
        f"<tr><td>{key}</td><td>{html.escape(_text(value))}</td></tr>" for key, value in found if value is not None
    )
    table = f"<h2>Configuration</h2>\n<table>{cells}</table>" if cells else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(run_dir.name)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>{html.escape(run_dir.name)}</h1>\n"
        f'<div class="figures">{facts}</div>\n<h2>Curves</h2>\n'
        f'<img alt="curves of the run" src="data:image/png;base64,{image}">\n{_videos(run_dir)}\n{table}\n'
        f"</body></html>\n"
    )


def _figures(rows: Rows) -> list[tuple[str, str]]:
    evaluated = [row for row in rows if _is_number(row.get("eval/success_rate"))]
    figures: list[tuple[str, str]] = []
    if evaluated:
        first, last = evaluated[0]["eval/success_rate"], evaluated[-1]["eval/success_rate"]
        figures.append(("evaluation success, first to last", f"{100 * first:.1f} → {100 * last:.1f} %"))
    seconds = _elapsed_s(rows)[-1]
    figures.append(("wall time", f"{seconds / 60:.1f} min"))
    figures.append(("iterations", f"{rows[-1]['iteration']}"))
    figures.append(("environment steps", f"{rows[-1].get('env_steps', 0):,}"))
    if seconds:
        figures.append(("environment steps a second, all included", f"{rows[-1].get('env_steps', 0) / seconds:.0f}"))
    return figures


def _videos(run_dir: Path) -> str:
    files = sorted(run_dir.glob("videos/**/*.mp4"))
    if not files:
        return ""
    items = "".join(
        '<figure><video controls muted loop preload="metadata" '
        f'src="{quote(file.relative_to(run_dir).as_posix())}"></video>'
        f"<figcaption>{html.escape(file.stem)}</figcaption></figure>"
        for file in files
    )
    return f"<h2>Videos</h2>\n{items}"


def _elapsed_s(rows: Rows) -> list[float]:
    """Return the wall seconds since the start, at the end of each iteration."""
    if all(_is_number(row.get("time/elapsed_s")) for row in rows):
        return [float(row["time/elapsed_s"]) for row in rows]
    return list(accumulate(float(row.get("time/total_s") or 0.0) for row in rows))


def _lookup(config: Mapping[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node


def _text(value: Any) -> str:
    render: Callable[[Any], str] = str
    return ", ".join(map(render, value)) if isinstance(value, list) else render(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
