"""Advantages and returns of a rollout.

Legend: T policy steps (chunks), B environments, C actions in a chunk, K values a chunk (1 or C),
S reward steps (T at chunk level, T*C at action level).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodrl.config.schema import AlgorithmConfig
from embodrl.errors import EmbodrlError
from embodrl.registry import ADVANTAGES
from embodrl.types import TrajectoryBatch

RewardType = Literal["chunk_level", "action_level"]
BootstrapType = Literal["truncation", "none"]


@dataclass(frozen=True)
class Advantages:
    """What an estimator returns.

    Attributes:
        advantages: ``float32[T,B,K]``, 0 where not valid.
        returns: ``float32[T,B,K]``, targets of the value function, 0 where not valid.
        valid: ``bool[T,B,K]``: the chunk (K = 1) or the action (K = C) was simulated.
    """

    advantages: Tensor
    returns: Tensor
    valid: Tensor


@dataclass(frozen=True)
class _RewardSteps:
    """A rollout as a sequence of reward steps, each tensor ``[S,B]`` but ``last_value [B]``."""

    rewards: Tensor
    values: Tensor
    valid: Tensor
    terminated: Tensor
    truncated: Tensor
    bootstrap_values: Tensor
    last_value: Tensor


def gae(
    *,
    rewards: Tensor,
    values: Tensor,
    valid: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    bootstrap_values: Tensor,
    gamma: float,
    gae_lambda: float,
    reward_type: RewardType = "chunk_level",
    bootstrap_type: BootstrapType = "truncation",
) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 11, 12 and 16).

    ``delta_s = r_s + gamma * V(s+1) - V(s)`` and ``A_s = delta_s + gamma * lambda * A_(s+1)``. At a termination V(s+1)
    is 0; at a truncation it is the value of the final observation; nothing of the next episode flows back over either.
    Steps that are not valid count as if they were not there: their neighbours are each other's successors.

    Args:
        rewards: ``float32[T,B,C]``. Chunk level sums the valid ones of a chunk, undiscounted.
        values: ``float32[T+1,B,K]``, K = 1 at chunk level and C at action level.
        valid: ``bool[T,B,C]``.
        terminated: ``bool[T,B,C]``.
        truncated: ``bool[T,B,C]``; an episode that both terminates and truncates has terminated.
        bootstrap_values: ``float32[T,B,K]``, value of the final observation where truncated; its first column counts.
        gamma: discount per reward step (chunk or action).
        gae_lambda: 0 is the one-step error, 1 the Monte-Carlo return.
        reward_type: whether a reward step is a chunk or an action.
        bootstrap_type: ``none`` treats a truncation as a termination.

    Raises:
        EmbodrlError: the number of values a chunk does not fit ``reward_type``.
    """
    num_steps, num_envs, chunk = rewards.shape
    expected = 1 if reward_type == "chunk_level" else chunk
    if tuple(values.shape) != (num_steps + 1, num_envs, expected):
        raise EmbodrlError(
            f"values of shape {list(values.shape)} do not fit reward_type {reward_type}, "
            f"which takes [{num_steps + 1}, {num_envs}, {expected}]",
            "model.value_head.output is chunk for chunk_level and action for action_level",
        )
    to_steps = _chunk_steps if reward_type == "chunk_level" else _action_steps
    steps = to_steps(rewards, values, valid, terminated, truncated, bootstrap_values)
    if bootstrap_type == "none":
        steps = _RewardSteps(**{**vars(steps), "bootstrap_values": torch.zeros_like(steps.bootstrap_values)})
    advantages = _accumulate(steps, gamma, gae_lambda)
    returns = torch.where(steps.valid, advantages + steps.values, 0.0)

    def per_chunk(x: Tensor) -> Tensor:
        return x.reshape(num_steps, expected, num_envs).transpose(1, 2).contiguous()

    return Advantages(per_chunk(advantages), per_chunk(returns), per_chunk(steps.valid))


