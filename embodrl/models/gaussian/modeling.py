"""Network and distributions of a small policy.

Shapes: B batch, V cameras, H image side, S padded state, F features, C actions in a chunk, A action dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.models.common.init import init_matrix
from embodrl.models.common.observation_net import Cnn
from embodrl.models.gaussian.frozen_encoder import IDENTITY_BYTES, PATCHES, PatchHead
from embodrl.models.gaussian.spec import GaussianArchitectureConfig

LOG_STD_MIN = -5.0
LOG_STD_MAX = 2.0
LAST_LAYER_GAIN = 0.01
"""Makes the initial actions of a policy close to 0 for any input."""
_QUADRATURE = np.linspace(-8.0, 8.0, 129)
"""Standard normal points for the entropy sum; its error is at most 1e-4 up to the largest deviation."""
MIN_STATE_STD = 0.01
"""In state units: dimensions that hardly moved in the data are not amplified."""
STATE_LIMIT = 10.0
"""Limit of the normalised state, in standard deviations from the mean."""


@dataclass(frozen=True)
class GaussianSpec:
    """Dimensions of a policy (``GaussianArchitectureConfig``), and whether the weights normalise the state.

    ``encoder_layer`` and ``encoder_width`` are 0 without a frozen encoder, ``seen_state_dim`` if all numbers of the
    state are read.
    """

    num_action_chunks: int
    action_dim: int
    use_images: bool
    image_size: int
    num_cameras: int
    channels: tuple[int, ...]
    feature_dim: int
    max_state_dim: int
    hidden_sizes: tuple[int, ...]
    initial_std: float
    categorical: bool = False
    normalise_state: bool = False
    encoder_layer: int = 0
    encoder_width: int = 0
    seen_state_dim: int = 0

    @classmethod
    def of(cls, shape: GaussianArchitectureConfig, num_action_chunks: int, action_dim: int) -> GaussianSpec:
        """Return the dimensions in the settings; the width of a frozen encoder is in its own files."""
        sizes = shape.model_dump(exclude={"frozen_encoder", "encoder_layer", "seen_state_dim"})
        layer = 0 if shape.frozen_encoder is None else shape.encoder_layer
        return cls(
            num_action_chunks, action_dim, **sizes, encoder_layer=layer, seen_state_dim=shape.seen_state_dim or 0
        )

    @property
    def num_features(self) -> int:
        """F."""
        return self.max_state_dim + (self.feature_dim if self.use_images else 0)


class TanhGaussian(NamedTuple):
    """``a = tanh(u)``, ``u ~ N(mean, std^2)``, independently for each number of a chunk; both ``float32[B,C,A]``.

    Change of variables: Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", arXiv 1812.05905,
    appendix C.
    """

    mean: Tensor
    std: Tensor

    def sample(self, noise: Tensor) -> Tensor:
        """Return ``u float32[B,C,A]`` with gradients, from standard normal noise of that shape."""
        return self.mean + self.std * noise

    def log_prob(self, u: Tensor) -> Tensor:
        """Return ``log p(tanh(u)) float32[B,C,A]``."""
        normal = -0.5 * ((u - self.mean) / self.std).square() - self.std.log() - 0.5 * math.log(2 * math.pi)
        return normal - log_slope(u)

    def entropy(self) -> Tensor:
        """Return the differential entropy ``float32[B,C,A]`` in nats: ``H(u) + E[log(1 - tanh(u)^2)]``.

        The expectation uses the trapezoidal rule, which converges exponentially under a Gaussian weight (Trefethen and
        Weideman 2014, "The Exponentially Convergent Trapezoidal Rule", SIAM Review 56, section 5).
        """
        weights = np.exp(-0.5 * _QUADRATURE**2)
        u = self.mean[..., None] + self.std[..., None] * self.mean.new_tensor(_QUADRATURE)
        slope = (log_slope(u) * self.mean.new_tensor(weights / weights.sum())).sum(-1)
        return self.std.log() + 0.5 * math.log(2 * math.pi * math.e) + slope


class Categorical(NamedTuple):
    """One of A discrete actions for each action of a chunk, one-hot as ``float32[B,C,A]``; logits of that shape."""

    logits: Tensor

    @property
    def mean(self) -> Tensor:
        """The most probable action."""
        return one_hot(self.logits)

    def sample(self, noise: Tensor) -> Tensor:
        """Return a draw, from standard normal noise of the logits' shape, by the Gumbel-max trick."""
        uniform = torch.special.ndtr(noise.double()).clamp(1e-12, 1 - 1e-12)
        return one_hot(self.logits - (-uniform.log()).log().to(self.logits.dtype))

    def log_prob(self, u: Tensor) -> Tensor:
        """Return the log-prob ``float32[B,C,1]`` of one-hot actions."""
        return (torch.log_softmax(self.logits, -1) * u).sum(-1, keepdim=True)

    def entropy(self) -> Tensor:
        """Return the entropy ``float32[B,C,1]`` in nats."""
        logp = torch.log_softmax(self.logits, -1)
        return -(logp.exp() * logp).sum(-1, keepdim=True)


