"""Real-time chunking: the next chunk continues the one that a robot is in the midst of.

While the next chunk is computed, the robot executes the first ``delay`` actions that are left of the present one. Two
forms of continuing it:

- guided, for any flow policy: Black, Galliker and Levine, "Real-Time Execution of Action Chunking Flow Policies" (2025,
  arXiv:2506.07339). Those actions are certain, and the rest of what is left is a wish that fades. Denoising is guided
  towards both by a pseudo-inverse (Pokle et al., "Training-free Linear Image Inverses via Flows", 2024).
- trained: Black et al., "Training-Time Action Conditioning for Efficient Real-Time Chunking" (2025, arXiv:2512.05964).
  Imitation gives the first actions of a chunk without noise, so that denoising may be given those that are certain.

Time is the noise left, tau = 1 - t of the papers, and the velocity is the negative of theirs; see ``flow.py``.

Shapes: B batch, H action horizon, D padded action dimensions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from embodrl.models.flow.flow import Velocity


def prefix_weights(delay: Tensor, length: Tensor, horizon: int) -> Tensor:
    """Return how much each action is held to what is left of the last chunk, ``float32[B,H]`` (equation 5).

    ``W_i = 1`` for ``i < d``; ``c_i (e^{c_i} - 1) / (e - 1)`` with ``c_i = (n - i) / (n - d + 1)`` for ``d <= i < n``;
    0 after that. The paper's ``H - s`` is n, the number of actions that are left after s were executed.

    Args:
        delay: d, ``int64[B]``: actions that are executed before the new chunk is there.
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

    With t = 1 - tau that is ``((1 - tau)^2 + tau^2) / (tau (1 - tau))``, which is infinite in pure noise.

    Args:
        tau: ``float32[B]``, above 0.
        limit: beta.
    """
    return (((1.0 - tau).square() + tau.square()) / (tau * (1.0 - tau))).clamp(max=limit)


def guided(network: Velocity, target: Tensor, weights: Tensor, limit: float) -> Velocity:
    """Return the network's velocity, pulled towards the actions that are to be continued (equations 2 and 3).

    ``v - w (Y - data)^T diag(W) d data / d x`` with ``data = x - tau v``; where W is 0 everywhere it is v.

    Args:
        network: the velocity without guidance.
        target: Y, ``float32[B,H,D]`` in the model's units; anything where ``weights`` is 0.
        weights: W, ``float32[B,H,D]``.
        limit: see ``guidance_weight``.
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
    """Draw how many actions of each chunk imitation gives, ``int64[B]`` from 0 to ``largest``, all equally often."""
    return torch.randint(largest + 1, (batch,))


def conditioned(network: Velocity, given: Tensor) -> Velocity:
    """Return a velocity that leaves the given actions as they are, and tells the network that they have no noise.

    Args:
        network: takes a noise level for each action.
        given: ``bool[B,H]``.
    """

    def velocity(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        v, features = network(x, tau[:, None].masked_fill(given, 0.0))
        return v.masked_fill(given[..., None], 0.0), features

    return velocity
