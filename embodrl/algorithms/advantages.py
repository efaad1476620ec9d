"""Advantages and returns of a rollout.

Shapes: T policy steps (chunks), B environments, C actions in a chunk, K values per chunk (1 or C), S reward steps (T at
chunk level, T*C at action level).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor

from embodrl.algorithms.episodes import split_episodes
from embodrl.algorithms.kl import kl_per_token
from embodrl.algorithms.totals import WHOLE, Totals
from embodrl.config.schema import AlgorithmConfig
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import EmbodrlError
from embodrl.names import call_named
from embodrl.specs import ADVANTAGES

RewardType = Literal["chunk_level", "action_level"]
BootstrapType = Literal["truncation", "none"]

ROUNDING = 8 * torch.finfo(torch.float32).eps
"""Relative rounding error of float32 rewards, which pass through a handful of roundings before they get here."""


@dataclass(frozen=True)
class Advantages:
    """Output of an advantage estimator.

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
    """A rollout as a sequence of reward steps, float64; each tensor is ``[S,B]``, ``last_value`` is ``[B]``."""

    rewards: Tensor
    values: Tensor
    valid: Tensor
    terminated: Tensor
    truncated: Tensor
    lost: Tensor
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
    critic_lambda: float | None = None,
    lambda_length_alpha: float | None = None,
    reward_type: RewardType = "chunk_level",
    bootstrap_type: BootstrapType = "truncation",
) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 11, 12 and 16).

    ``delta_s = r_s + gamma * V(s+1) - V(s)`` and ``A_s = delta_s + gamma * lambda * A_(s+1)``. V(s+1) is 0 at a
    termination and the value of the final observation at a truncation; nothing of the next episode flows back over
    either. Invalid steps are skipped: their neighbours become consecutive. An invalid step that ends an episode was
    lost to a simulator fault: the step before it bootstraps from its value (the value of what the policy saw there).

    Args:
        rewards: ``float32[T,B,C]``. Chunk level sums the valid rewards of a chunk, undiscounted.
        values: ``float32[T+1,B,K]``, K = 1 at chunk level and C at action level.
        valid: ``bool[T,B,C]``.
        terminated: ``bool[T,B,C]``.
        truncated: ``bool[T,B,C]``; an episode that both terminates and truncates counts as terminated.
        bootstrap_values: ``float32[T,B,K]``, value of the final observation where truncated; only the first column is
            used.
        gamma: discount per reward step (chunk or action).
        gae_lambda: 0 is the one-step error, 1 the Monte-Carlo return.
        critic_lambda: lambda of the returns; None for that of the advantages (VAPO, Yue et al. 2025, arXiv 2504.05118,
            sec. 4.1: decoupled GAE).
        lambda_length_alpha: lambda of the advantages is ``1 - 1 / (alpha * length)``, at least 0, with the reward steps
            of the episode as length, in place of ``gae_lambda``; None for ``gae_lambda`` (VAPO, eq. 8).
        reward_type: whether a reward step is a chunk or an action.
        bootstrap_type: ``none`` treats a truncation as a termination.

    Raises:
        EmbodrlError: the number of values per chunk does not match ``reward_type``.
    """
    num_steps, num_envs, chunk = rewards.shape
    expected = 1 if reward_type == "chunk_level" else chunk
    if tuple(values.shape) != (num_steps + 1, num_envs, expected):
        raise EmbodrlError(
            f"values of shape {list(values.shape)} do not fit reward_type {reward_type}, "
            f"which takes [{num_steps + 1}, {num_envs}, {expected}]",
            "model.value_head.output is chunk for chunk_level and action for action_level",
            code="values-shape",
        )
    to_steps = _chunk_steps if reward_type == "chunk_level" else _action_steps
    steps = to_steps(rewards, values, valid, terminated, truncated, bootstrap_values)
    if bootstrap_type == "none":
        # V(s+1) is then 0 at a truncation, as at a termination.
        steps = _RewardSteps(**{**vars(steps), "bootstrap_values": torch.zeros_like(steps.bootstrap_values)})
    own = torch.full_like(steps.rewards, gae_lambda)
    advantages = _accumulate(
        steps, gamma, own if lambda_length_alpha is None else _by_length(steps, lambda_length_alpha)
    )
    # The critic's target is the lambda-return, A + V.
    critic = own if critic_lambda is None else torch.full_like(own, critic_lambda)
    same = critic_lambda is None and lambda_length_alpha is None
    targets = advantages if same else _accumulate(steps, gamma, critic)
    returns = torch.where(steps.valid, targets + steps.values, 0.0)

    shape = (num_steps, num_envs, expected)
    return Advantages(*(from_reward_steps(x, shape) for x in (advantages.float(), returns.float(), steps.valid)))


def to_reward_steps(rewards: Tensor, valid: Tensor, reward_type: RewardType) -> tuple[Tensor, Tensor]:
    """Return rewards ``float64[S,B]`` (0 where not valid) and valid ``bool[S,B]`` from inputs ``[T,B,C]``."""
    # float64: equal returns earned in different steps stay equal.
    # A selection, not a product: an invalid entry may be NaN.
    rewards = torch.where(valid, rewards.double(), 0.0)
    if reward_type == "chunk_level":
        return rewards.sum(-1), valid.any(-1)
    return rewards.transpose(1, 2).flatten(0, 1), valid.transpose(1, 2).flatten(0, 1)


def from_reward_steps(x: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Reshape ``[S,B]`` to ``[T,B,K]``."""
    num_steps, num_envs, num_values = shape
    return x.reshape(num_steps, num_values, num_envs).transpose(1, 2).contiguous()


