"""Reading ``provenance.json``, the list of the processes that worked on a run."""

from __future__ import annotations

import json
from pathlib import Path

PROVENANCE_FILE = "provenance.json"


def read_provenance(run_dir: Path) -> list[dict[str, object]]:
    """Return the records of a run, the oldest first; empty where there are none or the file is damaged."""
    try:
        records = json.loads((run_dir / PROVENANCE_FILE).read_bytes())
    except (OSError, ValueError):
        return []
    return records if isinstance(records, list) else []
