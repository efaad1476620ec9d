"""Compute capabilities of this machine's processor, from Linux and the limits that torch and oneDNN respect."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"}
"""Values of ONEDNN_MAX_CPU_ISA that exclude bf16 from oneDNN."""


@dataclass(frozen=True)
class Processor:
    """A processor as usable by programs.

    Attributes:
        name: model name reported by Linux.
        instructions: widest vector instructions, e.g. ``AVX2`` or ``AVX-512 with bf16``.
        has_bf16: whether it multiplies bf16 in hardware (AVX512-BF16, AMX, or Arm's bf16).
    """

    name: str
    instructions: str
    has_bf16: bool

    def __str__(self) -> str:
        return f"{self.name} ({self.instructions})"


@lru_cache(maxsize=1)
def processor() -> Processor:
    """Return the processor of this machine, with the environment's limits for torch and oneDNN."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    return parse(text, os.environ)


def parse(cpuinfo: str, limits: Mapping[str, str]) -> Processor:
    """Return the first processor in ``/proc/cpuinfo``, limited by ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA."""
    pairs = [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())]
    first = dict(reversed(pairs))
    name = first.get("model name") or platform.processor() or platform.machine()
    flags = set((first.get("flags") or first.get("Features") or "").split())
    if limits.get("ATEN_CPU_CAPABILITY", "").lower() in ("avx2", "default"):
        flags = {flag for flag in flags if not flag.startswith(("avx512", "amx"))}
    has_bf16 = not flags.isdisjoint(_BF16_FLAGS) and limits.get("ONEDNN_MAX_CPU_ISA", "").upper() not in _WITHOUT_BF16
    return Processor(name, _instructions(flags) + " with bf16" * has_bf16, has_bf16)


def _instructions(flags: set[str]) -> str:
    known = (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("sve", "SVE"), ("asimd", "NEON"))
    return next((name for flag, name in known if flag in flags), platform.machine())
