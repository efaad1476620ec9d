"""Training memory of a policy: weights, gradients and AdamW's moments, computed from shapes."""

from __future__ import annotations

import torch
from torch import nn

from embodrl.models.base import VLAPolicy

ADAMW_MOMENTS = 2
FLOAT32_BYTES = 4


def state_memory(
    policy: VLAPolicy, compute_dtype: torch.dtype = torch.float32, master_weights: bool = True
) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and optimizer state; nothing is allocated.

    ``policy`` has ``requires_grad`` set as for training; with ``master_weights`` trainable half-precision weights have
    a float32 copy.
    """
    trained = [p for group in policy.trainable_groups().values() for p in group]
    weights = sum(_bytes(tensor) for tensor in (*policy.parameters(), *policy.buffers()))
    weights += sum(
        linear.weight.numel() * compute_dtype.itemsize
        for linear in policy.modules()
        if isinstance(linear, nn.Linear) and linear.weight.dtype.itemsize > compute_dtype.itemsize
    )
    gradients = sum(map(_bytes, trained))
    halves = [p for p in trained if master_weights and p.dtype.itemsize < FLOAT32_BYTES]
    optimizer = ADAMW_MOMENTS * (gradients - sum(map(_bytes, halves)))
    optimizer += (ADAMW_MOMENTS + 1) * FLOAT32_BYTES * sum(p.numel() for p in halves)
    return weights, gradients, optimizer


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
