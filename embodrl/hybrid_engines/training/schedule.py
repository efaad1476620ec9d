"""Learning rates by iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass

from embodrl.config.schema import OptimConfig


@dataclass(frozen=True)
class LearningRates:
    """Learning rates of one iteration; the policy's rate is 0 while only the value head trains."""

    policy: float
    value: float


def learning_rates(config: OptimConfig, iteration: int, total_iterations: int, critic_warmup: int) -> LearningRates:
    """Return the learning rates of an iteration.

    The policy starts at iteration ``critic_warmup``, with a linear warm-up that reaches the peak in its
    ``lr_warmup_iterations``-th iteration. From then on both rates follow ``lr_scheduler``, which would reach
    ``min_lr_ratio`` at ``schedule_iterations``, one after the last, so that the last update still learns.

    Args:
        config: peaks and shape.
        iteration: 0 for the first.
        total_iterations: length of the run, and of the schedule if ``schedule_iterations`` is None.
        critic_warmup: iterations in which only the value head trains.
    """
    trained = iteration - critic_warmup
    warmup = config.lr_warmup_iterations
    length = config.schedule_iterations or total_iterations
    # A run shorter than its warm-up has no span for the decay.
    span = max(1, length - critic_warmup - warmup)
    progress = min(1.0, max(0.0, (trained - warmup) / span))
    if config.lr_scheduler == "linear":
        shape = 1.0 - progress
    elif config.lr_scheduler == "cosine":
        # Loshchilov and Hutter 2017, "SGDR", eq. 5, without restarts.
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        shape = 1.0
    decay = config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape
    # The ramp starts at 1 / warmup, not 0, so that the first update learns.
    ramp = min(1.0, (trained + 1) / warmup) if warmup else 1.0
    return LearningRates(policy=config.lr * decay * ramp if trained >= 0 else 0.0, value=config.value_lr * decay)
