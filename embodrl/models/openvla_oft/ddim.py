"""Denoising diffusion of action chunks, as OpenVLA-OFT's diffusion head is trained and sampled.

The schedule is the cosine of Nichol and Dhariwal 2021, "Improved Denoising Diffusion Probabilistic Models", arXiv
2102.09672, section 3.2, with betas of at most 0.999; sampling is Song et al. 2021, "Denoising Diffusion Implicit
Models", arXiv 2010.02502, equation 12 without noise. diffusers' ``DDIMScheduler(beta_schedule="squaredcos_cap_v2")``
gives the same numbers: it bounds predicted actions to -1 and 1, and its last step ends without noise. Shapes: B batch,
C actions in a chunk, A action dimensions, T diffusion steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

_OFFSET = 0.008
_MAX_BETA = 0.999


@lru_cache(maxsize=8)
def signal_levels(num_steps: int) -> tuple[float, ...]:
    """Return the share of the variance that is signal after each of T steps, falling from about 1 to about 0.

    It is the product of ``1 - beta``, where ``beta_t = min(1 - f((t + 1) / T) / f(t / T), 0.999)`` and ``f(u) =
    cos(pi / 2 (u + 0.008) / 1.008)^2``.
    """
    levels: list[float] = []
    left = 1.0
    for step in range(num_steps):
        beta = 1.0 - _cosine((step + 1) / num_steps) / _cosine(step / num_steps)
        left *= 1.0 - min(beta, _MAX_BETA)
        levels.append(left)
    return tuple(levels)


def _cosine(time: float) -> float:
    return math.cos((time + _OFFSET) / (1.0 + _OFFSET) * math.pi / 2.0) ** 2


def level_at(step: Tensor, num_steps: int) -> Tensor:
    """Return the signal levels ``float32[B,1,1]`` of steps ``int64[B]`` of T."""
    return torch.tensor(signal_levels(num_steps), device=step.device)[step][:, None, None]


def add_noise(actions: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    """Return noisy actions ``[B,C,A]``: ``sqrt(level) a + sqrt(1 - level) noise``."""
    return level.sqrt() * actions + (1.0 - level).sqrt() * noise


def without_noise(noisy: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    """Return the actions ``[B,C,A]`` that a predicted noise implies, within -1 and 1."""
    return ((noisy - (1.0 - level).sqrt() * noise) / level.sqrt()).clamp(-1.0, 1.0)


def denoise(predict: Callable[[Tensor, Tensor], Tensor], noise: Tensor, num_steps: int, num_taken: int) -> Tensor:
    """Return actions ``float32[B,C,A]`` in -1 to 1, sampled from a starting noise ``float32[B,C,A]``.

    Args:
        predict: network from noisy actions and steps ``int64[B]`` to the noise in them.
        noise: noise at the last step.
        num_steps: T that the network was trained with.
        num_taken: how many of them are taken, every ``T // num_taken``-th from 0 on.
    """
    stride = num_steps // num_taken
    levels = signal_levels(num_steps)
    noisy = noise
    for step in range((num_taken - 1) * stride, -1, -stride):
        at = torch.full((len(noise),), step, dtype=torch.int64, device=noise.device)
        found = predict(noisy, at)
        clean = without_noise(noisy, found, torch.tensor(levels[step], device=noise.device))
        following = levels[step - stride] if step >= stride else 1.0
        noisy = math.sqrt(following) * clean + math.sqrt(1.0 - following) * found
    return noisy
