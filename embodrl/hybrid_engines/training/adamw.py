"""AdamW in one kernel, for any layout of weights and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def fused_adamw(
    params: Iterable[Tensor | Mapping[str, Any]], betas: tuple[float, float], eps: float
) -> torch.optim.AdamW:
    """Return AdamW with a learning rate of zero and no weight decay, unless the groups set others.

    Whether the weights are dense is decided here, once: a weight replaced later by a view with gaps is not noticed.
    """
    groups = [group if isinstance(group, Mapping) else {"params": [group]} for group in params]
    # Moments of a weight with gaps in memory have no gaps: the kernel would pair wrong elements.
    fused = all(_is_dense(weight) for group in groups for weight in group["params"])
    # The rates are set before the first step, see ``set_learning_rates``.
    optimizer = torch.optim.AdamW(
        [dict(group) for group in groups], lr=0.0, betas=betas, eps=eps, weight_decay=0.0, fused=fused
    )
    optimizer.register_step_pre_hook(_lay_out)
    return optimizer


def _is_dense(weight: Tensor) -> bool:
    return torch.empty_like(weight, device="meta").stride() == weight.stride()


def _lay_out(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Give gradients and moments the strides of their weights.

    The fused kernel reads all of them as flat memory, but gradients of ``torch.autograd.grad`` for convolutions are
    channels_last, and moments from a checkpoint are contiguous.
    """
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is None:
                continue
            weight.grad = _laid_out_like(weight, weight.grad)
            moments = optimizer.state[weight]
            for name in ("exp_avg", "exp_avg_sq"):
                if name in moments:
                    moments[name] = _laid_out_like(weight, moments[name])


def _laid_out_like(weight: Tensor, tensor: Tensor) -> Tensor:
    return tensor if tensor.stride() == weight.stride() else torch.empty_like(weight).copy_(tensor)
