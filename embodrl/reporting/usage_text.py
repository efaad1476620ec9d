"""Shows ``usage/...`` metrics: a line for an iteration, and a table for a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from embodrl.reporting.metrics_file import Row
from embodrl.reporting.rows import is_number, number, points

QUEUES = (("shards waiting for training", "staleness/queue"), ("rewards awaited", "usage/queue_rewards"))
USAGE_HEAD = ("component", "cores busy", "memory", "idle", "sent", "received")
USAGE_NOTE = (
    "Means over the iterations, and the most memory. Sent and received are an iteration's, from the main process's"
    " point of view. Other machines are not counted."
)
ABSENT = "–"
_COMPONENTS = ("main", "env", "rollout", "actor", "eval")
_GPU = re.compile(r"usage/gpu_([0-9]{1,4})_busy")


def usage_text(row: Mapping[str, object]) -> str:
    """Return the use of the machine in an iteration as a line; "" if the row has none."""
    parts = [
        _listed(row, "cores", "usage/cores_{}", "{:.1f}"),
        _listed(row, "memory in GiB", "usage/memory_{}_gib", "{:.1f}"),
        _listed(row, "idle", "usage/idle_{}", "{:.0%}"),
    ]
    for gpu in _gpus([row]):
        busy, used = number(row, f"usage/gpu_{gpu}_busy"), number(row, f"usage/gpu_{gpu}_memory_gib")
        parts.append(f"GPU {gpu}: {busy:.0%}, {used:.1f} GiB")
    parts += [f"{label}: {number(row, name):.0f}" for label, name in QUEUES if number(row, name)]
    return "; ".join(part for part in parts if part)


def usage_table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return lines of ``USAGE_HEAD`` for a run's components, its GPUs and its queues; none without such metrics.

    The row before the first iteration is left out.
    """
    trained = [row for row in rows if number(row, "iteration") > 0]
    names = ("usage/cores_{}", "usage/memory_{}_gib", "usage/idle_{}", "usage/sent_{}_mib", "usage/received_{}_mib")
    lines: list[tuple[str, ...]] = []
    for component in _COMPONENTS:
        cores, memory, idle, sent, received = (_values(trained, name.format(component)) for name in names)
        cells = (
            _mean(cores, "{:.2f}"),
            _most(memory, "{:.2f} GiB"),
            _mean(idle, "{:.0%}"),
            _mean(sent, "{:.2f} MiB"),
            _mean(received, "{:.2f} MiB"),
        )
        lines += [(component, *cells)] if any(cell != ABSENT for cell in cells) else []
    for gpu in _gpus(trained):
        busy = _values(trained, f"usage/gpu_{gpu}_busy")
        idle = _mean([1 - value for value in busy], "{:.0%}")
        memory = _most(_values(trained, f"usage/gpu_{gpu}_memory_gib"), "{:.2f} GiB")
        lines.append((f"GPU {gpu}", ABSENT, memory, idle, ABSENT, ABSENT))
    for label, name in QUEUES:
        if values := _values(trained, name):
            lines.append((f"{label}: {_mean(values, '{:.1f}')}", *[ABSENT] * (len(USAGE_HEAD) - 1)))
    return lines


def _listed(row: Mapping[str, object], label: str, name: str, form: str) -> str:
    """Return e.g. ``cores main 1.0 env 0.4``; "" if the row has none of these metrics."""
    found = {each: row.get(name.format(each)) for each in _COMPONENTS}
    shown = [f"{each} {form.format(value)}" for each, value in found.items() if is_number(value)]
    return f"{label}: {' '.join(shown)}" if shown else ""


def _gpus(rows: Sequence[Mapping[str, object]]) -> list[int]:
    return sorted({int(match[1]) for row in rows for name in row if (match := _GPU.fullmatch(name))})


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [value for _, value in points(rows, name)]


def _mean(values: Sequence[float], form: str) -> str:
    return form.format(sum(values) / len(values)) if values else ABSENT


def _most(values: Sequence[float], form: str) -> str:
    return form.format(max(values)) if values else ABSENT
