"""Reads metrics.jsonl, and restores it to the state of a checkpoint."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

from embodrl.errors import OutputError
from embodrl.fields import read_regular_file
from embodrl.storage.atomic import atomic_file

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
SFT_METRICS_FILE = "sft_metrics.jsonl"
"""Metrics file of `embodrl sft`, whose iterations are optimizer steps."""
MAX_BYTES = 2**30
MAX_ITERATION = 2**53
Row = dict[str, Any]


def metrics_path(run_dir: Path) -> Path:
    """Return the path of a run's metrics: the RL file, or the one of `embodrl sft` if only that exists."""
    imitated = run_dir / SFT_METRICS_FILE
    return imitated if imitated.is_file() and not (run_dir / METRICS_FILE).is_file() else run_dir / METRICS_FILE


def is_imitation(rows: list[Row]) -> bool:
    """Whether rows are from supervised fine-tuning."""
    return bool(rows) and "loss" in rows[-1] and "step" in rows[-1]


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of a metrics.jsonl; damaged lines are left out with a warning.

    A last line truncated by a crash is left out silently. A second line of an iteration, such as an asynchronous
    evaluation's, is merged into its row.

    Raises:
        OutputError: the file can't be read, e.g. a link, a pipe, or larger than ``MAX_BYTES``.
    """
    try:
        lines = read_regular_file(path, MAX_BYTES).splitlines(keepends=True)
    except (FileNotFoundError, NotADirectoryError):
        lines = []
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
        hint = "restore the file from a copy; it must be a regular file"
        raise OutputError(f"{path} can't be read: {reason}", hint, code="metrics-unreadable") from error
    rows = [parse_row(line) for line in lines]
    damaged = [number for number, row in enumerate(rows, start=1) if row is None]
    if damaged and damaged[-1] == len(lines) and not lines[-1].endswith(b"\n"):
        damaged.pop()
    if damaged:
        logger.warning("%s: %s left out: damaged", path, _named(damaged, "line"))
    merged: dict[int, Row] = {}
    for row in rows:
        if row is not None:
            merged[row["iteration"]] = merged.get(row["iteration"], {}) | row
    return list(merged.values())


def restore_metrics(path: Path, saved: bytes) -> bytes:
    """Restore a metrics.jsonl to ``saved``, its content in a checkpoint, and return that; warns about damaged lines.

    Raises:
        OSError: the file can't be written.
    """
    try:
        found = read_regular_file(path, MAX_BYTES)
    except FileNotFoundError:
        found = b""
    except OSError as error:
        logger.warning("%s can't be read (%s): restored from the checkpoint", path, error.strerror)
        found = b""
    lines, wanted = (text.splitlines(keepends=True) for text in (found, saved))
    differing = [n for n, line in enumerate(wanted, start=1) if n > len(lines) or lines[n - 1] != line]
    if differing:
        where = _named(differing, "line")
        logger.warning("%s: %s damaged or missing: restored from the checkpoint", path, where)
    if found.startswith(saved):
        if len(found) > len(saved):
            os.truncate(path, len(saved))
    else:
        with atomic_file(path) as partial:
            partial.write_bytes(saved)
    return saved


def parse_row(line: bytes) -> Row | None:
    """Parse a line; None if it is not a row."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("iteration")) is not int:
        return None
    return row if abs(row["iteration"]) <= MAX_ITERATION else None


def _named(numbers: list[int], what: str) -> str:
    shown = ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")
    return f"{what} {shown} is" if len(numbers) == 1 else f"{what}s {shown} are"
