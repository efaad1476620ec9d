"""Reads values from metrics rows and nested settings, for pages about runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeGuard

from embodrl.reporting.metrics_file import Row

MEASURED = ("time/", "usage/")
"""Prefixes of metrics that depend on the clock and the machine; see ``sinks``."""


def is_measured(name: str) -> bool:
    """Whether a metric may differ between two runs with one seed; comparisons of rows leave it out."""
    return name.startswith(MEASURED)


def points(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    """Return (iteration, value) of a metric where it is finite."""
    return [(row["iteration"], float(row[name])) for row in rows if is_number(row.get(name))]


def number(row: Mapping[str, object], name: str) -> float:
    """Return a metric; 0 if it is missing or not finite."""
    value = row.get(name)
    return float(value) if is_number(value) else 0.0


def elapsed_s(rows: Sequence[Row]) -> list[float]:
    """Return the wall seconds since the start, at the end of each iteration."""
    if all(is_number(row.get("time/elapsed_s")) for row in rows):
        return [float(row["time/elapsed_s"]) for row in rows]
    return list(accumulate(number(row, "time/total_s") for row in rows))


def other_rates(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the success of the row's evaluation under the other decodings: decoding -> rate."""
    prefix = "eval/success_rate_"
    return {key.removeprefix(prefix): float(row[key]) for key in row if key.startswith(prefix) and is_number(row[key])}


def last_other_rates(evaluated: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], int | None]:
    """Return ``other_rates`` of the last row with any, and its iteration unless it is the last row's.

    Evaluations on the way may have the main decoding alone.
    """
    for row in reversed(evaluated):
        if rates := other_rates(row):
            return rates, None if row is evaluated[-1] else row["iteration"]
    return {}, None


def task_names(rows: Sequence[Row], prefix: str) -> list[str]:
    """Return the tasks whose success the rows have, in order; ``prefix`` is ``eval`` or ``rollout``."""
    return list(
        dict.fromkeys(
            key.removeprefix(f"{prefix}/").removesuffix("/success_rate")
            for row in rows
            for key in row
            if key.startswith(f"{prefix}/") and key.endswith("/success_rate") and key.count("/") > 1
        )
    )


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key, list positions included; None if absent."""
    node: Any = config
    for part in key.split("."):
        if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, Mapping) and part in node:
            node = node[part]
        else:
            return None
    return node


def setting_text(value: object) -> str:
    """Return a setting's value as text."""
    render: Callable[[object], str] = str
    if value is None:
        return "null"
    return ", ".join(map(render, value)) if isinstance(value, list) else render(value)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number, within the range of a float."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False
