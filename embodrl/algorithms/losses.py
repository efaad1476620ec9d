"""PPO losses.

Shapes: N chunks, C actions in a chunk, A action dimensions (tokens per action), K values per chunk (1 or C).

Every term is a sum over valid elements divided by a count. With the counts of the whole minibatch, losses and metrics
of its micro-batches add up exactly, however the valid elements are distributed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from embodrl.algorithms.kl import MAX_LOG_RATIO, KlEstimator, bounded_exp, kl_per_token, policy_drift
from embodrl.errors import EmbodrlError

Level = Literal["token_level", "action_level", "chunk_level"]
Surrogate = Literal["ratio", "log_ratio"]


@dataclass(frozen=True)
class LossCounts:
    """Number of valid elements each term averages over (scalar tensors, at least 1).

    ``solved`` counts the tokens of solved episodes; None where no term reads them.
    """

    tokens: Tensor
    policy: Tensor
    entropy: Tensor
    values: Tensor
    solved: Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """A differentiable loss and detached scalars to log.

    Metrics are summed over micro-batches and averaged over updates; names ending in ``_max`` are reduced by maximum.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def is_largest(name: str) -> bool:
    """Whether a metric is reduced by maximum instead of sum (micro-batches) and mean (updates)."""
    return name.endswith("_max")


def count_elements(
    valid: Tensor,
    *,
    action_dim: int,
    logprob_type: Level,
    entropy_type: Level = "token_level",
    num_values: int = 1,
    solved: Tensor | None = None,
) -> LossCounts:
    """Count the elements of each term of a loss.

    Args:
        valid: ``bool[N,C]``.
        action_dim: A.
        logprob_type: level of the ratio.
        entropy_type: level of the entropy.
        num_values: K.
        solved: ``bool[N]``, chunks of solved episodes; None if no term reads them.
    """

    def count(level: Level) -> Tensor:
        mask = valid.any(-1) if level == "chunk_level" else valid
        # At least 1: a minibatch without valid elements has loss 0, not NaN.
        return (mask.sum() * (action_dim if level == "token_level" else 1)).clamp_min(1).float()

    value_level: Level = "action_level" if num_values == valid.shape[1] else "chunk_level"
    counts = LossCounts(count("token_level"), count(logprob_type), count(entropy_type), count(value_level))
    if solved is None:
        return counts
    tokens = (valid & solved.unsqueeze(-1)).sum() * action_dim
    return replace(counts, solved=tokens.clamp_min(1).float())


