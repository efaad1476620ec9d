"""Flow matching as a stochastic policy: denoising steps of an action chunk and their log-probabilities.

Time is the remaining noise, tau, from 1 (pure noise) to 0 (actions): ``x = tau * noise + (1 - tau) * data`` and
``velocity = noise - data``, as in openpi (Black et al., "pi0", 2024). GR00T runs the other way,
``x = (1 - t) * noise + t * data`` with ``velocity = data - noise``: its networks are called with ``t = 1 - tau`` and
their velocity is negated (``reversed_velocity``), so that everything here holds for both.
Flow-SDE (one stochastic step per chain) and Flow-Noise (all steps, with learned noise) follow Zhang et al.,
"ReinFlow" (2025) and Chen et al., "pi_RL" (2025); the SDE has the ODE's marginals (Liu et al., "Flow-GRPO", 2025).
Shapes: B batch, K denoising steps, H action horizon, D padded action dimensions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from embodrl.data.rng import RandomSource, draw_rows
from embodrl.models.common.sampling import standard_normal
from embodrl.models.common.value_head import DrawnHead

Joint = Literal["sum", "mean"]
Velocity = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""``x float32[B,H,D]`` and ``tau float32[B]`` to the velocity ``[B,H,D]`` and the features ``[B,H,F]`` behind it.

A family's network also takes ``tau float32[B,H]``, a noise level per action.
"""
Times = Callable[[int], list[float]]
"""K to the K + 1 values of tau."""


