"""Equations of offline algorithms, as pure functions: implicit Q-learning (IQL), TD3+BC and RECAP.

IQL: Kostrikov et al. 2021, "Offline Reinforcement Learning with Implicit Q-Learning", arXiv 2110.06169. RECAP: Physical
Intelligence 2025, "pi*0.6: a VLA That Learns From Experience", arXiv 2511.14759. TD3+BC: Fujimoto and Gu 2021, "A
Minimalist Approach to Offline Reinforcement Learning", arXiv 2106.06860.

Shapes: N frames or transitions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """Return ``|tau - 1(u < 0)| u^2``, ``float32[N]``, for ``u = Q(s, a) - V(s)``, ``float32[N]`` (IQL's equation 5).

    tau = 0.5 is the mean squared error; towards 1, V approaches the largest Q among the dataset's actions.
    """
    return torch.where(difference < 0, 1.0 - expectile, expectile) * difference.square()


def advantage_weights(advantages: Tensor, temperature: float, largest: float) -> Tensor:
    """Return the imitation weight of each action, ``min(exp(beta A), largest)``, ``float32[N]`` (IQL's equation 7).

    ``A = Q(s, a) - V(s)`` is ``float32[N]``; ``temperature`` is beta, 0 for behaviour cloning.
    """
    return (temperature * advantages).exp().clamp(max=largest)


def td3_bc(q: Tensor, scale: Tensor, alpha: float) -> Tensor:
    """Return ``-lambda Q(s, pi(s))``, ``float32[N]``, with ``lambda = alpha / mean |Q|`` (TD3+BC's equations 3 and 5).

    ``q float32[N]`` is the first critic's, with gradients; ``scale`` the mean of ``|Q(s, pi(s))|`` over the batch, as
    in the authors' code (the paper writes ``Q(s, a)``). The squared distance to the dataset's actions is added to it.
    """
    return -alpha / scale.clamp_min(1e-8) * q


def steps_to_go_rewards(length: int, success: bool, failure_penalty: float) -> Tensor:
    """Return RECAP's rewards of an episode ``float32[length]``: -1 per step; at its end 0, or ``-failure_penalty``."""
    rewards = torch.full((length,), -1.0)
    rewards[-1] = 0.0 if success else -failure_penalty
    return rewards


def rewards_to_go(rewards: Tensor) -> Tensor:
    """Return ``G_t = r_t + G_{t+1}`` of an episode, ``float32[n]``: undiscounted, as in RECAP."""
    return rewards.flip(0).cumsum(0).flip(0)


def n_step_advantages(rewards: Tensor, values: Tensor, n: int) -> Tensor:
    """Return ``A_t = sum_{k<n} r_{t+k} + V(s_{t+n}) - V(s_t)`` of an episode, ``float32[length]``.

    Values ``float32[length]`` are on the scale of the rewards ``float32[length]``; both are 0 beyond the end.
    """
    ahead = torch.cat([values, values.new_zeros(n)])[n:]
    sums = torch.cat([rewards_to_go(rewards), rewards.new_zeros(n)])
    return sums[: len(rewards)] - sums[n:] + ahead - values


def advantage_indicator(advantages: Tensor, fraction: float) -> Tensor:
    """Return ``bool[N]``: advantages in the best ``fraction``, i.e. at or above that percentile."""
    return advantages >= torch.quantile(advantages.double(), 1.0 - fraction).to(advantages.dtype)


def two_hot(targets: Tensor, centers: Tensor) -> Tensor:
    """Return ``float32[N,K]``: targets ``[N]`` shared between neighbours among ascending, even ``centers [K]``.

    Bellemare et al. 2017, "A Distributional Perspective on Reinforcement Learning", arXiv 1707.06887, algorithm 1.
    """
    place = (targets - centers[0]) / (centers[1] - centers[0])
    below = place.floor().clamp(0, len(centers) - 2)
    share = (place - below).clamp(0, 1)[:, None]
    index = below.long()[:, None]
    result = targets.new_zeros(len(targets), len(centers))
    return result.scatter(1, index, 1 - share).scatter(1, index + 1, share)
