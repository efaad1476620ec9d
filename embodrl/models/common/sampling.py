"""Distributions over action bins; rollout and training share these functions, so that log-probs agree.

All take the action bins' logits only, divide by the temperature, keep the top k, and normalise in float32.
Shapes: B batch, K bins, T tokens written.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from embodrl.data.rng import RandomSource, draw_rows
from embodrl.models.common.chat import TokenRules
from embodrl.types import Observation, SamplingParams


@dataclass(frozen=True)
class TextSampling(SamplingParams):
    """Sampling of a served message, on which nothing trains.

    Attributes:
        rules: top p, applied after the top k, and penalties.
    """

    rules: TokenRules = field(default_factory=TokenRules)


def penalised(logits: Tensor, tokens: Tensor, mask: Tensor, sampling: SamplingParams) -> Tensor:
    """Return logits ``[B,K]`` less the penalties of ``TextSampling``.

    With c the number of times that a message has a token, ``logits - frequency * c - presence * (c > 0)``. Source:
    OpenAI's API reference, ``frequency_penalty`` and ``presence_penalty``.

    Args:
        logits: of the next token, ``[B,K]``.
        tokens: written so far, ``int64[B,T]``.
        mask: which of them are, ``bool[B,T]``.
        sampling: how messages are drawn.
    """
    rules = sampling.rules if isinstance(sampling, TextSampling) else TokenRules()
    if not (rules.presence_penalty or rules.frequency_penalty):
        return logits
    index = tokens.clamp(max=logits.shape[-1] - 1).to(logits.device)  # padding lies above
    counts = torch.zeros_like(logits).scatter_add_(-1, index, mask.to(logits))
    return logits - rules.frequency_penalty * counts - rules.presence_penalty * (counts > 0)


def log_distribution(logits: Tensor, sampling: SamplingParams, taken: Tensor | None = None) -> Tensor:
    """Return log-probabilities ``float32[...,K]``; bins outside the top k have -inf.

    Args:
        logits: ``[...,K]``.
        sampling: temperature, top k, and perhaps top p.
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
    if isinstance(sampling, TextSampling) and sampling.rules.top_p < 1:
        scaled = scaled.masked_fill(~_nucleus(scaled, sampling.rules.top_p), -torch.inf)
    return scaled.log_softmax(dim=-1)


def _nucleus(scaled: Tensor, top_p: float) -> Tensor:
    """Return ``bool[...,K]``: the fewest most probable bins with the probability ``top_p``, at least one.

    Source: Holtzman et al. 2020, The Curious Case of Neural Text Degeneration.
    """
    probabilities, order = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = before < top_p
    kept[..., 0] = True
    return torch.zeros_like(kept).scatter_(-1, order, kept)


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


def noise_of(observation: Observation, shape: Sequence[int]) -> Tensor:
    """Return ``float32[B,*shape]`` on the CPU, drawn from each row's images and state alone."""
    rows = zip(observation.images, observation.state, strict=True)
    seeds = [zlib.crc32(state.tobytes(), zlib.crc32(images.tobytes())) for images, state in rows]
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def standard_normal(shape: Sequence[int], generator: RandomSource | None, device: torch.device, dim: int = 0) -> Tensor:
    """Return ``float32`` draws made on the generator's device; ``dim`` is the batch axis."""
    source = device if generator is None else generator.device

    def draw(size: list[int], one: torch.Generator | None) -> Tensor:
        return torch.randn(size, generator=one, device=source)

    return draw_rows(draw, shape, generator, dim).to(device)
