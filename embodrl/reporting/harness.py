"""An evaluation in the result format of vla-evaluation-harness, for its merging and tables.

The layout is ``BenchmarkResult``: github.com/allenai/vla-evaluation-harness, src/vla_eval/results/collector.py.
Episodes ended by simulator faults count as failures there, with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from embodrl.reporting.eval_report import EpisodeFigures
from embodrl.version import __version__

METRICS = {"success": "mean", "success_at_end": "mean"}


def harness_result(
    benchmark: str,
    tasks: Sequence[str],
    episodes: Sequence[EpisodeFigures],
    num_episodes: int,
    seed: int,
    config: Mapping[str, object],
) -> dict[str, object]:
    """Return the content of the file.

    Episode i has task ``i mod n``. The harness calls LIBERO's tasks by their instructions. ``num_episodes`` is the
    expected number, ``episodes`` the completed ones, and ``config`` further content to keep.
    """
    done = {episode["number"]: episode for episode in episodes}
    rows = [_task(name, range(index, num_episodes, len(tasks)), done) for index, name in enumerate(tasks)]
    return {
        "benchmark": benchmark,
        "mode": "sync",
        "harness_version": f"embodrl {__version__}",
        "created_at": datetime.now(UTC).isoformat(),
        "tasks": rows,
        "config": dict(config),
        "seed": seed,
        "metric_keys": METRICS,
        **_means([_episode(0, done.get(number)) for number in range(num_episodes)]),
    }


def _task(name: str, numbers: range, done: Mapping[int, EpisodeFigures]) -> dict[str, object]:
    rows = [_episode(index, done.get(number)) for index, number in enumerate(numbers)]
    title = next((done[number]["instruction"] for number in numbers if number in done), "") or name
    lost = sum("failure_reason" in row for row in rows)
    return {
        "task": title,
        "episodes": rows,
        "num_episodes": len(rows),
        "avg_steps": sum(int(str(row["steps"])) for row in rows) / (len(rows) or 1),
        **({"num_errors": lost} if lost else {}),
        **_means(rows),
    }


def _episode(index: int, found: EpisodeFigures | None) -> dict[str, object]:
    if found is None:
        failed = dict.fromkeys(METRICS, False)
        return {"episode_id": index, "metrics": failed, "steps": 0, "failure_reason": "simulator fault"}
    metrics = {"success": found["success"], "success_at_end": found["success_at_end"]}
    known = {name: value for name, value in metrics.items() if value is not None}
    return {"episode_id": index, "metrics": known, "steps": found["length"]}


def _means(rows: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Return ``mean_<metric>`` over the rows that have it, rounded as in the harness."""
    found: dict[str, float] = {}
    for name in METRICS:
        values = [metrics[name] for row in rows if isinstance(metrics := row["metrics"], dict) and name in metrics]
        if values:
            found[f"mean_{name}"] = round(sum(values) / len(values), 4)
    return found
