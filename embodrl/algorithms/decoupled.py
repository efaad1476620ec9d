"""Decoupled PPO: clip the policy against a recent one, whichever policy acted.

Hilton et al. 2021, arXiv 2110.00641, eq. 4, and AReaL, arXiv 2505.24298, sec. 5.2. With the behaviour policy b, the
proximal policy prox (the weights at the start of the update) and the current policy theta, the loss is ``sum(w *
surrogate(u, A)) / N`` with ``u = exp(logp_theta - logp_prox)`` and ``w = exp(logp_prox - logp_b)``.

``algorithm.recompute_logprobs`` uses the same weights for another reason: the weights that acted are current, but
another engine or precision computed their log-probs. There w is capped at ``algorithm.engine_weight_cap``: truncated
importance sampling (Ionides 2008; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training", eq. of TIS, whose C is 2 in verl's examples).

Shapes: T policy steps (chunks), B environments, N chunks, C actions in a chunk, A action dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodrl.algorithms.episodes import Episodes, split_episodes
from embodrl.algorithms.losses import LossCounts, reduce_to_level, reduce_to_ratio
from embodrl.config.schema import AlgorithmConfig, RejectionConfig
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import EmbodrlError

OnExceed = Literal["mask", "clamp"]

# Columns of a flattened rollout with quantities fixed before the update.
PROX = "prox_logprobs"
LOG_WEIGHTS = "behavior_log_weights"
STALENESS = "policy_staleness"
MISMATCH = "logprob_mismatch"
MISMATCH_COUNT = "logprob_mismatch_count"
MISMATCH_MAX = "logprob_mismatch_max"
MISMATCH_TERMS = (MISMATCH, MISMATCH_COUNT, MISMATCH_MAX)
REJECTED = "rejected"
COLUMNS = (PROX, LOG_WEIGHTS, STALENESS, REJECTED)


@dataclass(frozen=True)
class Proximal:
    """Extra arguments of a decoupled loss.

    Attributes:
        logprobs: ``float32[N,C,A]`` under the proximal policy, without gradient.
        weights: ``float32[N,C,A]`` or ``float32[N,1,1]``, w within its bounds, without gradient; 0 where the cap masks
            it, or ``algorithm.rejection``. None for all 1.
        metrics: ``behavior_weight_mean``, ``behavior_weight_max`` and, with a cap, ``behavior_masked_fraction`` or
            ``behavior_clamped_fraction``; see ``weight_metrics``. ``rejected_fraction`` of the ratios.
    """

    logprobs: Tensor
    weights: Tensor | None
    metrics: dict[str, Tensor]


def staleness_of(policy_version: Tensor, valid: Tensor, version: int) -> Tensor:
    """Return ``int64[T,B]``: the age in updates of the policy that chose each chunk; 0 where nothing is valid.

    ``policy_version`` is ``int64[T,B]``, ``valid`` ``bool[T,B,C]``, ``version`` the current version of the weights.
    Raises EmbodrlError if a chunk has a newer version.
    """
    staleness = torch.where(valid.any(-1), version - policy_version, 0)
    if staleness.numel() and int(staleness.min()) < 0:
        raise EmbodrlError(
            f"a chunk was chosen by policy version {version - int(staleness.min())}, and the engine is at {version}",
            "stamp chunks with the version of the engine whose weights acted, and restore both from one checkpoint",
            code="chunk-version",
        )
    return staleness


def staleness_metrics(staleness: Tensor, valid: Tensor) -> dict[str, float]:
    """Return ``staleness/mean`` and ``staleness/max`` over the chunks with a valid action, in updates."""
    live = staleness[valid.any(-1)]
    if not len(live):
        return {"staleness/mean": 0.0, "staleness/max": 0.0}
    return {"staleness/mean": float(live.double().mean()), "staleness/max": float(live.max())}


def mismatch_terms(logprobs: Tensor, old_logprobs: Tensor, valid: Tensor, staleness: Tensor) -> dict[str, Tensor]:
    """Return sum, count and maximum of the absolute differences between training and rollout log-probs.

    ``logprobs`` and ``old_logprobs`` are ``float32[N,C,A]`` under the weights that acted, without gradient. Only chunks
    with ``staleness int64[N]`` 0 count, where ``valid bool[N,C]``.
    """
    counts = (valid & (staleness == 0).unsqueeze(-1)).unsqueeze(-1)
    apart = torch.where(counts, (logprobs - old_logprobs).abs(), 0.0)
    # max() of an empty tensor raises; its sum is 0.
    largest = apart.max() if apart.numel() else apart.sum()
    return {MISMATCH: apart.sum(), MISMATCH_COUNT: counts.sum().float() * apart.shape[-1], MISMATCH_MAX: largest}


def mismatch_metrics(terms: Mapping[str, Tensor]) -> dict[str, float]:
    """Return mean and maximum of ``mismatch_terms``; empty if nothing counts."""
    count = float(terms[MISMATCH_COUNT])
    if not count:
        return {}
    return {MISMATCH: float(terms[MISMATCH]) / count, MISMATCH_MAX: float(terms[MISMATCH_MAX])}


def loglinear_logprobs(logprobs: Tensor, old_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """Interpolate the proximal log-probs between the behaviour and the current policy, as AReaL does.

    ``logp_b + alpha (logp_theta - logp_b)`` with ``alpha = (v_prox - v_b) / (v_theta - v_b)``. An update takes version
    ``v_prox = v_theta - 1`` to ``v_theta``, so with the staleness ``s = v_prox - v_b`` alpha is ``s / (s + 1)``.

    Args:
        logprobs: ``float32[N,C,A]`` under the current policy; no gradient flows into them.
        old_logprobs: ``float32[N,C,A]`` under the behaviour policy.
        staleness: ``int64[N]``; where it is 0 the result is ``old_logprobs``, bit-exact.
    """
    age = staleness.view(-1, 1, 1)
    between = torch.lerp(old_logprobs, logprobs.detach(), age / (age + 1))
    return torch.where(age == 0, old_logprobs, between)


def log_behavior_weights(
    prox_logprobs: Tensor, old_logprobs: Tensor, valid: Tensor, per_token: bool, length_normalized: bool = False
) -> Tensor:
    """Return ``log w`` of tokens ``float32[N,C,A]`` or of chunks ``float32[N,1,1]``; 0 where not valid.

    Log-probs are ``float32[N,C,A]``, ``valid`` is ``bool[N,C]``. Weights are ``per_token`` or the product over a
    chunk's valid tokens; ``length_normalized`` takes the geometric mean instead, as for the ratio.
    """
    # A selection, not a product: an invalid entry may be NaN.
    tokens = torch.where(valid.unsqueeze(-1), prox_logprobs - old_logprobs, 0.0)
    return reduce_to_ratio(tokens, valid, "token_level" if per_token else "chunk_level", length_normalized)[0]


def log_episode_weights(prox_logprobs: Tensor, old_logprobs: Tensor, valid: Tensor, episodes: Episodes) -> Tensor:
    """Return ``log w`` of the episode each chunk belongs to, ``float32[T,B]``; 0 where there is none.

    ``w`` is the geometric mean over the valid tokens of the episode, whose log is the mean of the log ratios: a product
    over thousands of tokens would be 0 or infinite. Log-probs are ``float32[T,B,C,A]``, ``valid`` is ``bool[T,B,C]``.
    """
    return _episode_means(torch.where(valid.unsqueeze(-1), prox_logprobs - old_logprobs, 0.0), valid, episodes)


def _episode_means(tokens: Tensor, valid: Tensor, episodes: Episodes) -> Tensor:
    """Return ``float32[T,B]``: the mean over the valid tokens of each chunk's episode, of which the others are 0."""
    live = episodes.index >= 0
    count = (valid.sum(-1) * tokens.shape[-1])[live].double()
    zeros = torch.zeros(len(episodes), dtype=torch.float64, device=valid.device)
    total = zeros.index_add(0, episodes.index[live], tokens.double().sum((-1, -2))[live])
    length = zeros.index_add(0, episodes.index[live], count)
    result = torch.zeros(valid.shape[:2], device=valid.device)
    result[live] = (total / length).float()[episodes.index[live]]
    return result


