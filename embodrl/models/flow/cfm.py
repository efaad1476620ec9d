"""Flow matching without log-probs: chunks from the plain ODE, scored by the conditional flow matching (CFM) loss.

Flow Policy Optimization (McAllister et al. 2025, "Flow Matching Policy Gradients", arXiv 2507.21053) replaces PPO's
ratio by ``exp(L_old - L)``, where ``L`` is the mean squared velocity error over N pairs of noise and time, drawn with
the chunk and stored: a Monte Carlo estimate of the CFM loss at the executed actions, whose negative is a lower bound of
their log-likelihood up to a weighting of the times and a constant. ``-L`` therefore takes the place of log-probs, and
works with every ratio-based loss.
Times are stratified, one per N-th of [0, 1], which lowers the variance and keeps their distribution uniform.
Shapes: B batch, N samples, C actions run, H action horizon, A action dimensions, D padded ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodrl.data.rng import RandomSource, draw_rows
from embodrl.models.common.sampling import standard_normal
from embodrl.models.flow.flow import Chain, ChainEvaluation, Times, Velocity, integrate_with_features


class CfmSampler:
    """Draws chunks with the ODE from random noise, and evaluates them by their flow-matching loss.

    Args:
        num_steps: K of the ODE.
        num_samples: N.
        num_actions: C.
        action_dim: A.
        times: noise levels of the ODE steps.
        keep_errors: whether to store velocity errors, as ``flow_error``.
    """

    def __init__(
        self, num_steps: int, num_samples: int, num_actions: int, action_dim: int, times: Times, keep_errors: bool
    ) -> None:
        self.num_steps = num_steps
        self.num_samples = num_samples
        self.num_actions = num_actions
        self.action_dim = action_dim
        self.times = times
        self.keep_errors = keep_errors

    @property
    def trained_steps(self) -> int:
        """Action expert passes per row with gradients in an update: N."""
        return self.num_samples

    def stored_numbers(self, horizon: int, padded_action_dim: int) -> int:
        """Return the number of stored values per chunk: actions, noise, times, and errors if kept."""
        kept = self.num_samples * self.num_actions * self.action_dim if self.keep_errors else 0
        return (1 + self.num_samples) * horizon * padded_action_dim + self.num_samples + kept

    def sample(
        self,
        velocity: Velocity,
        shape: tuple[int, int, int],
        generator: RandomSource | None,
        device: torch.device,
    ) -> Chain:
        """Draw a chunk per row; arguments as in ``flow.Sampler.sample``."""
        batch, horizon, dims = shape
        source = device if generator is None else generator.device
        start = standard_normal(shape, generator, device)
        noise = standard_normal((batch, self.num_samples, horizon, dims), generator, device)

        def uniform(size: list[int], one: torch.Generator | None) -> Tensor:
            return torch.rand(size, generator=one, device=source)

        within = draw_rows(uniform, (batch, self.num_samples), generator).to(device)
        tau = (torch.arange(self.num_samples, device=device) + within) / self.num_samples
        actions, features = integrate_with_features(velocity, start, self.num_steps, self.times)
        stored = {"flow_target": actions, "flow_noise": noise, "flow_tau": tau}
        errors, _ = self._errors(velocity, stored)
        if self.keep_errors:
            stored["flow_error"] = errors
        return Chain(actions, _log_prob(errors), stored, features[0])

    def evaluate(self, velocity: Velocity, stored: dict[str, Tensor]) -> ChainEvaluation:
        """Return the negative losses of stored chunks, with gradients; entropy is 0."""
        errors, features = self._errors(velocity, stored)
        logprobs = _log_prob(errors)
        return ChainEvaluation(logprobs, torch.zeros_like(logprobs), features, errors)

    def _errors(self, velocity: Velocity, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return errors ``float32[B,N,C,A]``, ``v(x, tau) - (noise - actions)``, and features of the first sample."""
        target = stored["flow_target"]
        errors: list[Tensor] = []
        first: Tensor | None = None
        for noise, tau in zip(stored["flow_noise"].unbind(1), stored["flow_tau"].unbind(1), strict=True):
            mixed = tau[:, None, None]
            v, features = velocity(mixed * noise + (1.0 - mixed) * target, tau)
            error = v.float() - (noise - target)
            errors.append(error[:, : self.num_actions, : self.action_dim])
            first = features if first is None else first
        assert first is not None
        return torch.stack(errors, 1), first


def _log_prob(errors: Tensor) -> Tensor:
    return -errors.square().mean(1)
