"""Reads ``provenance.json``, the list of the processes that worked on a run."""

from __future__ import annotations

import json
from pathlib import Path

from embodrl.fields import MAX_JSON_BYTES, read_regular_file

PROVENANCE_FILE = "provenance.json"


def read_provenance(run_dir: Path) -> list[dict[str, object]]:
    """Return the records of a run, oldest first; empty if there are none or the file is damaged."""
    return _read(run_dir / PROVENANCE_FILE) or []


def is_damaged(run_dir: Path) -> bool:
    """Whether the file exists but can't be read as records."""
    return (run_dir / PROVENANCE_FILE).exists() and _read(run_dir / PROVENANCE_FILE) is None


def _read(path: Path) -> list[dict[str, object]] | None:
    try:
        records: object = json.loads(read_regular_file(path, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(records, list) or not all(map(_is_record, records)):
        return None
    return records


_TYPES = dict.fromkeys(("started", "kind", "command", "embodrl", "host", "platform", "python"), str) | {
    "commit": str | None,
    "dirty": bool | None,
    "from_iteration": int,
    "packages": dict,
}


def _is_record(record: object) -> bool:
    if not isinstance(record, dict):
        return False
    changed = record.get("changed")
    return (
        all(isinstance(record.get(name), kind) for name, kind in _TYPES.items())
        and isinstance(changed, dict)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in changed.values())
    )
