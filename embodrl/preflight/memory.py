"""The memory limit of this process."""

from __future__ import annotations

from pathlib import Path

import psutil


def memory_limit_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory available to this process: the machine's, or a container's limit if lower."""
    total = psutil.virtual_memory().total
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = cgroup / name
        if path.is_file():
            text = path.read_text().strip()
            if text.isdigit():
                total = min(total, int(text))
    return total
