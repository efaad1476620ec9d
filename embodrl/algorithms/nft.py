"""Negative-aware fine-tuning of flow policies, without likelihoods.

A velocity ``v`` is mirrored at the velocity ``v_old`` of the behaviour policy, ``v+- = v_old +- beta (v - v_old)``:
failures move ``v-``, and so push ``v`` the other way. With ``e`` the error of a velocity against its target, the
energies are ``E+- = |e_old +- beta (e - e_old)|^2``, and ``y`` in -1 to 1 rates the chunk.

* ``weighted``: ``r E+ + (1 - r) E-`` with ``r = (1 + y) / 2``: DiffusionNFT (Zheng et al. 2025, arXiv 2509.16117),
  whose targets come from the forward process (``model.flow.method=cfm``). Its time weighting is not applied: the
  velocity error is used as is.
* ``contrastive``: ``softplus(y (E+ - E-) / 2)``: pi-StepNFT (Wang et al. 2026, arXiv 2603.02083, section 4.2), whose
  target is the next point of the stochastic chain (``flow_sde``), in standard deviations of the step.

Shapes: R rows (chunks), N samples of an error, C actions of a chunk, A action dimensions, K values per chunk.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from embodrl.algorithms.kl import MAX_LOG_RATIO
from embodrl.algorithms.losses import (
    Level,
    LossCounts,
    LossOutput,
    check_levels,
    count_elements,
    reduce_to_level,
    total,
)

Objective = Literal["weighted", "contrastive"]


def nft_loss(
    *,
    errors: Tensor,
    old_errors: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    valid: Tensor,
    logprob_type: Level,
    objective: Objective,
    beta: float,
    max_advantage: float,
    weights: Tensor | None = None,
    counts: LossCounts | None = None,
) -> LossOutput:
    """Objective of the module docstring, averaged over tokens, actions or chunks.

    Args:
        errors: ``float32[R,N,C,A]``, errors of the current velocities against their targets.
        old_errors: ``float32[R,N,C,A]``, errors of the behaviour policy's velocities.
        logprobs: ``float32[R,C,A]``, used only for metrics and ``algorithm.target_kl``, like ``old_logprobs``.
        old_logprobs: ``float32[R,C,A]``.
        advantages: ``float32[R,K]``; ``y`` is the advantage over ``max_advantage``, clipped to 1.
        valid: ``bool[R,C]``.
        logprob_type: level over which errors are summed for one ``E+-``; chunk level needs K = 1.
        objective: ``weighted`` or ``contrastive``.
        beta: mirroring factor, above 0.
        max_advantage: advantages of this size and more have ``y = 1``.
        weights: ``float32[R]`` of the chunks, 1 on average; None for all 1.
        counts: counts of the whole minibatch; None if this batch is the minibatch.

    Returns:
        loss, and ``policy_loss``, ``approx_kl`` (per token; k3), ``energy_gap`` (mean of ``y (E- - E+)``: 0 before the
            first step, positive where good chunks are nearer to ``v+`` and bad ones to ``v-``) and ``error`` (mean
            square of ``errors``).

    Raises:
        EmbodrlError: advantages are finer than ``logprob_type``.
    """
    check_levels(logprob_type, advantages)
    counts = counts or count_elements(valid, action_dim=logprobs.shape[2], logprob_type=logprob_type)
    moved = beta * (errors - old_errors)
    near, _ = reduce_to_level((old_errors + moved).square().mean(1), valid, logprob_type)
    far, mask = reduce_to_level((old_errors - moved).square().mean(1), valid, logprob_type)
    y = (advantages / max_advantage).clamp(-1.0, 1.0).unsqueeze(-1)
    gap = y * (near - far)
    per_element = functional.softplus(0.5 * gap) if objective == "contrastive" else 0.5 * (near + far + gap)
    loss = total(torch.where(mask, per_element, 0.0), weights) / counts.policy
    with torch.no_grad():
        log_ratio = torch.where(valid.unsqueeze(-1), logprobs - old_logprobs, 0.0)
        log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        square, _ = reduce_to_level(errors.square().mean(1), valid, "token_level")
        metrics = {
            "policy_loss": loss.detach(),
            "approx_kl": (log_ratio.expm1() - log_ratio).sum() / counts.tokens,
            "energy_gap": -torch.where(mask, gap, 0.0).sum() / counts.policy,
            "error": square.sum() / counts.tokens,
        }
    return LossOutput(loss, metrics)