def reduce_to_level(x: Tensor, valid: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """Sum per-token values ``float32[N,C,A]`` to a level: token, action (over A), or chunk (over the valid C and A).

    Entries of invalid actions are dropped, NaN included. Returns values and mask, both ``[N,C,A]``, ``[N,C,1]`` or
    ``[N,1,1]``.
    """
    mask = valid.unsqueeze(-1)
    x = torch.where(mask, x, 0.0)
    if level == "token_level":
        return x, mask.expand_as(x)
    if level == "action_level":
        return x.sum(-1, keepdim=True), mask
    return x.sum((1, 2), keepdim=True), mask.any(1, keepdim=True)


def element_counts(valid: Tensor, action_dim: int, level: Level) -> Tensor:
    """Return ``int64[...]``, the number of ratios per chunk at a level; ``valid bool[...,C]``."""
    if level == "chunk_level":
        return valid.any(-1).long()
    return valid.sum(-1) * (action_dim if level == "token_level" else 1)


def reduce_to_ratio(log_ratio: Tensor, valid: Tensor, level: Level, length_normalized: bool) -> tuple[Tensor, Tensor]:
    """Return log ratios at a level and their mask; ``log_ratio float32[N,C,A]``, 0 where not valid."""
    at_level, mask = reduce_to_level(log_ratio, valid, level)
    # GSPO, eq. 7: the geometric mean over the tokens instead of the product.
    if length_normalized and level != "token_level":
        length = torch.full_like(at_level, log_ratio.shape[-1])
        if level == "chunk_level":
            length = length * valid.sum(-1).clamp_min(1).view(-1, 1, 1)
        at_level = at_level / length
    return at_level, mask


def _surrogate(
    log_ratio: Tensor, weight: Tensor, kind: Surrogate, low: float, high: float, dual: float | None
) -> tuple[Tensor, Tensor]:
    """Return the clipped surrogate and where a ratio is out of range; all arguments broadcast to ``log_ratio``."""
    ratio = bounded_exp(log_ratio)
    if kind == "ratio":
        value = ratio
        clipped = ratio.clamp(1.0 - low, 1.0 + high)
    else:
        value = log_ratio
        clipped = log_ratio.clamp(math.log(1.0 - low), math.log(1.0 + high))
    # PPO, eq. 7: min(r A, clip(r) A).
    surrogate = torch.minimum(weight * value, weight * clipped)
    if dual is not None:
        # Dual clip, eq. 5: max(min(...), c A) where A < 0.
        floor = weight * (dual if kind == "ratio" else math.log(dual))
        surrogate = torch.where(weight < 0, torch.maximum(surrogate, floor), surrogate)
    return surrogate, (ratio < 1.0 - low) | (ratio > 1.0 + high)


def actor_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    valid: Tensor,
    logprob_type: Level,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_dual: float | None = None,
    length_normalized_ratio: bool = False,
    surrogate: Surrogate = "ratio",
    drift_coef: float = 0.0,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    kl_weights: Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_type: Level = "token_level",
    entropy_bonus: float = 0.0,
    weights: Tensor | None = None,
    prox_logprobs: Tensor | None = None,
    behavior_weights: Tensor | None = None,
    solved: Tensor | None = None,
    positive_coef: float = 0.0,
    counts: LossCounts | None = None,
) -> LossOutput:
    """Clipped surrogate (Schulman et al. 2017, arXiv 1707.06347, eq. 7) with separate clip ranges, and entropy.

    Variants: dual clip (Ye et al. 2020, arXiv 1912.09729, eq. 5); the length-normalised ratio of GSPO (Zheng et al.
    2025, arXiv 2507.18071, eq. 7), the sequence being a chunk, i.e. the policy's answer to one observation; the log
    ratio in place of the ratio and the policy drift of CPGD (Liu et al. 2025, arXiv 2505.12504).

    Args:
        logprobs: ``float32[N,C,A]`` under the current policy.
        old_logprobs: ``float32[N,C,A]`` under the behaviour policy.
        advantages: ``float32[N,K]``.
        valid: ``bool[N,C]``.
        logprob_type: level of the ratio; chunk level needs K = 1.
        clip_ratio_low: lower clip bound of the ratio is 1 - low.
        clip_ratio_high: upper clip bound of the ratio is 1 + high.
        clip_ratio_dual: largest ratio with a negative advantage; None for no bound but that of ``bounded_exp``.
        length_normalized_ratio: use the geometric mean over the tokens as the ratio of an action or chunk.
        surrogate: quantity multiplied by the advantage.
        drift_coef: weight of the KL from the behaviour policy.
        ref_logprobs: ``float32[N,C,A]`` under the reference policy; required if ``kl_coef`` is not 0.
        kl_coef: weight of the KL to the reference.
        kl_estimator: estimator of that KL.
        kl_weights: ``float32[N]``, factors on that KL; None for all 1.
        entropy: ``float32[N,C,A]`` in nats, or None.
        entropy_type: level the entropy is averaged at.
        entropy_bonus: weight of the entropy.
        weights: ``float32[N]``, chunk weights of every term but the entropy, 1 on average over the ratios; None for all
            1.
        prox_logprobs: ``float32[N,C,A]``; if given, ratio and drift are relative to it (decoupled PPO, decoupled.py).
        behavior_weights: ``float32[N,1,1]``, or of the ratios' shape, factors of surrogate and drift; None for all 1.
        solved: ``bool[N]``, chunks of episodes that were solved; required if ``positive_coef`` is not 0.
        positive_coef: weight of the negative log-likelihood of the tokens of solved episodes (VAPO, Yue et al. 2025,
            arXiv 2504.05118, sec. 4.3).
        counts: counts of the whole minibatch; None if this batch is the minibatch.

    Returns:
        loss, and ``policy_loss`` (with the drift), ``approx_kl`` (per token; k3), ``ratio_mean`` (both with the
            behaviour weights), ``clip_fraction`` (out of range); if requested ``entropy``, ``drift``, ``ref_kl``,
            ``positive_nll``.

    Raises:
        EmbodrlError: advantages or behaviour weights are finer than the ratio, a KL lacks reference log-probs, or the
            likelihood of solved episodes their mask.
    """
    check_levels(logprob_type, advantages)
    counts = counts or count_elements(
        valid, action_dim=logprobs.shape[2], logprob_type=logprob_type, entropy_type=entropy_type, solved=solved
    )
    before = old_logprobs if prox_logprobs is None else prox_logprobs
    token_log_ratio = torch.where(valid.unsqueeze(-1), logprobs - before, 0.0)
    log_ratio, mask = reduce_to_ratio(token_log_ratio, valid, logprob_type, length_normalized_ratio)
    clips = (clip_ratio_low, clip_ratio_high, clip_ratio_dual)
    objective, outside = _surrogate(log_ratio, advantages.unsqueeze(-1), surrogate, *clips)
    factors = (behavior_weights, weights)
    loss, extra = _policy_loss(objective, log_ratio, mask, factors, drift_coef, counts.policy)
    extra["policy_loss"] = loss
    if kl_coef:
        to_reference = _reference_kl(logprobs, ref_logprobs, valid, kl_estimator)
        if kl_weights is not None:
            to_reference = to_reference * kl_weights.view(-1, 1, 1)
        extra["ref_kl"] = total(to_reference, weights) / counts.tokens
        # The penalty of GRPO's objective (DeepSeekMath, eq. 3), per token.
        loss = loss + kl_coef * extra["ref_kl"]
    if positive_coef:
        extra["positive_nll"] = _likelihood_loss(logprobs, valid, solved, counts)
        loss = loss + positive_coef * extra["positive_nll"]
    if entropy is not None:
        extra["entropy"] = reduce_to_level(entropy, valid, entropy_type)[0].sum() / counts.entropy
        loss = loss - entropy_bonus * extra["entropy"]
    ratios = _ratio_metrics(token_log_ratio, log_ratio, mask, outside, behavior_weights, counts)
    return LossOutput(loss, {name: value.detach() for name, value in (extra | ratios).items()})