def rejected(
    prox_logprobs: Tensor, old_logprobs: Tensor, valid: Tensor, settings: RejectionConfig, episodes: Episodes | None
) -> Tensor:
    """Return what ``algorithm.rejection`` rejects, ``bool[...,C,A]`` of tokens or ``bool[...,1,1]`` of chunks.

    Rejection of tokens and sequences by ratio or KL: AReaL's ``rejection_sampling``, verl's ``rollout_rs``; estimators
    of the KL: Schulman 2020, "Approximating KL Divergence". What is not valid may be either.

    Args:
        prox_logprobs: ``float32[...,C,A]`` under the weights at the start of the update.
        old_logprobs: the same, of the behaviour policy.
        valid: ``bool[...,C]``.
        settings: its level ``episode`` takes shapes ``[T,B,...]``.
        episodes: of the rollout; None for other levels.
    """
    log_ratios = torch.where(valid.unsqueeze(-1), prox_logprobs - old_logprobs, 0.0)
    terms = {
        "ratio": lambda: log_ratios,
        "k1": lambda: -log_ratios,
        "k2": lambda: log_ratios.square() / 2,
        "k3": lambda: log_ratios.expm1() - log_ratios,
    }[settings.metric or "ratio"]()
    if settings.level == "chunk":
        count = (valid.sum(-1) * terms.shape[-1]).clamp_min(1)
        terms = (terms.sum((-1, -2)) / count)[..., None, None]
    elif settings.level == "episode":
        assert episodes is not None
        terms = _episode_means(terms, valid, episodes)[..., None, None]
    measured = terms.exp() if settings.metric == "ratio" else terms
    lower = -math.inf if settings.lower is None else settings.lower
    upper = math.inf if settings.upper is None else settings.upper
    return (measured < lower) | (measured > upper)


