"""Sample-based estimators of the KL divergence between two policies."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return ``exp(log_ratio)`` with the log ratio clamped to +-20, as in verl.

    exp() of a float32 overflows at 89: the clipped surrogate stays finite there, but its gradient becomes NaN.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate ``KL(policy || reference)`` of each token drawn by the policy (http://joschu.net/blog/kl-approx.html).

    With ``x = logprobs - ref_logprobs``: k1 is ``x``, unbiased and of either sign; k2 is ``x^2 / 2``, biased and never
    negative; k3 is ``exp(-x) - 1 + x``, unbiased and never negative (DeepSeekMath, arXiv 2402.03300, eq. 4). k3 is
    capped at 10 per token, as in verl: a single unlikely token would outweigh all others.

    Args:
        logprobs: ``float32[...]`` of the policy.
        ref_logprobs: ``float32[...]`` of the reference.
        estimator: k1, k2 or k3.
    """
    x = logprobs - ref_logprobs
    if estimator == "k1":
        return x
    if estimator == "k2":
        return 0.5 * x.square()
    # expm1: rounding can't make it negative where the two are close
    x = x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(-x) + x).clamp(max=MAX_K3)


def policy_drift(log_ratio: Tensor, cap: float = 2.0) -> Tensor:
    """Estimate ``KL(old policy || policy)`` of each sample of the old policy, growing at most linearly (CPGD).

    k3 of the old policy's samples is ``r - 1 - log r``, whose gradient is ``(r - 1) * grad log p``. CPGD (Liu et al.
    2025, arXiv 2505.12504) bounds that factor: ``min(r - 1, cap)``. This is the function with that gradient, of
    ``log_ratio float32[...]``, the log of r = new probability over old.
    """
    # At log r = log(1 + cap) the factor r - 1 reaches the cap; beyond it the function is linear with that slope.
    bend = torch.log1p(torch.full_like(log_ratio, cap))
    near = torch.minimum(log_ratio, bend)
    return torch.expm1(near) - near + cap * (log_ratio - near)