def check_levels(logprob_type: Level, advantages: Tensor) -> None:
    """Raise EmbodrlError if advantages are finer than the ratio."""
    if logprob_type == "chunk_level" and advantages.shape[1] != 1:
        raise EmbodrlError(
            "a ratio per chunk can't be weighted by an advantage per action",
            "set algorithm.reward_type to chunk_level or algorithm.logprob_type to action_level",
            code="loss-shapes",
        )


def _policy_loss(
    objective: Tensor,
    log_ratio: Tensor,
    mask: Tensor,
    factors: tuple[Tensor | None, Tensor | None],
    drift_coef: float,
    num_ratios: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss including the drift, and the drift alone if it has a weight.

    ``factors`` are the behaviour weights of ratios and the weights of chunks. Elements with weight 0 still count.
    """
    behavior, of_chunks = factors
    if behavior is not None and behavior.shape not in (mask.shape, (len(mask), 1, 1)):
        raise EmbodrlError(
            f"behaviour weights {list(behavior.shape)} do not fit ratios {list(mask.shape)}",
            "set algorithm.decoupled.level to chunk or episode, or algorithm.logprob_type to token_level",
            code="loss-shapes",
        )

    def mean(x: Tensor) -> Tensor:
        return total(torch.where(mask, x if behavior is None else behavior * x, 0.0), of_chunks) / num_ratios

    # Maximise the surrogate.
    loss = -mean(objective)
    if not drift_coef:
        return loss, {}
    drift = mean(policy_drift(log_ratio))
    return loss + drift_coef * drift, {"drift": drift}


def total(x: Tensor, weights: Tensor | None) -> Tensor:
    """Sum ``[N,...,...]``, weighted per chunk if weights are given."""
    return (x if weights is None else x * weights.view(-1, 1, 1)).sum()


def _ratio_metrics(
    token_log_ratio: Tensor,
    log_ratio: Tensor,
    mask: Tensor,
    outside: Tensor,
    behavior_weights: Tensor | None,
    counts: LossCounts,
) -> dict[str, Tensor]:
    with torch.no_grad():
        # expm1 keeps the estimator non-negative where the ratio is close to 1.
        bounded = token_log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # k3 of the old policy's samples: r - 1 - log r.
        kl = bounded.expm1() - bounded
        ratio = bounded_exp(log_ratio)
        if behavior_weights is not None:
            # Both are means under the proximal policy over tokens drawn by another policy: tokens unlikely under that
            # one have unbounded ratios.
            kl = behavior_weights * kl
            ratio = behavior_weights * ratio
        return {
            "approx_kl": kl.sum() / counts.tokens,
            "clip_fraction": (outside & mask).sum() / counts.policy,
            "ratio_mean": torch.where(mask, ratio, 0.0).sum() / counts.policy,
        }


def _likelihood_loss(logprobs: Tensor, valid: Tensor, solved: Tensor | None, counts: LossCounts) -> Tensor:
    """Return the mean negative log-probability of the tokens of solved episodes."""
    if solved is None or counts.solved is None:
        raise EmbodrlError(
            "the likelihood of solved episodes needs to know which they are",
            "set algorithm.positive_coef=0, or let the environment report success",
            code="success-unknown",
        )
    mask = (valid & solved.unsqueeze(-1)).unsqueeze(-1)
    return -torch.where(mask, logprobs, 0.0).sum() / counts.solved


def _reference_kl(logprobs: Tensor, ref_logprobs: Tensor | None, valid: Tensor, estimator: KlEstimator) -> Tensor:
    """Return ``float32[N,C,A]``, 0 where not valid."""
    if ref_logprobs is None:
        raise EmbodrlError(
            "a KL to the reference needs its log-probs", "pass ref_logprobs, or kl_coef=0", code="reference-missing"
        )
    mask = valid.unsqueeze(-1)
    # Select before and after: a masked entry must produce neither NaN nor a NaN gradient.
    present = torch.where(mask, logprobs, 0.0)
    reference = torch.where(mask, ref_logprobs, 0.0)
    return kl_per_token(present, reference, estimator)


def value_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    valid: Tensor,
    value_clip: float | None,
    huber_delta: float | None = None,
    counts: LossCounts | None = None,
) -> LossOutput:
    """Half the squared error (Schulman et al. 2017, eq. 9), with the change of the value clipped as in OpenAI's code.

    Beyond ``huber_delta`` the error is linear (Huber 1964): ``delta * (|e| - delta / 2)``.

    Args:
        values: ``float32[N,K]``, current values.
        old_values: ``float32[N,K]``, values of the rollout.
        returns: ``float32[N,K]``.
        valid: ``bool[N,C]``.
        value_clip: largest change that lowers the loss; None for no clip.
        huber_delta: largest error in the quadratic range; None for quadratic everywhere.
        counts: counts of the whole minibatch; None if this batch is the minibatch.

    Returns:
        loss, ``value_loss`` and ``value_clip_fraction``.
    """
    mask = valid if values.shape[1] == valid.shape[1] else valid.any(-1, keepdim=True)
    count = mask.sum().clamp_min(1).float() if counts is None else counts.values
    error = _squared(torch.where(mask, values - returns, 0.0), huber_delta)
    clipped_fraction = torch.zeros((), device=values.device)
    if value_clip is not None:
        change = torch.where(mask, values - old_values, 0.0)
        old_error = torch.where(mask, old_values - returns, 0.0)
        # V_clip - R, with V_clip = V_old + clip(V - V_old).
        clipped_error = _squared(old_error + change.clamp(-value_clip, value_clip), huber_delta)
        error = torch.maximum(error, clipped_error)
        clipped_fraction = (change.detach().abs() > value_clip).sum() / count
    # Half the squared error: both terms of the maximum are squares.
    loss = 0.5 * error.sum() / count
    return LossOutput(loss, {"value_loss": loss.detach(), "value_clip_fraction": clipped_fraction})


def _squared(error: Tensor, huber_delta: float | None) -> Tensor:
    """Return the square, or twice Huber's loss, which equals the square up to ``huber_delta``."""
    if huber_delta is None:
        return error.square()
    size = error.abs()
    return torch.where(size <= huber_delta, error.square(), huber_delta * (2 * size - huber_delta))


def actor_critic_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    valid: Tensor,
    value_clip: float | None,
    value_loss_coef: float,
    huber_delta: float | None = None,
    counts: LossCounts | None = None,
    **actor: Any,
) -> LossOutput:
    """``actor_loss`` plus ``value_loss_coef`` times ``value_loss`` (Schulman et al. 2017, eq. 9).

    Arguments, metrics and errors are those of the two parts.
    """
    policy = actor_loss(valid=valid, counts=counts, **actor)
    critic = value_loss(
        values=values,
        old_values=old_values,
        returns=returns,
        valid=valid,
        value_clip=value_clip,
        huber_delta=huber_delta,
        counts=counts,
    )
    return LossOutput(policy.loss + value_loss_coef * critic.loss, policy.metrics | critic.metrics)
