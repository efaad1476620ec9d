"""Draws docs/images from recorded runs: learning curves of several seeds, and frames of an evaluation video.

A RUN is a run directory or a metrics.jsonl. matplotlib is in the extra `plots`.

python scripts/make_readme_figures.py curves docs/images/push_cube.png "PushCube-v1" RUN [RUN ...]
python scripts/make_readme_figures.py modes docs/images/staleness.png "PushCube-v1" "synchronous=A.jsonl,B.jsonl" ...
python scripts/make_readme_figures.py tasks outputs/mix.png "Push and Pull" RUN.jsonl [RUN.jsonl ...]
python scripts/make_readme_figures.py table RUN.jsonl [RUN.jsonl ...]
python scripts/make_readme_figures.py film docs/images/robot.png VIDEO.mp4 [VIDEO.mp4 ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from embodrl.reporting.intervals import wilson_interval

FRAMES_A_ROW = 5
LINE_STYLES = {"_mean": "-", "": "--", "_sampled": ":"}
"""How the decodings of an evaluation are drawn: mean, greedy, sampled."""


def run_label(path: Path) -> str:
    """Return the name of a run: that of RUN/metrics.jsonl is RUN's, that of another file its own."""
    return path.absolute().parent.name if path.name == "metrics.jsonl" else path.stem


def run_file(name: str) -> Path:
    """Return the metrics of a run, given as its directory or as a file."""
    return Path(name) / "metrics.jsonl" if Path(name).is_dir() else Path(name)


def read(path: Path) -> list[dict[str, float]]:
    """Return the rows of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def curves(target: Path, title: str, runs: list[Path]) -> None:
    """Draw evaluation success over wall time and over environment steps: one colour a run, one line a decoding."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    by_time, by_steps = figure.subplots(1, 2, sharey=True)
    for number, run in enumerate(runs):
        rows = [row for row in read(run) if row.get("eval/success_rate") is not None]
        recorded = [end for end in LINE_STYLES if f"eval/success_rate{end}" in rows[0]]
        for end in recorded:
            played = [row for row in rows if f"eval/success_rate{end}" in row]
            minutes = [row["time/elapsed_s"] / 60 for row in played]
            steps = [row["env_steps"] / 1000 for row in played]
            rates = np.array([row[f"eval/success_rate{end}"] for row in played])
            errors = np.sqrt(rates * (1 - rates) / np.array([row["eval/episodes"] for row in played]))
            label = f"{run_label(run)}, {end.strip('_') or 'greedy'}"
            for axis, x in ((by_time, minutes), (by_steps, steps)):
                style = {"color": f"C{number}", "linestyle": LINE_STYLES[end] if len(recorded) > 1 else "-"}
                axis.errorbar(x, 100 * rates, 100 * errors, marker="o", markersize=3, capsize=2, label=label, **style)
    by_time.set(xlabel="wall time, evaluation included (minutes)", ylabel="success (%)", ylim=(0, 102), title=title)
    by_steps.set(xlabel="environment steps (thousands)", title="fixed seeds")
    for axis in (by_time, by_steps):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    by_steps.legend(frameon=False, loc="lower right", fontsize=8)
    figure.savefig(target)


def measured(run: Path) -> dict[str, tuple[list[dict[str, float]], list[float], int]]:
    """Return task -> rows with an evaluation, success rates, episodes of each; a run of one task has the task ''."""
    rows = [row for row in read(run) if row.get("eval/success_rate") is not None]
    tasks = [key.split("/")[1] for key in rows[0] if key.startswith("eval/") and key.count("/") == 2]
    rates = {task: [row[f"eval/{task}/success_rate"] for row in rows] for task in tasks}
    rates = rates if len(tasks) > 1 else {"": [row["eval/success_rate"] for row in rows]}
    return {task: (rows, each, round(rows[0]["eval/episodes"] / len(rates))) for task, each in rates.items()}


