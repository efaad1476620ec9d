"""Equations of soft actor-critic (SAC) and of RLPD, as pure functions.

SAC: Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", arXiv 1812.05905. RLPD: Ball et al. 2023,
"Efficient Online Reinforcement Learning with Offline Data", arXiv 2302.02948. The chunk of C actions is one action.

Shapes: N transitions, n chunks of a return, C actions in a chunk, E critics.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


def chunk_return(rewards: Tensor, valid: Tensor, gamma: float, per_action: bool) -> tuple[Tensor, Tensor]:
    """Return the reward of chunks ``float32[...]`` and the number of discounts each costs ``int64[...]``.

    ``sum_k gamma^k r_k`` over the K executed actions, and K, if ``per_action``
    (``algorithm.reward_type=action_level``); otherwise ``sum_k r_k`` and 1. ``rewards`` are ``float32[...,C]``; ``valid
    bool[...,C]`` is a prefix of the chunk.
    """
    kept = torch.where(valid, rewards, 0.0)
    if not per_action:
        return kept.sum(-1), torch.ones(rewards.shape[:-1], dtype=torch.int64)
    powers = gamma ** torch.arange(rewards.shape[-1], dtype=rewards.dtype)
    return (kept * powers).sum(-1), valid.sum(-1)


class NStep(NamedTuple):
    """n-step return and its bootstrap.

    Attributes:
        returns: ``float32[N]``, discounted sum of the rewards up to the bootstrap.
        discount: ``float32[N]``, factor of the bootstrap value: ``gamma^m``, 0 after a termination.
        offset: ``int64[N]``, chunks from the first observation to the bootstrap observation, at most n.
    """

    returns: Tensor
    discount: Tensor
    offset: Tensor


def n_step_return(rewards: Tensor, lengths: Tensor, terminated: Tensor, acted: Tensor, gamma: float) -> NStep:
    """Return n-step returns ``sum_{i<m} gamma^{t_i} r_i``, with m = n or fewer where the episode ends earlier.

    A truncation is not a termination: there the value of the last observation is the bootstrap.

    Args:
        rewards: ``float32[N,n]`` of consecutive chunks.
        lengths: ``int64[N,n]``, number of discounts each chunk costs.
        terminated: ``bool[N,n]``, the task ended the episode within the chunk.
        acted: ``bool[N,n]``, a chunk exists; an observation without one is the end of the known episode.
        gamma: discount per reward step.
    """
    # Chunks after a termination or a gap are not part of the return.
    alive = acted & (torch.cumsum(F.pad((terminated | ~acted)[:, :-1].long(), (1, 0)), 1) == 0)
    ends = torch.cumsum(lengths * alive, 1)
    # t_i: number of discounts of the preceding chunks.
    starts = F.pad(ends[:, :-1], (1, 0))
    returns = torch.where(alive, gamma**starts * rewards, 0.0).sum(1)
    # No bootstrap after a termination.
    over = (terminated & alive).any(1)
    return NStep(returns, gamma ** ends[:, -1] * ~over, alive.sum(1))


def over_critics(q: Tensor, minimum: bool) -> Tensor:
    """Return the minimum or mean over the critics, ``float32[N]``; ``q float32[E,N]``."""
    return q.min(0).values if minimum else q.mean(0)


def soft_target(
    returns: Tensor,
    discount: Tensor,
    next_q: Tensor,
    next_logprobs: Tensor,
    alpha: float,
    backup_entropy: bool,
    minimum: bool = True,
) -> Tensor:
    """Return ``y = R + discount (min_j Q'_j(s', a') - alpha log pi(a'|s'))``, ``float32[N]``.

    SAC's equations 2 and 3 with clipped double Q. RLPD takes the minimum over a random subset of the critics, held by
    ``next_q``, and omits the entropy from the backup where rewards are sparse (section 4 and appendix).

    Args:
        returns: ``float32[N]``; see ``NStep``.
        discount: ``float32[N]``; see ``NStep``.
        next_q: ``float32[E,N]`` of the target critics in the subset.
        next_logprobs: ``float32[N]`` of ``a'``.
        alpha: temperature.
        backup_entropy: include the entropy in the target.
        minimum: minimum over the critics, as above; otherwise the mean, as in DSRL.
    """
    value = over_critics(next_q, minimum)
    # Soft value of the next observation (SAC, eq. 3), followed by the target (eq. 2).
    value = value - alpha * next_logprobs if backup_entropy else value
    # After a termination comes another episode, or nothing: not even NaN may count there.
    return returns + torch.where(discount > 0, discount * value, 0.0)


def critic_loss(q: Tensor, target: Tensor) -> Tensor:
    """Return ``(Q_j(s, a) - y)^2``, averaged over the critics, ``float32[N]``; ``q float32[E,N]``."""
    return (q - target).square().mean(0)


def sac(logprobs: Tensor, q: Tensor, alpha: float, minimum: bool) -> Tensor:
    """Return the actor loss ``alpha log pi(a|s) - Q(s, a)``, ``float32[N]`` (SAC's equation 7).

    ``logprobs float32[N]`` and ``q float32[E,N]`` belong to re-parameterised actions. Q is the ``minimum`` over the
    critics, as in SAC, or the mean, as in RLPD.
    """
    return alpha * logprobs - over_critics(q, minimum)


def temperature_loss(log_alpha: Tensor, logprobs: Tensor, target_entropy: float) -> Tensor:
    """Return ``-alpha (log pi(a|s) + H)``, ``float32[N]``, with a gradient for ``log_alpha`` only (equation 18)."""
    return -log_alpha.exp() * (logprobs.detach() + target_entropy)


@torch.no_grad()
def soft_update(targets: Iterable[Tensor], sources: Iterable[Tensor], tau: float) -> None:
    """Update targets in place to ``(1 - tau) target + tau source``."""
    for target, source in zip(targets, sources, strict=True):
        # target + tau (source - target).
        target.lerp_(source, tau)
