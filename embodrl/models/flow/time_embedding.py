"""Noise levels as vectors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MIN_PERIOD = 4e-3
MAX_PERIOD = 4.0


def time_embedding(tau: Tensor, width: int) -> Tensor:
    """Return sines, then cosines, ``float32[...,width]`` of noise levels ``float32[...]``.

    Periods are spaced geometrically from 4e-3 to 4. Phases reach 2 pi / 4e-3, so they are computed in float64.
    """
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=tau.device)
    period = MIN_PERIOD * (MAX_PERIOD / MIN_PERIOD) ** fraction
    phase = 2.0 * math.pi * tau.double()[..., None] / period
    return torch.cat([phase.sin(), phase.cos()], dim=-1).float()