def one_hot(scores: Tensor) -> Tensor:
    """Return 1 at the largest of the last dimension, 0 elsewhere."""
    return F.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)


def log_slope(u: Tensor) -> Tensor:
    """Return ``log(1 - tanh(u)^2)``, finite for any ``u``."""
    return 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))


def _vision(spec: GaussianSpec) -> Cnn | PatchHead | None:
    if not spec.use_images:
        return None
    if spec.encoder_layer:
        return PatchHead(spec.num_cameras, spec.encoder_width, spec.feature_dim)
    return Cnn(spec.num_cameras, spec.image_size, spec.channels, spec.feature_dim)


class GaussianModel(nn.Module):
    """Features of an observation, and the distribution of a chunk; state statistics are ``float32[S]``.

    ``encoder_identity uint8[32]`` names the frozen encoder that the weights were trained with, if there is one.
    """

    state_mean: Tensor
    state_std: Tensor
    encoder_identity: Tensor

    def __init__(self, spec: GaussianSpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.normalise_state:
            self.normalise_state([], [])
        if spec.encoder_layer:
            self.register_buffer("encoder_identity", torch.zeros(IDENTITY_BYTES, dtype=torch.uint8))
        self.vision = _vision(spec)
        sizes = (spec.num_features, *spec.hidden_sizes)
        self.policy = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        per_action = spec.action_dim if spec.categorical else 2 * spec.action_dim
        self.policy.append(nn.Linear(sizes[-1], per_action * spec.num_action_chunks))

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw weights; the standard deviation starts at ``initial_std`` for any input."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                init_matrix(module.weight, generator, math.sqrt(2.0))
                nn.init.zeros_(module.bias) if module.bias is not None else None
            elif isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
        last = self.policy[-1]
        assert isinstance(last, nn.Linear)
        init_matrix(last.weight, generator, LAST_LAYER_GAIN)
        if self.spec.categorical:
            return
        middle = (LOG_STD_MAX + LOG_STD_MIN) / 2
        half = (LOG_STD_MAX - LOG_STD_MIN) / 2
        last.bias.data[last.out_features // 2 :] = math.atanh((math.log(self.spec.initial_std) - middle) / half)

    def normalise_state(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Normalise states with ``mean`` and ``std``; padding is excluded."""
        padding = self.spec.max_state_dim - len(mean)
        self.register_buffer("state_mean", torch.tensor([*mean, *[0.0] * padding]))
        self.register_buffer("state_std", torch.tensor([*std, *[1.0] * padding]).clamp_min(MIN_STATE_STD))
        self.spec = replace(self.spec, normalise_state=True)

    def whole_state(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the (normalised) state ``float32[B,S]``, also what the policy does not read of it."""
        state = inputs["state"].float()
        if self.spec.normalise_state:
            state = ((state - self.state_mean) / self.state_std).clamp(-STATE_LIMIT, STATE_LIMIT)
        return state

    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return ``float32[B,F]``: features of the images, and the (normalised) state, 0 where it is not read."""
        state = self.whole_state(inputs)
        if self.spec.seen_state_dim:
            state = F.pad(state[:, : self.spec.seen_state_dim], (0, state.shape[1] - self.spec.seen_state_dim))
        if self.vision is None:
            return state
        seen = inputs[PATCHES if self.spec.encoder_layer else "images"]
        return torch.cat([self.vision(seen).float(), state], -1)

    def chunk_distribution(self, features: Tensor) -> TanhGaussian | Categorical:
        """Return the distribution of a chunk ``[B,C,A]``."""
        if not self.spec.categorical:
            return self.distribution(features)
        return Categorical(self._last(features).view(-1, self.spec.num_action_chunks, self.spec.action_dim))

    def _last(self, features: Tensor) -> Tensor:
        x = features
        for layer in self.policy[:-1]:
            x = F.relu(layer(x))
        return self.policy[-1](x).float()

    def distribution(self, features: Tensor) -> TanhGaussian:
        """Return the Gaussian of a chunk ``[B,C,A]``.

        ``log std`` is a tanh scaled to -5 to 2, as in CleanRL's sac_continuous_action.py.
        """
        mean, log_std = self._last(features).chunk(2, -1)
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (torch.tanh(log_std) + 1.0)
        shape = (len(mean), self.spec.num_action_chunks, self.spec.action_dim)
        return TanhGaussian(mean.view(shape), log_std.exp().view(shape))