def _chunk_steps(
    rewards: Tensor, values: Tensor, valid: Tensor, terminated: Tensor, truncated: Tensor, bootstrap_values: Tensor
) -> _RewardSteps:
    return _RewardSteps(
        rewards=torch.where(valid, rewards.double(), 0.0).sum(-1),
        values=values[:-1, :, 0].double(),
        valid=valid.any(-1),
        terminated=(terminated & valid).any(-1),
        truncated=(truncated & valid).any(-1),
        lost=(terminated | truncated).any(-1) & ~valid.any(-1),
        bootstrap_values=bootstrap_values[..., 0].double(),
        last_value=values[-1, :, 0].double(),
    )


def _action_steps(
    rewards: Tensor, values: Tensor, valid: Tensor, terminated: Tensor, truncated: Tensor, bootstrap_values: Tensor
) -> _RewardSteps:
    def flat(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(-1, x.shape[1])

    return _RewardSteps(
        rewards=flat(rewards.double()),
        values=flat(values[:-1].double()),
        valid=flat(valid),
        terminated=flat(terminated),
        truncated=flat(truncated),
        lost=flat((terminated | truncated) & ~valid.any(-1, keepdim=True)),
        bootstrap_values=flat(bootstrap_values[..., :1].double().expand_as(rewards)),
        last_value=values[-1, :, 0].double(),
    )


def _by_length(steps: _RewardSteps, alpha: float) -> Tensor:
    """Return ``1 - 1 / (alpha * length)`` of the episode of every step, at least 0, ``float64[S,B]``."""
    ended = (steps.truncated | steps.lost).unsqueeze(-1)
    episodes = split_episodes(steps.valid.unsqueeze(-1), steps.terminated.unsqueeze(-1), ended)
    played = episodes.index[steps.valid]
    length = torch.zeros(len(episodes), dtype=torch.float64, device=played.device)
    length.index_add_(0, played, torch.ones_like(played, dtype=torch.float64))
    result = torch.zeros_like(steps.rewards)
    result[steps.valid] = (1.0 - 1.0 / (alpha * length)).clamp_min(0.0)[played]
    return result


def _accumulate(steps: _RewardSteps, gamma: float, gae_lambda: Tensor) -> Tensor:
    """Return the advantages ``[S,B]``, computed backwards from the last step; ``gae_lambda`` is ``[S,B]``."""
    done = steps.terminated | steps.truncated
    # Selections, not products with 0: masked entries may be NaN.
    bootstrap = torch.where(steps.truncated & ~steps.terminated, steps.bootstrap_values, 0.0)
    advantages = torch.zeros_like(steps.values)
    successor_value = steps.last_value
    successor_advantage = torch.zeros_like(steps.last_value)
    for s in reversed(range(len(steps.rewards))):
        next_value = torch.where(done[s], bootstrap[s], successor_value)
        next_advantage = torch.where(done[s], 0.0, successor_advantage)
        # One-step error, followed by the recursion of eq. 16.
        delta = steps.rewards[s] + gamma * next_value - steps.values[s]
        advantage = delta + gamma * gae_lambda[s] * next_advantage
        advantages[s] = torch.where(steps.valid[s], advantage, 0.0)
        # An invalid step passes on its successor's advantage, unless a fault ended the episode there.
        successor_advantage = torch.where(
            steps.valid[s], advantage, torch.where(steps.lost[s], 0.0, successor_advantage)
        )
        # Keep the value of a lost step: the step before bootstraps from it.
        successor_value = torch.where(steps.valid[s] | steps.lost[s], steps.values[s], successor_value)
    return advantages


def divisor(deviation: Tensor, size: Tensor) -> Tensor:
    """Return the deviation, or infinity where it is within the rounding error of the inputs, so that dividing gives 0.

    Both arguments are ``float64[...]``; ``size`` is the largest magnitude of the float32 inputs.
    """
    return torch.where(deviation > ROUNDING * size, deviation, torch.inf)


def normalize(
    advantages: Tensor,
    valid: Tensor,
    weights: Tensor | None = None,
    returns: Tensor | None = None,
    totals: Totals = WHOLE,
) -> Tensor:
    """Normalise advantages to zero mean and unit (population) variance over the valid entries; 0 elsewhere.

    Advantages that differ only by float32 rounding give 0 at any scale.

    Args:
        advantages: ``float32[...]``.
        valid: ``bool[...]`` of the same shape.
        weights: ``[...]`` of the same shape, how often each entry counts; None for once. A loss that averages over
            actions sees the advantage of a chunk once per valid action.
        returns: ``float32[...]`` of the same shape, the returns the advantages were computed from, which set the
            rounding error; None for the advantages themselves.
        totals: sums over the other parts of the rollout, too.
    """
    # float64: sums over a whole rollout lose no precision.
    selected = advantages[valid].double()
    result = torch.zeros_like(advantages)
    share = torch.ones_like(selected) if weights is None else weights[valid].double()
    total = totals.sum(share.sum())
    if total:
        share = share / total
        centred = selected - totals.sum((share * selected).sum())
        deviation = totals.sum((share * centred.square()).sum()).sqrt()
        size = _largest(selected)
        if returns is not None:
            size = torch.maximum(size, _largest(returns[valid].double()))
        result[valid] = (centred / divisor(deviation, totals.max(size))).to(advantages.dtype)
    return result


def _largest(values: Tensor) -> Tensor:
    return values.abs().max() if values.numel() else values.new_zeros(())


def normalize_by_group(batch: TrajectoryBatch, estimate: Advantages, min_std: float = 0.0) -> Tensor:
    """Normalise advantages ``float32[T,B,K]`` to zero mean and unit (population) variance within each group.

    A group whose advantages differ only by the float32 rounding of its returns gets 0 at any scale. Every episode of a
    group has equal weight, whatever its length. With ``grpo`` this divides by the standard deviation of the group's
    returns (DeepSeekMath, arXiv 2402.03300, sec. 4.1.2).

    Args:
        batch: rollout, defining episodes and groups.
        estimate: advantages of the rollout.
        min_std: floor of the deviation. With shaped rewards, the returns of a group in which every episode failed
            hardly differ and would otherwise be scaled up to the size of a success.
    """
    episodes = split_episodes(batch.valid, batch.terminated, batch.truncated)
    result = torch.zeros_like(estimate.advantages)
    if not len(episodes):
        return result
    group_of = episodes.groups(group_ids(batch))
    index = episodes.index.unsqueeze(-1).expand_as(estimate.valid)[estimate.valid]
    x = estimate.advantages[estimate.valid].double()

    def sums(values: Tensor, where: Tensor, size: int) -> Tensor:
        return values.new_zeros(size).index_add_(0, where, values)

    # Weight 1 / length: the steps of an episode count as one.
    share = 1.0 / sums(torch.ones_like(x), index, len(episodes)).clamp_min(1)[index]
    group = group_of[index]
    num_groups = int(group_of.max()) + 1
    # Weights sum to 1 per group, so that the sums below are its mean and variance.
    weight = share / sums(share, group, num_groups).clamp_min(1e-12)[group]
    centred = x - sums(weight * x, group, num_groups)[group]
    deviation = sums(weight * centred.square(), group, num_groups).sqrt()
    # Advantages are differences of returns: their own magnitude does not bound their rounding error.
    magnitude = torch.maximum(x.abs(), estimate.returns[estimate.valid].double().abs())
    size = torch.zeros_like(deviation).scatter_reduce_(0, group, magnitude, "amax")
    result[estimate.valid] = (centred / divisor(deviation, size).clamp_min(min_std)[group]).to(result.dtype)
    return result


def group_ids(batch: TrajectoryBatch) -> Tensor:
    """Return ``int64[T,B]``; without group ids in the batch, every environment is its own group."""
    if batch.group_id is not None:
        return batch.group_id
    num_steps, num_envs = batch.task_id.shape
    return torch.arange(num_envs, device=batch.task_id.device).expand(num_steps, num_envs)


def explained_variance(values: Tensor, returns: Tensor, valid: Tensor, totals: Totals = WHOLE) -> float:
    """Return ``1 - Var(returns - values) / Var(returns)`` over valid entries; 0 if the returns are constant.

    ``totals`` sums over the other parts of the rollout, too.
    """
    target = returns[valid].double()
    count = totals.sum(torch.tensor(float(target.numel()), dtype=torch.float64))

    def variance(x: Tensor) -> Tensor:
        mean = totals.sum(x.sum()) / count
        return totals.sum((x - mean).square().sum()) / (count - 1)

    size = totals.max(_largest(target))
    if count < 2 or not bool(divisor((of_returns := variance(target)).sqrt(), size).isfinite()):
        return 0.0
    return float(1.0 - variance(target - values[valid].double()) / of_returns)


def kl_weights(batch: TrajectoryBatch, config: AlgorithmConfig, tasks: Sequence[str]) -> Tensor:
    """Return the factor of each chunk's task on ``kl.coef``, ``float32[T,B]``; ``tasks`` are named by ``task_id``."""
    own = {each.task: each.kl_weight for each in config.by_task}
    return torch.tensor([own.get(task, 1.0) for task in tasks])[batch.task_id]


def penalized_rewards(batch: TrajectoryBatch, config: AlgorithmConfig, weights: Tensor | None = None) -> Tensor:
    """Return rewards ``float32[T,B,C]`` less ``kl.coef`` times the KL of each action if ``kl.placement`` is ``reward``.

    The KL is between the acting policy and the reference, summed over the tokens of the action; tokens that stand for a
    whole chunk count with its first action. ``weights`` come from ``kl_weights``. Raises EmbodrlError without
    log-probs of the reference.
    """
    if not config.kl.coef or config.kl.placement != "reward":
        return batch.rewards
    if batch.ref_logprobs is None:
        raise EmbodrlError(
            "a KL in the reward needs the log-probs of the reference",
            "set algorithm.kl.placement=loss",
            code="reference-missing",
        )
    kl = kl_per_token(batch.logprobs, batch.ref_logprobs, config.kl.estimator).sum(-1)
    if batch.token_mask is not None:
        whole = torch.where(batch.drawn, kl, 0.0).sum(-1, keepdim=True)
        kl = torch.cat([whole, torch.zeros_like(batch.rewards[..., 1:])], -1)
    if weights is not None:
        kl = kl * weights.unsqueeze(-1)
    return torch.where(batch.valid, batch.rewards - config.kl.coef * kl, batch.rewards)


def compute_advantages(batch: TrajectoryBatch, config: AlgorithmConfig, totals: Totals = WHOLE) -> Advantages:
    """Return the advantages of a rollout, of whatever tasks, by the estimator ``algorithm.adv_type``.

    ``totals`` normalises over the other parts of the rollout, too. Raises EmbodrlError if the estimator returns the
    wrong type or shape, or non-finite values.
    """
    return estimate(batch.replace(rewards=penalized_rewards(batch, config)), config, totals)


def estimate(batch: TrajectoryBatch, config: AlgorithmConfig, totals: Totals = WHOLE) -> Advantages:
    """Return the advantages of the rewards as they are, without a KL; errors as ``compute_advantages``."""
    arguments: dict[str, Any] = {
        "rewards": batch.rewards,
        "values": batch.values,
        "valid": batch.valid,
        "terminated": batch.terminated,
        "truncated": batch.truncated,
        "bootstrap_values": batch.bootstrap_values,
        "success": batch.success,
        "task_id": batch.task_id,
        "group_id": group_ids(batch),
    } | config.arguments_of("estimator")
    found = _checked(call_named(ADVANTAGES.get(config.adv_type), arguments), batch, config.adv_type)
    if not config.normalize_advantages:
        return found
    if config.normalization_scope == "group":
        return replace(found, advantages=normalize_by_group(batch, found, config.min_group_std))
    weights = None
    # The loss sees a chunk's advantage once per valid action, so the mean must too.
    by_action = config.loss_agg == "token_mean" and config.logprob_type != "chunk_level"
    if by_action and found.advantages.shape[-1] == 1:
        weights = batch.valid.sum(-1, keepdim=True)
    return replace(found, advantages=normalize(found.advantages, found.valid, weights, found.returns, totals))


def _checked(estimate: object, batch: TrajectoryBatch, name: str) -> Advantages:
    """Validate the output of an estimator, which may be custom."""
    if not isinstance(estimate, Advantages):
        raise EmbodrlError(
            f"adv_type '{name}' returned {type(estimate).__name__}",
            "return embodrl.Advantages(advantages, returns, valid)",
            code="advantage-result",
        )
    num_steps, num_envs, chunk = batch.rewards.shape
    shapes = [(num_steps, num_envs, 1), (num_steps, num_envs, chunk)]
    for field, tensor in cast(dict[str, Tensor], vars(estimate)).items():
        if tuple(tensor.shape) not in shapes or tensor.shape != estimate.valid.shape:
            raise EmbodrlError(
                f"adv_type '{name}' returned {field} of shape {list(tensor.shape)}",
                f"return {list(shapes[0])}, a value per chunk, or {list(shapes[1])}, a value per action",
                code="advantage-result",
            )
    for field, tensor in (("advantages", estimate.advantages), ("returns", estimate.returns)):
        if not bool(tensor[estimate.valid].isfinite().all()):
            raise EmbodrlError(
                f"adv_type '{name}' returned {field} that are not finite",
                "look for divisions by zero in the estimator, and for rewards and values that are not finite",
                code="advantage-result",
            )
    return estimate


def zero(valid: Tensor) -> Advantages:
    """Return advantages and returns of 0, ``float32[T,B,1]``, for losses that learn from another term."""
    simulated = valid.any(-1, keepdim=True)
    nothing = torch.zeros(simulated.shape)
    return Advantages(nothing, nothing, simulated)


def no_advantages(rewards: Tensor) -> NoReturn:
    """Raise EmbodrlError: off-policy losses get values from their own critics and have no advantage node."""
    raise EmbodrlError(
        "algorithm.adv_type is none: there are no advantages",
        "leave the node 'advantage' out of the pipeline, or choose an estimator",
        code="advantages-none",
    )