def table(runs: list[Path]) -> str:
    """Return a Markdown row per run and task: success at start and end with Wilson's 95 % interval, gain and time."""
    lines = [
        "| run | start | end | gain | iterations | environment steps | wall time |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        for task, (rows, rates, episodes) in measured(run).items():
            ends: list[str] = []
            for rate in (rates[0], rates[-1]):
                low, high = wilson_interval(round(rate * episodes), episodes)
                ends.append(f"{100 * rate:.1f} % ({100 * low:.0f} to {100 * high:.0f})")
            numbers = f"{rows[-1]['iteration']} | {rows[-1]['env_steps']} | {rows[-1]['time/elapsed_s'] / 60:.1f} min"
            name = f"{run_label(run)} {task}".strip()
            lines.append(f"| {name} | {ends[0]} | {ends[1]} | {100 * (rates[-1] - rates[0]):+.1f} | {numbers} |")
    return "\n".join(lines)


def by_task(target: Path, title: str, runs: list[Path]) -> None:
    """Draw evaluation success over environment steps, one line a run and task, with Wilson's 95 % interval."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for run in runs:
        for task, (rows, rates, episodes) in measured(run).items():
            intervals = [wilson_interval(round(rate * episodes), episodes) for rate in rates]
            errors = 100 * np.abs(np.array(intervals).T - np.array(rates))
            steps = [row["env_steps"] / 1000 for row in rows]
            label = f"{task or run_label(run)}, {episodes} episodes"
            axis.errorbar(steps, 100 * np.array(rates), errors, marker="o", markersize=3, capsize=2, label=label)
    axis.set(xlabel="environment steps (thousands)", ylabel="success (%)", ylim=(0, 102), title=title)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right", fontsize=8)
    figure.savefig(target)


def modes(target: Path, title: str, groups: list[str]) -> None:
    """Draw evaluation success over environment steps, one colour a mode and one thin line a seed.

    Args:
        target: picture.
        title: of the picture.
        groups: ``LABEL=RUN.jsonl,RUN.jsonl`` each.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for number, group in enumerate(groups):
        label, _, paths = group.partition("=")
        runs = [
            [row for row in read(Path(path)) if row.get("eval/success_rate") is not None] for path in paths.split(",")
        ]
        steps = np.mean([[row["env_steps"] / 1000 for row in rows] for rows in runs], axis=0)
        rates = 100 * np.array([[row["eval/success_rate"] for row in rows] for rows in runs])
        colour = f"C{number}"
        axis.plot(steps, rates.mean(0), color=colour, marker="o", markersize=4, label=f"{label}, {len(runs)} seeds")
        for rates_of_seed in rates:
            axis.plot(steps, rates_of_seed, color=colour, linewidth=0.7, alpha=0.5)
    axis.set(xlabel="environment steps (thousands)", ylabel="success on fixed seeds (%)", ylim=(50, 100), title=title)
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    figure.savefig(target)


def film(target: Path, videos: list[Path]) -> None:
    """Put evenly spaced frames of each video into a row."""
    import imageio.v2 as imageio

    rows = []
    for video in videos:
        frames = [np.asarray(frame) for frame in imageio.get_reader(video)]
        chosen = np.linspace(0, len(frames) - 1, FRAMES_A_ROW).round().astype(int)
        rows.append(np.concatenate([frames[i] for i in chosen], axis=1))
    imageio.imwrite(target, np.concatenate(rows, axis=0))


if __name__ == "__main__":
    if sys.argv[1] == "table":
        sys.exit(print(table([run_file(name) for name in sys.argv[2:]])))
    command, target = sys.argv[1], Path(sys.argv[2])
    target.parent.mkdir(parents=True, exist_ok=True)
    if command == "curves":
        curves(target, sys.argv[3], [run_file(name) for name in sys.argv[4:]])
    elif command == "tasks":
        by_task(target, sys.argv[3], [run_file(name) for name in sys.argv[4:]])
    elif command == "modes":
        modes(target, sys.argv[3], sys.argv[4:])
    else:
        film(target, [Path(name) for name in sys.argv[3:]])
