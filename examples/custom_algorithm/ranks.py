"""An advantage estimator and a loss from outside the package.

PYTHONPATH=examples/custom_algorithm embodrl train --config examples/custom_algorithm/config.yaml
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodrl import Advantages, LossCounts, LossOutput, episode_returns, split_episodes


def rank_in_group(
    *, rewards: Tensor, valid: Tensor, terminated: Tensor, truncated: Tensor, group_id: Tensor, gamma: float
) -> Advantages:
    """Give each episode its rank within its group, from -1 for the least return to 1 for the greatest.

    Unlike differences of returns, ranks are not moved by one outlier. Equal returns share their mean rank.

    Args:
        rewards: ``float32[T,B,C]``: T chunks, B environments, C actions.
        valid: ``bool[T,B,C]``, the action was simulated.
        terminated: ``bool[T,B,C]``.
        truncated: ``bool[T,B,C]``.
        group_id: ``int64[T,B]``, equal where episodes began in the same initial state.
        gamma: discount per chunk.
    """
    episodes = split_episodes(valid, terminated, truncated)
    returns = episode_returns(rewards, valid, episodes, gamma, "chunk_level")
    group = episodes.groups(group_id)
    same = (group.unsqueeze(1) == group) & ~episodes.lost
    above = (same * (returns.unsqueeze(1) - returns).sign()).sum(1) / (same.sum(1) - 1).clamp_min(1)
    rank = torch.where(episodes.lost, 0.0, above).float()
    live = valid.any(-1)
    advantages = torch.where(live, rank[episodes.index], 0.0).unsqueeze(-1)
    return Advantages(advantages, advantages.clone(), live.unsqueeze(-1))


def spo_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    valid: Tensor,
    clip_ratio_low: float,
    counts: LossCounts,
) -> LossOutput:
    """Simple Policy Optimization (Xie et al. 2024, arXiv 2401.16025): a penalty in place of PPO's clip.

    ``A * r - |A| / (2 * eps) * (r - 1)^2``, with a ratio r per token.

    Args:
        logprobs: ``float32[N,C,D]`` under the present policy: N chunks, D tokens per action.
        old_logprobs: ``float32[N,C,D]`` under the policy that acted.
        advantages: ``float32[N,1]``.
        valid: ``bool[N,C]``.
        clip_ratio_low: eps.
        counts: of the whole minibatch, whose parts must add up.
    """
    log_ratio = torch.where(valid.unsqueeze(-1), logprobs - old_logprobs, 0.0)
    ratio, weight = log_ratio.exp(), advantages.unsqueeze(-1)
    objective = weight * ratio - weight.abs() / (2 * clip_ratio_low) * (ratio - 1).square()
    loss = -torch.where(valid.unsqueeze(-1), objective, 0.0).sum() / counts.tokens
    kl = (log_ratio.expm1() - log_ratio).sum() / counts.tokens
    return LossOutput(loss, {"policy_loss": loss.detach(), "approx_kl": kl.detach()})