def _chunk_steps(
    rewards: Tensor, values: Tensor, valid: Tensor, terminated: Tensor, truncated: Tensor, bootstrap_values: Tensor
) -> _RewardSteps:
    return _RewardSteps(
        rewards=torch.where(valid, rewards, 0.0).sum(-1),
        values=values[:-1, :, 0],
        valid=valid.any(-1),
        terminated=(terminated & valid).any(-1),
        truncated=(truncated & valid).any(-1),
        bootstrap_values=bootstrap_values[..., 0],
        last_value=values[-1, :, 0],
    )


def _action_steps(
    rewards: Tensor, values: Tensor, valid: Tensor, terminated: Tensor, truncated: Tensor, bootstrap_values: Tensor
) -> _RewardSteps:
    def flat(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(-1, x.shape[1])

    return _RewardSteps(
        rewards=flat(rewards),
        values=flat(values[:-1]),
        valid=flat(valid),
        terminated=flat(terminated),
        truncated=flat(truncated),
        bootstrap_values=flat(bootstrap_values[..., :1].expand_as(rewards)),
        last_value=values[-1, :, 0],
    )


def _accumulate(steps: _RewardSteps, gamma: float, gae_lambda: float) -> Tensor:
    """Return the advantages ``[S,B]``, walking back from the last step."""
    done = steps.terminated | steps.truncated
    # Selections, not products with 0: what stands in a masked place may be NaN.
    bootstrap = torch.where(steps.truncated & ~steps.terminated, steps.bootstrap_values, 0.0)
    advantages = torch.zeros_like(steps.values)
    successor_value = steps.last_value
    successor_advantage = torch.zeros_like(steps.last_value)
    for s in reversed(range(len(steps.rewards))):
        next_value = torch.where(done[s], bootstrap[s], successor_value)
        next_advantage = torch.where(done[s], 0.0, successor_advantage)
        delta = steps.rewards[s] + gamma * next_value - steps.values[s]
        advantage = delta + gamma * gae_lambda * next_advantage
        advantages[s] = torch.where(steps.valid[s], advantage, 0.0)
        successor_advantage = torch.where(steps.valid[s], advantage, successor_advantage)
        successor_value = torch.where(steps.valid[s], steps.values[s], successor_value)
    return advantages


def normalize(advantages: Tensor, valid: Tensor, eps: float = 1e-6) -> Tensor:
    """Return the advantages at zero mean and unit (population) variance over the valid entries, 0 elsewhere.

    Args:
        advantages: ``float32[...]``.
        valid: ``bool[...]`` of the same shape.
        eps: added to the standard deviation, so that equal advantages give 0.
    """
    selected = advantages[valid].double()
    result = torch.zeros_like(advantages)
    if selected.numel():
        centred = selected - selected.mean()
        result[valid] = (centred / (centred.square().mean().sqrt() + eps)).to(advantages.dtype)
    return result


def explained_variance(values: Tensor, returns: Tensor, valid: Tensor) -> float:
    """Return ``1 - Var(returns - values) / Var(returns)`` over the valid entries; 0 where the returns do not vary.

    Args:
        values: ``float32[...]``.
        returns: ``float32[...]``.
        valid: ``bool[...]``.
    """
    target = returns[valid].double()
    if target.numel() < 2 or float(target.var()) < 1e-12:
        return 0.0
    return float(1.0 - (target - values[valid].double()).var() / target.var())


def compute_advantages(batch: TrajectoryBatch, config: AlgorithmConfig) -> Advantages:
    """Run the estimator that ``config.adv_type`` names over a rollout, normalised if the config says so."""
    estimate: Advantages = ADVANTAGES.get(config.adv_type)(
        rewards=batch.rewards,
        values=batch.values,
        valid=batch.valid,
        terminated=batch.terminated,
        truncated=batch.truncated,
        bootstrap_values=batch.bootstrap_values,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        reward_type=config.reward_type,
        bootstrap_type=config.bootstrap_type,
    )
    if not config.normalize_advantages:
        return estimate
    return Advantages(normalize(estimate.advantages, estimate.valid), estimate.returns, estimate.valid)
