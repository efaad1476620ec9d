"""First steps of AdamW, checked weight by weight."""

from __future__ import annotations

import torch
from torch import Tensor


def watch(*optimizers: torch.optim.Optimizer) -> dict[Tensor, torch.optim.Optimizer]:
    """Check the first step of every weight: AdamW's moves it by its own gradient; return what has stepped so far."""

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and weight not in checked:
                    found[weight] = (weight.detach().clone(), weight.grad.clone())

    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for weight in found.keys() & set(group["params"]):
                old, gradient = found.pop(weight)
                # Kingma and Ba 2015, algorithm 1 at t = 1: the corrected moments are the gradient and its square.
                moved = group["lr"] * gradient / (gradient.abs() + group["eps"])
                expected = old * (1 - group["lr"] * group["weight_decay"]) - moved
                torch.testing.assert_close(weight.detach(), expected, rtol=1e-5, atol=1e-6)
                checked[weight] = optimizer

    found: dict[Tensor, tuple[Tensor, Tensor]] = {}
    checked: dict[Tensor, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
    return checked
