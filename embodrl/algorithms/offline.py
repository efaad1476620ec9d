"""The equations of offline algorithms, as pure functions: implicit Q-learning (IQL) and RECAP.

IQL: Kostrikov et al. 2021, "Offline Reinforcement Learning with Implicit Q-Learning", arXiv 2110.06169. RECAP: Physical
Intelligence 2025, "pi*0.6: a VLA That Learns From Experience", arXiv 2511.14759.

Shapes: N frames or transitions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """Return ``|tau - 1(u < 0)| u^2``, ``float32[N]`` (IQL's equation 5).

    Args:
        difference: ``u = Q(s, a) - V(s)``, ``float32[N]``.
        expectile: tau; 0.5 is the mean squared error, towards 1 V becomes the largest Q among the actions of the data.
    """
    return torch.where(difference < 0, 1.0 - expectile, expectile) * difference.square()


def advantage_weights(advantages: Tensor, temperature: float, largest: float) -> Tensor:
    """Return ``min(exp(beta A), largest)``, ``float32[N]``: what imitation of each action counts (IQL's equation 7).

    Args:
        advantages: ``A = Q(s, a) - V(s)``, ``float32[N]``.
        temperature: beta; 0 is behaviour cloning.
        largest: no weight is above it.
    """
    return (temperature * advantages).exp().clamp(max=largest)
