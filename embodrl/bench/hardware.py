"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe_hardware() -> dict[str, object]:
    """Return the processor's name, the number of usable cores and the kernel's release."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "kernel": platform.release()}