def reversed_velocity(network: Velocity) -> Velocity:
    """Adapt a network with GR00T's convention (time from noise 0 to data 1) to the one here."""

    def velocity(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        v, features = network(x, 1.0 - tau)
        return -v, features

    return velocity


def denoising_times(num_steps: int) -> list[float]:
    """Return the K + 1 values of tau, from 1 to 0."""
    return [1.0 - i / num_steps for i in range(num_steps + 1)]


def accumulated_times(num_steps: int) -> list[float]:
    """Return ``denoising_times`` with openpi's rounding (PI0Pytorch.sample_actions): 1 - 1/K - 1/K ... in float32."""
    times = [torch.tensor(1.0)]
    step = torch.tensor(1.0 / num_steps)
    for _ in range(num_steps):
        times.append(times[-1] - step)
    return [float(tau) for tau in times]


def sde_sigma(step: int, num_steps: int, noise_level: float) -> float:
    """Return the noise scale of a Flow-SDE step (0 to K - 1), ``eta * sqrt(tau / (1 - tau))``; eta is ``noise_level``.

    Step 0 uses step 1's ``1 - tau``.
    """
    times = denoising_times(num_steps)
    left = times[1] if step == 0 else times[step]
    return noise_level * math.sqrt(times[step] / (1.0 - left))


def step_mean(x: Tensor, v: Tensor, tau: Tensor, delta: float, sigma: Tensor) -> Tensor:
    """Return the mean ``[B,H,D]`` of the next point of the chain.

    With the estimates ``data = x - v tau`` and ``noise = x + v (1 - tau)`` it is ``data (1 - (tau - delta)) +
    noise ((tau - delta) - sigma^2 delta / (2 tau))``; sigma 0 gives Euler's step ``x - v delta``. ``x`` and ``v`` are
    ``float32[B,H,D]``, ``tau`` (above 0) and ``sigma`` ``float32[B,1,1]``, ``delta = 1 / K``.
    """
    later = tau - delta
    data = x - v * tau
    noise = x + v * (1.0 - tau)
    return data * (1.0 - later) + noise * (later - sigma.square() * delta / (2.0 * tau))


def normal_log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return elementwise log densities of ``Normal(mean, std)`` at ``x``."""
    return -0.5 * ((x - mean) / std).square() - std.log() - 0.5 * math.log(2.0 * math.pi)


def normal_entropy(std: Tensor) -> Tensor:
    """Return elementwise entropies in nats, ``log(2 pi e std^2) / 2``."""
    return 0.5 * math.log(2.0 * math.pi * math.e) + std.log()


def integrate(velocity: Velocity, noise: Tensor, num_steps: int, times: Times = denoising_times) -> Tensor:
    """Return the actions ``float32[B,H,D]`` that K Euler steps reach from ``noise``; ``times`` gives the taus."""
    return integrate_with_features(velocity, noise, num_steps, times)[0]


def integrate_with_features(
    velocity: Velocity, noise: Tensor, num_steps: int, times: Times = denoising_times
) -> tuple[Tensor, list[Tensor]]:
    """Like ``integrate``, but also return the features ``[B,H,F]`` of the K steps."""
    x = noise
    seen = list[Tensor]()
    for tau in times(num_steps)[:-1]:
        v, features = velocity(x, torch.full((len(x),), tau, device=x.device))
        seen.append(features)
        x = x - v.float() / num_steps
    return x, seen


@dataclass
class Chain:
    """A sampled chunk.

    Attributes:
        actions: ``float32[B,H,D]``.
        logprobs: ``float32[B,C,A]``.
        stored: inputs of ``Sampler.evaluate``, batch first.
        features: ``[B,H,F]`` for the value head: of the stochastic step, or of the first of several.
    """

    actions: Tensor
    logprobs: Tensor
    stored: dict[str, Tensor]
    features: Tensor


@dataclass
class ChainEvaluation:
    """Log-probs and entropies ``float32[B,C,A]`` of a stored chain, and features ``[B,H,F]``.

    ``errors float32[B,N,C,A]`` are the errors of N velocities against their targets, in units of the noise, if known.
    """

    logprobs: Tensor
    entropy: Tensor
    features: Tensor
    errors: Tensor | None = None


def _standardized(reached: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return a step's only error sample, ``[B,1,C,A]``."""
    return ((reached - mean) / std).unsqueeze(1)


def _start_log_prob(x: Tensor) -> Tensor:
    return normal_log_prob(x, torch.zeros_like(x), torch.ones_like(x))


class NoiseHead(DrawnHead):
    """Predicts standard deviations ``[D]`` from the features ``[F]`` of an action, for Flow-Noise.

    ``std = exp(lv / 2)``, where a small MLP with tanh output places ``lv`` between the log squares of ``std_min`` and
    ``std_max``.
    """

    def __init__(
        self,
        feature_dim: int,
        action_dim: int,
        std_min: float,
        std_max: float,
        hidden_sizes: Sequence[int] = (128, 64),
    ) -> None:
        super().__init__()
        sizes = [feature_dim, *hidden_sizes, action_dim]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.low = 2.0 * math.log(std_min)
        self.high = 2.0 * math.log(std_max)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw weights of variance 1/fan_in, a hundredth of that in the last layer, so std starts in the middle."""
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            scale = 0.1 if layer is self.layers[-1] else 1.0
            layer.weight.data.normal_(0.0, scale / math.sqrt(layer.in_features), generator=generator)
            layer.bias.data.zero_()

    def forward(self, features: Tensor) -> Tensor:
        """Map ``[...,F]`` to ``float32[...,D]``."""
        with torch.autocast(features.device.type, enabled=False):
            x = features.float()
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return torch.exp(0.5 * (self.low + (self.high - self.low) * (x + 1.0) / 2.0))


class Sampler:
    """Draws and evaluates chunks; only the executed part ``[:C,:A]`` has log-probabilities.

    Args:
        num_steps: K.
        noise_level: eta of Flow-SDE.
        num_actions: C.
        action_dim: A.
        noise_head: noise head of Flow-Noise; None for Flow-SDE.
        joint: Flow-Noise log-prob: ``sum`` over the start and the K steps, the log-likelihood of the chain (ReinFlow,
            pi_RL), or their ``mean`` as in RLinf, which raises ratios to the power 1 / (K + 1).
        keep_errors: whether Flow-SDE stores its step's deviation from the mean, in standard deviations, as
            ``flow_error``.
    """

    def __init__(
        self,
        num_steps: int,
        noise_level: float,
        num_actions: int,
        action_dim: int,
        noise_head: NoiseHead | None = None,
        joint: Joint = "sum",
        keep_errors: bool = False,
    ) -> None:
        self.num_steps = num_steps
        self.keep_errors = keep_errors
        self.joint: Joint = joint
        self.delta = 1.0 / num_steps
        self.num_actions = num_actions
        self.action_dim = action_dim
        self.noise_head = noise_head
        self.times = torch.tensor(denoising_times(num_steps), dtype=torch.float32)
        self.sigmas = torch.tensor([sde_sigma(i, num_steps, noise_level) for i in range(num_steps)])

    @property
    def trained_steps(self) -> int:
        """Denoising steps per row with gradients in an update: one for Flow-SDE, all for Flow-Noise."""
        return 1 if self.noise_head is None else self.num_steps

    def stored_numbers(self, horizon: int, padded_action_dim: int) -> int:
        """Return the number of float32 values that ``sample`` stores per chunk.

        Flow-SDE keeps the point before the random step and the step (as two numbers), Flow-Noise all points but the
        last; both keep the final actions.
        """
        step = 2 if self.noise_head is None else 0
        outcomes = (2 if self.keep_errors else 1) * self.num_actions * self.action_dim
        return self.trained_steps * horizon * padded_action_dim + outcomes + step

    def sample(
        self,
        velocity: Velocity,
        shape: tuple[int, int, int],
        generator: RandomSource | None,
        device: torch.device,
    ) -> Chain:
        """Draw a chunk per row; ``shape`` is ``(B, H, D)``. The number of draws does not depend on the network."""
        if self.noise_head is None:
            return self._sample_sde(velocity, shape, generator, device)
        return self._sample_noise(velocity, shape, generator, device, self.noise_head)

    def evaluate(self, velocity: Velocity, stored: dict[str, Tensor]) -> ChainEvaluation:
        """Return the log-probs of stored chains under the current network, with gradients."""
        if self.noise_head is None:
            return self._evaluate_sde(velocity, stored)
        return self._evaluate_noise(velocity, stored, self.noise_head)

    # Flow-SDE: step k of each row is stochastic, the others are Euler steps ----------------------------------------

    def _sample_sde(
        self,
        velocity: Velocity,
        shape: tuple[int, int, int],
        generator: RandomSource | None,
        device: torch.device,
    ) -> Chain:
        x = standard_normal(shape, generator, device)
        eps = standard_normal(shape, generator, device)
        source = device if generator is None else generator.device

        def choose(size: list[int], one: torch.Generator | None) -> Tensor:
            return torch.randint(self.num_steps, size, generator=one, device=source)

        chosen = draw_rows(choose, (shape[0],), generator).to(device)
        kept: dict[str, Tensor] = {}
        for i in range(self.num_steps):
            here = (chosen == i)[:, None, None]
            tau = self.times[i].to(device).expand(shape[0])
            v, features = velocity(x, tau)
            sigma = self.sigmas[i].to(device) * here
            mean = step_mean(x, v.float(), tau[:, None, None], self.delta, sigma)
            std = sigma * math.sqrt(self.delta)
            following = mean + std * eps
            now = {"x": x, "next": following, "mean": mean, "features": features}
            kept = {name: torch.where(here, value, kept.get(name, value)) for name, value in now.items()}
            x = following
        std = (self.sigmas * math.sqrt(self.delta)).to(device)[chosen][:, None, None]
        reached = self._executed(kept["next"])
        logprobs = normal_log_prob(reached, self._executed(kept["mean"]), std.expand_as(reached))
        stored = {"flow_x": kept["x"], "flow_next": reached, "flow_step": chosen}
        if self.keep_errors:
            stored["flow_error"] = _standardized(reached, self._executed(kept["mean"]), std)
        return Chain(x, logprobs, stored, kept["features"])

    def _evaluate_sde(self, velocity: Velocity, stored: dict[str, Tensor]) -> ChainEvaluation:
        x = stored["flow_x"]
        step = stored["flow_step"]
        tau = self.times.to(x.device)[step]
        sigma = self.sigmas.to(x.device)[step][:, None, None]
        v, features = velocity(x, tau)
        mean = self._executed(step_mean(x, v.float(), tau[:, None, None], self.delta, sigma))
        std = (sigma * math.sqrt(self.delta)).expand_as(mean)
        reached = stored["flow_next"]
        errors = _standardized(reached, mean, std) if self.keep_errors else None
        return ChainEvaluation(normal_log_prob(reached, mean, std), normal_entropy(std), features, errors)

    # Flow-Noise: all steps are stochastic ------------------------------------------------------------------------

    def _sample_noise(
        self,
        velocity: Velocity,
        shape: tuple[int, int, int],
        generator: RandomSource | None,
        device: torch.device,
        noise_head: NoiseHead,
    ) -> Chain:
        draws = standard_normal((self.num_steps + 1, *shape), generator, device, dim=1)
        x = draws[0]
        total = _start_log_prob(self._executed(x))
        points: list[Tensor] = []
        first: Tensor | None = None
        for i in range(self.num_steps):
            points.append(x)
            mean, std, features = self._noisy_step(velocity, x, i, noise_head)
            x = mean + std * draws[i + 1]
            total = total + normal_log_prob(self._executed(x), self._executed(mean), self._executed(std))
            first = features if first is None else first
        assert first is not None
        stored = {"flow_chain": torch.stack(points, dim=1), "flow_next": self._executed(x).contiguous()}
        return Chain(x, self._joined(total, self.num_steps + 1), stored, first)

    def _evaluate_noise(self, velocity: Velocity, stored: dict[str, Tensor], noise_head: NoiseHead) -> ChainEvaluation:
        chain = stored["flow_chain"]
        total = _start_log_prob(self._executed(chain[:, 0]))
        entropy = torch.zeros_like(total)
        first: Tensor | None = None
        for i in range(self.num_steps):
            mean, std, features = self._noisy_step(velocity, chain[:, i], i, noise_head)
            reached = self._executed(chain[:, i + 1]) if i + 1 < self.num_steps else stored["flow_next"]
            std = self._executed(std)
            total = total + normal_log_prob(reached, self._executed(mean), std)
            entropy = entropy + normal_entropy(std)
            first = features if first is None else first
        assert first is not None
        entropy = self._joined(entropy, self.num_steps)
        return ChainEvaluation(self._joined(total, self.num_steps + 1), entropy, first)

    def _joined(self, total: Tensor, terms: int) -> Tensor:
        return total if self.joint == "sum" else total / terms

    def _noisy_step(
        self, velocity: Velocity, x: Tensor, step: int, noise_head: NoiseHead
    ) -> tuple[Tensor, Tensor, Tensor]:
        v, features = velocity(x, self.times[step].to(x.device).expand(len(x)))
        return x - v.float() * self.delta, noise_head(features), features

    def _executed(self, x: Tensor) -> Tensor:
        return x[:, : self.num_actions, : self.action_dim]
