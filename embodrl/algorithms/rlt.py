"""Loss of RLT: Physical Intelligence 2026, "RL Token"."""

from __future__ import annotations

from torch import Tensor

from embodrl.algorithms.off_policy import over_critics


def rlt(q: Tensor, imitation: Tensor, q_weight: float, bc_weight: float, minimum: bool) -> Tensor:
    """Return RLT's actor loss ``-q_weight Q(x, a) + bc_weight ||a - a_ref||^2``, ``float32[N]``.

    Physical Intelligence 2026, "RL Token", equation 5; the weight of Q follows RLinf's implementation.

    Args:
        q: ``float32[E,N]`` of the actor's chunks.
        imitation: ``float32[N]``, squared distances to the reference chunks, summed over a chunk.
        q_weight: weight of the critics.
        bc_weight: weight of the distance.
        minimum: Q is the minimum over the critics; otherwise the mean.
    """
    return bc_weight * imitation - q_weight * over_critics(q, minimum)


def ramp(first: float, last: float, update: int, num_updates: int) -> float:
    """Return a weight that ramps linearly from ``first`` at update 0 to ``last`` at ``num_updates`` and stays there."""
    return first + (last - first) * min(1.0, max(0, update) / num_updates)
