"""What the figures were measured on."""

from __future__ import annotations

import os
import platform

from embodrl.processor import processor


def describe_hardware() -> dict[str, object]:
    """Return the processor, its instructions, the number of usable cores and the kernel's release.

    What is measured at ``precision=auto`` runs in bf16 where ``bf16`` is true, and in float32 elsewhere.
    """
    cpu = processor()
    return {
        "cpu": cpu.name,
        "instructions": cpu.instructions,
        "bf16": cpu.has_bf16,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
    }