def cap_weights(
    log_weights: Tensor, cap: float | None, on_exceed: OnExceed, least: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return w, at least ``least``, and where it exceeded the cap (``bool``); there it is 0 (mask) or the cap."""
    weights = log_weights.exp().clamp_min(least or 0.0)
    if cap is None:
        return weights, torch.zeros_like(weights, dtype=torch.bool)
    exceeds = weights > cap
    return torch.where(exceeds, 0.0 if on_exceed == "mask" else cap, weights), exceeds


def weight_metrics(
    log_weights: Tensor, weights: Tensor, exceeds: Tensor, mask: Tensor, num_ratios: Tensor
) -> dict[str, Tensor]:
    """Return the mean of w within its bounds, its maximum before, and the fraction above the cap, over the ratios.

    Args:
        log_weights: log weights of tokens or chunks before the cap.
        weights: weights within their bounds.
        exceeds: ``bool``, above the cap.
        mask: ``bool``, the valid ratios, to which the others broadcast.
        num_ratios: number of ratios in the whole minibatch, so that micro-batches add up; the maximum is per
            micro-batch.
    """
    # The exponential may overflow; a metric must stay finite.
    highest = torch.finfo(log_weights.dtype).max
    largest = torch.where(mask, log_weights.exp().clamp(max=highest), 0.0)
    return {
        "behavior_weight_mean": torch.where(mask, weights, 0.0).sum() / num_ratios,
        "behavior_weight_max": largest.max() if largest.numel() else largest.sum(),
        "exceeds": (exceeds & mask).sum() / num_ratios,
    }


def set_proximal(batch: TrajectoryBatch, logprobs: Tensor, values: Tensor | None) -> None:
    """Replace a rollout's log-probs and values by those of the weights before the update.

    Advantages relative to the behaviour critic would hold back the learning critic, and the value clip would tie it to
    the old values. Observations after the rollout and after truncated episodes are not kept: their values are shifted
    by the change of the preceding chunk's value, except where other weights than the chunk's computed them
    (``value_version``).

    Args:
        batch: rollout, modified in place.
        logprobs: ``float32[T,B,C,A]`` from ``OnPolicyUpdate.proximal``.
        values: ``float32[T,B,K]``, or None.
    """
    batch.prox_logprobs = logprobs
    if values is None:
        return
    old = batch["values"]
    ends = batch.values[-1:]
    # The value of a chunk's last action is the nearest to the following observation.
    last = (batch.valid.sum(-1, keepdim=True) - 1).clamp(0, old.shape[-1] - 1)
    shift = (values - old).gather(-1, last)
    if batch.value_version is not None:
        known = (batch.value_version == batch.policy_version).unsqueeze(-1)
        ended = (batch.terminated | batch.truncated).any(-1, keepdim=True)
        batch.bootstrap_values = batch.bootstrap_values + torch.where(known & ended, shift, 0.0)
        ends = ends + torch.where(known & ~ended, shift, 0.0)[-1:]
    batch.values = torch.cat([values, ends])


def proximal_columns(batch: TrajectoryBatch, algorithm: AlgorithmConfig, staleness: Tensor) -> dict[str, Tensor]:
    """Return the columns ``[T,B,...]`` that minibatches carry for ``proximal_terms``; none without proximal log-probs.

    ``staleness int64[T,B]`` counts updates that changed the policy. Raises EmbodrlError if the log-probs under the
    proximal policy are required but missing.
    """
    columns = _weight_columns(batch, algorithm, staleness)
    prox = batch.prox_logprobs
    rejection = algorithm.rejection
    if rejection.metric is None or rejection.level != "episode":
        return columns
    if prox is None:
        raise _no_proximal("algorithm.rejection")
    episodes = split_episodes(batch.valid, batch.terminated, batch.truncated)
    return columns | {REJECTED: rejected(prox, batch.logprobs, batch.drawn, rejection, episodes)}


def _no_proximal(key: str) -> EmbodrlError:
    return EmbodrlError(
        f"{key} needs the log-probs under the weights before the update",
        "call set_proximal(batch, *update.proximal(batch)) before update.update",
        code="prox-logprobs-missing",
    )


def _weight_columns(batch: TrajectoryBatch, algorithm: AlgorithmConfig, staleness: Tensor) -> dict[str, Tensor]:
    decoupled = algorithm.decoupled
    if not decoupled.enabled:
        return {} if batch.prox_logprobs is None else {PROX: batch.prox_logprobs}
    if decoupled.prox == "loglinear":
        if decoupled.level == "episode":
            raise EmbodrlError(
                "a minibatch does not see whole episodes, so loglinear can't weight them",
                "set algorithm.decoupled.prox=recompute, or algorithm.decoupled.level=chunk",
                code="prox-partial-episodes",
            )
        return {STALENESS: staleness}
    prox = batch.prox_logprobs
    if prox is None:
        raise _no_proximal("algorithm.decoupled.prox=recompute")
    if decoupled.level == "episode":
        episodes = split_episodes(batch.valid, batch.terminated, batch.truncated)
        log_weights = log_episode_weights(prox, batch.logprobs, batch.drawn, episodes)
        return {PROX: prox, LOG_WEIGHTS: log_weights[..., None, None]}
    return {PROX: prox}


def proximal_terms(
    micro: TrajectoryBatch, logprobs: Tensor, algorithm: AlgorithmConfig, counts: LossCounts
) -> Proximal | None:
    """Return the proximal log-probs and behaviour weights of a micro-batch, after rejection; None without either.

    ``micro`` is flat with the columns of ``proximal_columns``, ``logprobs`` is ``float32[N,C,A]`` under the current
    policy, ``counts`` are those of the whole minibatch.
    """
    proximal = _weighted(micro, logprobs, algorithm, counts)
    rejection = algorithm.rejection
    if rejection.metric is None:
        return proximal
    if proximal is None:
        raise _no_proximal("algorithm.rejection")
    old = micro.logprobs
    dropped = micro.get(REJECTED)
    if dropped is None:
        dropped = rejected(proximal.logprobs, old, micro.drawn, rejection, None)
    weights = torch.ones_like(dropped, dtype=old.dtype) if proximal.weights is None else proximal.weights
    mask = reduce_to_level(old, micro.drawn, algorithm.logprob_type)[1]
    metrics = proximal.metrics | {"rejected_fraction": (dropped & mask).sum() / counts.policy}
    return Proximal(proximal.logprobs, torch.where(dropped, 0.0, weights), metrics)


def _weighted(
    micro: TrajectoryBatch, logprobs: Tensor, algorithm: AlgorithmConfig, counts: LossCounts
) -> Proximal | None:
    decoupled = algorithm.decoupled
    old = micro.logprobs
    valid = micro.drawn
    prox = micro.prox_logprobs
    per_token = decoupled.level == "token"
    cap = decoupled.cap
    on_exceed = decoupled.on_exceed
    least = decoupled.min_weight if decoupled.enabled else None
    if not decoupled.enabled:
        if prox is None or algorithm.engine_weight_cap is None:
            return None if prox is None else Proximal(prox, None, {})
        # Truncated importance sampling: min(exp(logp_prox - logp_b), C).
        per_token = algorithm.logprob_type == "token_level"
        cap = algorithm.engine_weight_cap
        on_exceed = "clamp"
    if prox is None:
        prox = loglinear_logprobs(logprobs, old, micro[STALENESS])
    log_weights = micro.get(LOG_WEIGHTS)
    if log_weights is None:
        normalized = algorithm.length_normalized_ratio and algorithm.logprob_type != "token_level"
        log_weights = log_behavior_weights(prox, old, valid, per_token, normalized)
    weights, exceeds = cap_weights(log_weights, cap, on_exceed, least)
    mask = reduce_to_level(old, valid, algorithm.logprob_type)[1]
    metrics = weight_metrics(log_weights, weights, exceeds, mask, counts.policy)
    fraction = metrics.pop("exceeds")
    if cap is not None:
        metrics["behavior_masked_fraction" if on_exceed == "mask" else "behavior_clamped_fraction"] = fraction
    return Proximal(prox, weights, metrics)
