"""Number format of the forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor

from embodrl.processor import processor

Precision = Literal["fp32", "bf16"]


def resolve_precision(setting: Literal["auto", "fp32", "bf16"], device: torch.device | str) -> Precision:
    """Return the precision of a setting on a device; auto is bf16 if the device has it in hardware.

    A CPU needs AVX512-BF16, AMX or Arm's bf16, not disabled by ATEN_CPU_CAPABILITY or ONEDNN_MAX_CPU_ISA.
    """
    if setting != "auto":
        return setting
    if torch.device(device).type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if processor().has_bf16 else "fp32"


def autocast(precision: Precision, device: torch.device | str) -> AbstractContextManager[object]:
    """Return the autocast context of the forward pass at that precision."""
    enabled = precision == "bf16"
    # A forward pass uses each weight once, and threads would share the cache of bf16 copies.
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=enabled, cache_enabled=False)


def not_finite(tensors: Iterable[tuple[str, Tensor | None]]) -> str:
    """Return the names of at most three tensors with NaN or infinite elements; "" without any."""
    names = [f"'{name}'" for name, tensor in tensors if tensor is not None and not bool(tensor.isfinite().all())]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
