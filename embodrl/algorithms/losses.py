"""PPO losses.

Legend: N chunks, C actions in a chunk, A action dimensions (tokens an action), K values a chunk (1 or C).

Every term is a sum over valid elements divided by a count. Pass the counts of a whole minibatch, and the losses and
metrics of its micro-batches add up to those of the minibatch, however the valid elements are spread over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodrl.errors import EmbodrlError

Level = Literal["token_level", "action_level", "chunk_level"]


@dataclass(frozen=True)
class LossCounts:
    """How many valid elements each term averages over (scalar tensors, at least 1)."""

    tokens: Tensor
    policy: Tensor
    entropy: Tensor
    values: Tensor


@dataclass(frozen=True)
class LossOutput:
    """A loss with its gradient, and detached scalars to log."""

    loss: Tensor
    metrics: dict[str, Tensor]


def count_elements(
    valid: Tensor, *, action_dim: int, logprob_type: Level, entropy_type: Level = "token_level", num_values: int = 1
) -> LossCounts:
    """Count the elements of each term of a loss.

    Args:
        valid: ``bool[N,C]``.
        action_dim: A.
        logprob_type: level of the ratio.
        entropy_type: level of the entropy.
        num_values: K.
    """

    def count(level: Level) -> Tensor:
        mask = valid.any(-1) if level == "chunk_level" else valid
        return (mask.sum() * (action_dim if level == "token_level" else 1)).clamp_min(1).float()

    value_level: Level = "action_level" if num_values == valid.shape[1] else "chunk_level"
    return LossCounts(count("token_level"), count(logprob_type), count(entropy_type), count(value_level))


def reduce_to_level(x: Tensor, valid: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """Sum per-token numbers to a level.

    Args:
        x: ``float32[N,C,A]``, e.g. log-probs; what stands in invalid actions is dropped, NaN included.
        valid: ``bool[N,C]``.
        level: token keeps, action sums over A, chunk sums over the valid C and A.

    Returns:
        the numbers and their mask, both ``[N,C,A]``, ``[N,C,1]`` or ``[N,1,1]``.
    """
    mask = valid.unsqueeze(-1)
    x = torch.where(mask, x, 0.0)
    if level == "token_level":
        return x, mask.expand_as(x)
    if level == "action_level":
        return x.sum(-1, keepdim=True), mask
    return x.sum((1, 2), keepdim=True), mask.any(1, keepdim=True)


def actor_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    valid: Tensor,
    logprob_type: Level,
    clip_ratio_low: float,
    clip_ratio_high: float,
    entropy: Tensor | None = None,
    entropy_type: Level = "token_level",
    entropy_bonus: float = 0.0,
    counts: LossCounts | None = None,
) -> LossOutput:
    """The clipped surrogate (Schulman et al. 2017, arXiv 1707.06347, eq. 7), with one clip range a side, and entropy.

    Args:
        logprobs: ``float32[N,C,A]`` under the present policy.
        old_logprobs: ``float32[N,C,A]`` under the policy that acted.
        advantages: ``float32[N,K]``.
        valid: ``bool[N,C]``.
        logprob_type: level of the ratio; chunk level needs K = 1.
        clip_ratio_low: the ratio is clipped from below to 1 - low.
        clip_ratio_high: and from above to 1 + high.
        entropy: ``float32[N,C,A]`` in nats, or None.
        entropy_type: level at which the entropy is averaged.
        entropy_bonus: weight of the entropy.
        counts: of the whole minibatch; None takes this batch for the minibatch.

    Returns:
        the loss, and ``policy_loss``, ``approx_kl`` (per token; the k3 estimator of
        http://joschu.net/blog/kl-approx.html), ``clip_fraction`` (part of the ratios outside the range), ``ratio_mean``
        and, given an entropy, ``entropy``.

    Raises:
        EmbodrlError: ``logprob_type`` is chunk level and the advantages are per action.
    """
    num_actions, action_dim = logprobs.shape[1:]
    if logprob_type == "chunk_level" and advantages.shape[1] != 1:
        raise EmbodrlError(
            "a ratio per chunk can't be weighted by an advantage per action",
            "set algorithm.reward_type to chunk_level or algorithm.logprob_type to action_level",
        )
    if counts is None:
        counts = count_elements(
            valid,
            action_dim=action_dim,
            logprob_type=logprob_type,
            entropy_type=entropy_type,
            num_values=1 if advantages.shape[1] == 1 else num_actions,
        )
    token_log_ratio = torch.where(valid.unsqueeze(-1), logprobs - old_logprobs, 0.0)
    log_ratio, mask = reduce_to_level(token_log_ratio, valid, logprob_type)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    weight = advantages.unsqueeze(-1)
    surrogate = torch.where(mask, torch.minimum(weight * ratio, weight * clipped), 0.0)
    policy_loss = -surrogate.sum() / counts.policy
    with torch.no_grad():
        outside = (ratio < 1.0 - clip_ratio_low) | (ratio > 1.0 + clip_ratio_high)
        # expm1 keeps the estimator non-negative where the ratio is close to 1.
        kl = token_log_ratio.expm1() - token_log_ratio
        metrics = {
            "policy_loss": policy_loss.detach(),
            "approx_kl": kl.sum() / counts.tokens,
            "clip_fraction": (outside & mask).sum() / counts.policy,
            "ratio_mean": torch.where(mask, ratio, 0.0).sum() / counts.policy,
        }
    loss = policy_loss
    if entropy is not None:
        at_level, _ = reduce_to_level(entropy, valid, entropy_type)
        mean_entropy = at_level.sum() / counts.entropy
        metrics["entropy"] = mean_entropy.detach()
        loss = loss - entropy_bonus * mean_entropy
    return LossOutput(loss, metrics)


def value_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    valid: Tensor,
    value_clip: float | None,
    counts: LossCounts | None = None,
) -> LossOutput:
    """Half the squared error (Schulman et al. 2017, eq. 9), with the change of the value clipped as in OpenAI's code.

    Args:
        values: ``float32[N,K]``, the present ones.
        old_values: ``float32[N,K]``, those of the rollout.
        returns: ``float32[N,K]``.
        valid: ``bool[N,C]``.
        value_clip: largest change that lowers the loss; None for no clip.
        counts: of the whole minibatch; None takes this batch for the minibatch.

    Returns:
        the loss, and ``value_loss`` and ``value_clip_fraction``.
    """
    mask = valid if values.shape[1] == valid.shape[1] else valid.any(-1, keepdim=True)
    count = mask.sum().clamp_min(1).float() if counts is None else counts.values
    error = torch.where(mask, values - returns, 0.0).square()
    clipped_fraction = torch.zeros((), device=values.device)
    if value_clip is not None:
        change = torch.where(mask, values - old_values, 0.0)
        old_error = torch.where(mask, old_values - returns, 0.0)
        error = torch.maximum(error, (old_error + change.clamp(-value_clip, value_clip)).square())
        clipped_fraction = (change.detach().abs() > value_clip).sum() / count
    loss = 0.5 * error.sum() / count
    return LossOutput(loss, {"value_loss": loss.detach(), "value_clip_fraction": clipped_fraction})


def actor_critic_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    valid: Tensor,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    logprob_type: Level,
    clip_ratio_low: float,
    clip_ratio_high: float,
    value_clip: float | None,
    value_loss_coef: float,
    entropy: Tensor | None = None,
    entropy_type: Level = "token_level",
    entropy_bonus: float = 0.0,
    counts: LossCounts | None = None,
) -> LossOutput:
    """``actor_loss`` plus ``value_loss_coef`` times ``value_loss`` (Schulman et al. 2017, eq. 9).

    Args and metrics are those of the two parts.

    Raises:
        EmbodrlError: ``logprob_type`` is chunk level and the advantages are per action.
    """
    actor = actor_loss(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        valid=valid,
        logprob_type=logprob_type,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        entropy=entropy,
        entropy_type=entropy_type,
        entropy_bonus=entropy_bonus,
        counts=counts,
    )
    critic = value_loss(
        values=values, old_values=old_values, returns=returns, valid=valid, value_clip=value_clip, counts=counts
    )
    return LossOutput(actor.loss + value_loss_coef * critic.loss, actor.metrics | critic.metrics)
