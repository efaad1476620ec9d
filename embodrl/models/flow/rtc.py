"""Real-time chunking: the next chunk continues the chunk that a robot is executing.

While the next chunk is computed, the robot executes the first ``delay`` remaining actions of the current one. There are
two ways to continue it:

- guided, for any flow policy: Black, Galliker and Levine, "Real-Time Execution of Action Chunking Flow Policies" (2025,
  arXiv:2506.07339). Those actions are fixed; the other remaining actions are a fading target. Denoising is guided
  towards both by a pseudo-inverse (Pokle et al., "Training-free Linear Image Inverses via Flows", 2024).
- trained: Black et al., "Training-Time Action Conditioning for Efficient Real-Time Chunking" (2025, arXiv:2512.05964).
  Imitation gives the first actions of a chunk without noise, so that denoising can be given the fixed ones.

Time is the remaining noise, tau = 1 - t of the papers, and the velocity is the negative of theirs; see ``flow.py``.
Shapes: B batch, H action horizon, D padded action dimensions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from embodrl.models.flow.flow import Velocity


def prefix_weights(delay: Tensor, length: Tensor, horizon: int) -> Tensor:
    """Return how strongly each action is held to the remaining last chunk, ``float32[B,H]`` (equation 5).

    ``W_i = 1`` for ``i < d``; ``c_i (e^{c_i} - 1) / (e - 1)`` with ``c_i = (n - i) / (n - d + 1)`` for ``d <= i < n``;
    0 after that. The paper's ``H - s`` is n, the number of actions that remain after s were executed.

    Args:
        delay: d, ``int64[B]``: actions executed before the new chunk arrives.
        length: n, ``int64[B]``, at least d.
        horizon: H.
    """
    index = torch.arange(horizon, device=delay.device)[None]
    start = delay[:, None]
    end = length[:, None]
    c = (end - index).float() / (end - start + 1).float()
    fading = c * torch.expm1(c) / math.expm1(1.0)
    return torch.where(index < start, 1.0, torch.where(index < end, fading, 0.0))


def guidance_weight(tau: Tensor, limit: float) -> Tensor:
    """Return ``min(beta, (1 - t) / (t r_t^2))`` with ``r_t^2 = (1 - t)^2 / (t^2 + (1 - t)^2)`` (equations 2 and 4).

    With t = 1 - tau that is ``((1 - tau)^2 + tau^2) / (tau (1 - tau))``, which is infinite in pure noise;
    ``tau float32[B]`` is above 0, ``limit`` is beta.
    """
    return (((1.0 - tau).square() + tau.square()) / (tau * (1.0 - tau))).clamp(max=limit)


def guided(network: Velocity, target: Tensor, weights: Tensor, limit: float) -> Velocity:
    """Return the network's velocity, guided towards the actions to continue (equations 2 and 3).

    ``v - w (Y - data)^T diag(W) d data / d x`` with ``data = x - tau v``; where W is 0 everywhere it is v. ``target``
    is Y, ``float32[B,H,D]`` in model units; ``weights`` is W, ``float32[B,H,D]``; for ``limit`` see
    ``guidance_weight``.
    """

    def velocity(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            v, features = network(point, tau)
            data = point - tau[:, None, None] * v.float()
            error = (target - data).detach() * weights
            (pull,) = torch.autograd.grad(data, point, error)
        return v.detach().float() - guidance_weight(tau, limit)[:, None, None] * pull, features.detach()

    return velocity


def drawn_delays(batch: int, largest: int) -> Tensor:
    """Draw the number of given actions per chunk, ``int64[B]``, uniformly from 0 to ``largest``, for imitation."""
    return torch.randint(largest + 1, (batch,))


def conditioned(network: Velocity, given: Tensor) -> Velocity:
    """Return a velocity that keeps ``given bool[B,H]`` actions unchanged, at noise level 0 for the network."""

    def velocity(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        v, features = network(x, tau[:, None].masked_fill(given, 0.0))
        return v.masked_fill(given[..., None], 0.0), features

    return velocity
