"""Distributions over action bins; rollout and training share these functions, so that log-probs agree.

All take the action bins' logits only, divide by the temperature, keep the top k, and normalise in float32.
Shapes: K bins.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from embodrl.data.rng import RandomSource, draw_rows
from embodrl.types import SamplingParams


def log_distribution(logits: Tensor, sampling: SamplingParams, taken: Tensor | None = None) -> Tensor:
    """Return log-probabilities ``float32[...,K]``; bins outside the top k have -inf.

    Args:
        logits: ``[...,K]``.
        sampling: temperature and top k.
        taken: bins ``int64[...]`` that stay in the support even after leaving the top k, so that the ratio of a stored
            action is never 0/0.
    """
    scaled = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        keep = torch.zeros_like(scaled, dtype=torch.bool)
        keep.scatter_(-1, scaled.topk(sampling.top_k, dim=-1).indices, True)
        if taken is not None:
            keep.scatter_(-1, taken[..., None], True)
        scaled = scaled.masked_fill(~keep, -torch.inf)
    return scaled.log_softmax(dim=-1)


def action_log_probs(logits: Tensor, index: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the log-probability ``float32[...]`` of bins ``index int64[...]`` under logits ``[...,K]``."""
    return log_distribution(logits, sampling, index).gather(-1, index[..., None]).squeeze(-1)


def action_entropy(logits: Tensor, index: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the entropy ``float32[...]`` in nats, ``-sum p log p``."""
    logp = log_distribution(logits, sampling, index)
    return -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(dim=-1)


def draw(logits: Tensor, sampling: SamplingParams, noise: Tensor | None) -> Tensor:
    """Return bins ``int64[...]``: the most probable without noise, else a sample.

    With ``noise`` from Exp(1), ``argmax(p / noise)`` is distributed as p (the exponential race, equal to Gumbel-max).
    """
    if noise is None:
        return logits.argmax(dim=-1)
    return (log_distribution(logits, sampling) - noise.log()).argmax(dim=-1)


def draw_quantile(logits: Tensor, sampling: SamplingParams, quantile: Tensor) -> Tensor:
    """Return bins ``int64[...]``, sampled with one number ``float32[...]`` of [0, 1) each instead of one per bin."""
    cumulative = log_distribution(logits, sampling).double().exp().cumsum(dim=-1)
    wanted = quantile.double()[..., None] * cumulative[..., -1:]
    return torch.searchsorted(cumulative, wanted, right=True).squeeze(-1)


def expected(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Return bins ``int64[...]`` nearest to the mean of the distribution; bins are ordered."""
    probabilities = log_distribution(logits, sampling).exp()
    bins = torch.arange(logits.shape[-1], dtype=probabilities.dtype, device=logits.device)
    return (probabilities * bins).sum(dim=-1).round().long()


def exponential_noise(shape: Sequence[int], generator: RandomSource | None, device: torch.device) -> Tensor:
    """Return ``float32`` draws from Exp(1), made on the generator's device, for sampling by ``argmax(p / noise)``."""
    source = device if generator is None else generator.device

    def draw(size: list[int], one: torch.Generator | None) -> Tensor:
        return torch.empty(size, device=source).exponential_(generator=one)

    return draw_rows(draw, shape, generator).to(device)


def uniform_noise(shape: Sequence[int], generator: RandomSource | None, device: torch.device) -> Tensor:
    """Return ``float32`` draws from [0, 1), made on the generator's device, for ``draw_quantile``."""
    source = device if generator is None else generator.device

    def draw(size: list[int], one: torch.Generator | None) -> Tensor:
        return torch.rand(size, generator=one, device=source)

    return draw_rows(draw, shape, generator).to(device)


@functools.lru_cache(maxsize=8)
def smoothed_targets(num_bins: int, sigma: float, device: torch.device) -> Tensor:
    """Return ``float32[K,K]``: row k is a truncated, renormalised Gaussian around k with deviation sigma, in bins."""
    bins = torch.arange(num_bins, dtype=torch.float64)
    weights = torch.exp(-0.5 * ((bins[None] - bins[:, None]) / sigma) ** 2)
    return (weights / weights.sum(dim=1, keepdim=True)).float().to(device)


def standard_normal(shape: Sequence[int], generator: RandomSource | None, device: torch.device, dim: int = 0) -> Tensor:
    """Return ``float32`` draws made on the generator's device; ``dim`` is the batch axis."""
    source = device if generator is None else generator.device

    def draw(size: list[int], one: torch.Generator | None) -> Tensor:
        return torch.randn(size, generator=one, device=source)

    return draw_rows(draw, shape, generator, dim).to(device)
