"""Random weights for models of width around one hundred, trained from scratch.

Matrices are normal with variance 1/fan_in, divided by sqrt(2 * blocks) where they write to a residual stream (Radford
et al., "Language Models are Unsupervised Multitask Learners", 2019). Two departures let a small model use the image
early instead of ignoring it for hundreds of steps: positions are 2-d sines and cosines, and queries and keys are larger
by ``QUERY_KEY_GAIN``, so that attention distinguishes patches from the start.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

QUERY_KEY_GAIN = 2.0


def new_generator(device: torch.device | str, seed: int) -> torch.Generator:
    """Return a generator for weights on a device; on the CPU for the meta device, which has none."""
    device = torch.device(device)
    return torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)


def init_matrix(weight: Tensor, generator: torch.Generator, gain: float = 1.0) -> None:
    """Draw ``weight [out,...]`` with standard deviation ``gain / sqrt(fan_in)``."""
    fan_in = weight[0].numel()
    weight.data.normal_(0.0, gain / math.sqrt(fan_in), generator=generator)


def init_linears(root: nn.Module, generator: torch.Generator, residual: tuple[str, ...] = (), blocks: int = 1) -> None:
    """Draw every linear layer below ``root``, with zero biases.

    ``residual`` are name suffixes of layers that write to a residual stream, two in each of ``blocks``.
    """
    for name, module in root.named_modules():
        if isinstance(module, nn.Linear):
            gain = 1.0 / math.sqrt(2 * blocks) if residual and name.endswith(residual) else 1.0
            init_matrix(module.weight, generator, gain)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def sincos_2d(grid: int, width: int) -> Tensor:
    """Return fixed positions ``float32[1,grid*grid,width]``: half of the channels for the row, half for the column.

    Vaswani et al., "Attention Is All You Need", 2017, section 3.5, per axis; remaining channels are 0.
    """
    quarter = width // 4
    omega = 1.0 / 100.0 ** (torch.arange(quarter, dtype=torch.float64) / max(quarter, 1))
    axis = torch.arange(grid, dtype=torch.float64)
    angle = axis[:, None] * omega
    waves = torch.cat([angle.sin(), angle.cos()], dim=1)
    rows = waves[:, None].expand(grid, grid, -1)
    columns = waves[None].expand(grid, grid, -1)
    table = torch.zeros(grid, grid, width, dtype=torch.float64)
    table[..., : 4 * quarter] = torch.cat([rows, columns], dim=-1)
    return table.view(1, grid * grid, width).float()
