"""Flow matching as a stochastic policy: the step's formula, the sampler's distribution, log-probs, and the ODE."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from embodrl.models.flow.flow import (
    NoiseHead,
    Sampler,
    denoising_times,
    integrate,
    normal_entropy,
    normal_log_prob,
    reversed_velocity,
    sde_sigma,
    step_mean,
)

CPU = torch.device("cpu")
ETA = 0.5


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear(a: float, c: float):
    """A velocity ``a x + c (1 + tau)``; its features are its input."""

    def velocity(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        return a * x + c * (1.0 + tau[:, None, None]), x

    return velocity


def sigma_of(t: float, num_steps: int) -> float:
    """The noise scale, written out: eta sqrt(t / (1 - t)), and at t = 1 with the next time in the denominator."""
    left = 1.0 - 1.0 / num_steps if t == 1.0 else t
    return ETA * math.sqrt(t / (1.0 - left))


# The step ------------------------------------------------------------------------------------------------------------


def test_times_go_from_noise_to_data():
    assert denoising_times(4) == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_sigma():
    # K = 4: tau 1 -> sqrt(1 / .25) = 2, .75 -> sqrt(3), .5 -> 1, .25 -> sqrt(1/3); times eta.
    found = [sde_sigma(step, 4, ETA) for step in range(4)]
    assert found == pytest.approx([1.0, 0.5 * math.sqrt(3), 0.5, 0.5 / math.sqrt(3)])


@pytest.mark.parametrize("num_steps", [1, 2, 4, 10])
def test_mean_of_a_step_is_the_stochastic_differential_equations(num_steps: int):
    """x - [v + sigma^2 / (2 t) (x + (1 - t) v)] delta, in float64 and in another form than the code's."""
    rng = np.random.default_rng(0)
    delta = 1.0 / num_steps
    for step, t in enumerate(denoising_times(num_steps)[:-1]):
        x, v = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3, 4))
        sigma = sigma_of(t, num_steps)
        wanted = x - (v + sigma**2 / (2 * t) * (x + (1 - t) * v)) * delta
        tensors = [torch.from_numpy(value) for value in (x, v)]
        one = torch.ones(2, 1, 1, dtype=torch.float64)
        found = step_mean(*tensors, t * one, delta, sde_sigma(step, num_steps, ETA) * one)
        np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=1e-12)


def test_a_step_without_noise_is_eulers():
    x, v = torch.randn(2, 3, 4, generator=generator()), torch.randn(2, 3, 4, generator=generator(1))
    zero, half = torch.zeros(2, 1, 1), torch.full((2, 1, 1), 0.5)
    torch.testing.assert_close(step_mean(x, v, half, 0.25, zero), x - 0.25 * v)


def test_a_step_keeps_the_marginals_of_the_flow():
    """Gaussian data N(m, s^2) has the marginals N((1-t) m, t^2 + (1-t)^2 s^2) and a linear velocity.

    A stochastic step of size delta must reach the later marginal up to delta^2.
    """
    m, s, t, eta = 0.7, 0.4, 0.6, 0.5
    errors = []
    for delta in (1e-2, 1e-3):
        mean, variance = (1 - t) * m, t**2 + (1 - t) ** 2 * s**2
        # v = E[noise - data | x] with Cov(noise - data, x) = t - (1 - t) s^2
        gain = (t - (1 - t) * s**2) / variance

        def drift(x: float, delta: float = delta, gain: float = gain, mean: float = mean) -> float:
            v = -m + gain * (x - mean)
            arguments = [torch.full((1, 1, 1), value, dtype=torch.float64) for value in (x, v, t)]
            sigma = torch.full((1, 1, 1), eta * math.sqrt(t / (1 - t)), dtype=torch.float64)
            return float(step_mean(*arguments, delta, sigma))

        slope = drift(1.0) - drift(0.0)
        later = t - delta
        sigma = eta * math.sqrt(t / (1 - t))
        errors.append(
            (
                abs(drift(mean) - (1 - later) * m),
                abs(slope**2 * variance + sigma**2 * delta - (later**2 + (1 - later) ** 2 * s**2)),
            )
        )
    for coarse, fine in zip(*errors, strict=True):
        assert fine < 1e-5 and fine < coarse / 50 + 1e-12


def test_normal_density_and_entropy():
    # N(1, 2) at 2: -1/8 - log 2 - log(2 pi)/2
    found = normal_log_prob(torch.tensor(2.0), torch.tensor(1.0), torch.tensor(2.0))
    assert float(found) == pytest.approx(-0.125 - math.log(2.0) - 0.5 * math.log(2 * math.pi), abs=1e-6)
    assert float(normal_entropy(torch.tensor(2.0))) == pytest.approx(0.5 + 0.5 * math.log(2 * math.pi * 4), abs=1e-6)


# The sampler ---------------------------------------------------------------------------------------------------------


def propagate(a: float, c: float, num_steps: int, chosen: int) -> tuple[float, float]:
    """Mean and variance of the end of a chain under a linear velocity, step by step in plain numbers."""
    mean, variance, delta = 0.0, 1.0, 1.0 / num_steps
    for step in range(num_steps):
        t = 1.0 - step * delta
        drift = c * (1.0 + t)
        if step != chosen:
            mean, variance = mean - (a * mean + drift) * delta, (1 - a * delta) ** 2 * variance
            continue
        sigma = sigma_of(t, num_steps)
        s = sigma**2 / (2 * t)
        slope = 1 - (a + s * (1 + (1 - t) * a)) * delta
        mean = slope * mean - (drift + s * (1 - t) * drift) * delta
        variance = slope**2 * variance + sigma**2 * delta
    return mean, variance


def test_flow_sde_has_the_mean_and_variance_of_the_formula():
    a, c, num_steps, rows = 0.8, -0.6, 3, 6000
    sampler = Sampler(num_steps, ETA, num_actions=2, action_dim=3)
    chain = sampler.sample(linear(a, c), (rows, 4, 5), generator(1), CPU)
    steps = chain.stored["flow_step"]
    assert torch.bincount(steps, minlength=num_steps).min() > 0.3 * rows
    for chosen in range(num_steps):
        end = chain.actions[steps == chosen].double()
        mean, variance = propagate(a, c, num_steps, chosen)
        count = end.numel()
        assert abs(float(end.mean()) - mean) < 4 * math.sqrt(variance / count), chosen
        assert abs(float(end.var()) - variance) < 4 * variance * math.sqrt(2 / count), chosen


def test_flow_sde_stores_what_its_log_prob_needs():
    sampler = Sampler(3, ETA, num_actions=2, action_dim=3)
    chain = sampler.sample(linear(0.8, -0.6), (16, 4, 5), generator(1), CPU)
    stored = chain.stored
    assert stored["flow_x"].shape == (16, 4, 5) and stored["flow_next"].shape == (16, 2, 3)
    assert chain.logprobs.shape == (16, 2, 3)
    for row in range(16):
        step = int(stored["flow_step"][row])
        t, sigma = 1 - step / 3, sigma_of(1 - step / 3, 3)
        x = stored["flow_x"][row, :2, :3].double()
        v = 0.8 * x - 0.6 * (1 + t)
        mean = x - (v + sigma**2 / (2 * t) * (x + (1 - t) * v)) / 3
        std = sigma / math.sqrt(3)
        density = -0.5 * ((stored["flow_next"][row] - mean) / std) ** 2 - math.log(std * math.sqrt(2 * math.pi))
        torch.testing.assert_close(chain.logprobs[row].double(), density, rtol=0, atol=1e-5)
    torch.testing.assert_close(chain.features, stored["flow_x"])


@pytest.mark.parametrize("learned_noise", [False, True])
def test_evaluation_gives_the_log_probs_of_the_rollout(learned_noise: bool):
    head = noise_head(5) if learned_noise else None
    sampler = Sampler(4, ETA, 2, 3, head)
    chain = sampler.sample(linear(0.8, -0.6), (8, 4, 5), generator(2), CPU)
    again = sampler.evaluate(linear(0.8, -0.6), chain.stored)
    torch.testing.assert_close(again.logprobs, chain.logprobs, rtol=0, atol=1e-6)
    torch.testing.assert_close(again.features, chain.features)
    other = sampler.evaluate(linear(0.7, -0.6), chain.stored)
    assert (other.logprobs - chain.logprobs).abs().max() > 1e-3


def test_entropy_of_flow_sde_is_that_of_its_step():
    sampler = Sampler(4, ETA, 2, 3)
    chain = sampler.sample(linear(0.8, -0.6), (8, 4, 5), generator(2), CPU)
    entropy = sampler.evaluate(linear(0.8, -0.6), chain.stored).entropy
    for row, step in enumerate(chain.stored["flow_step"].tolist()):
        std = sigma_of(1 - step / 4, 4) / 2
        wanted = 0.5 * math.log(2 * math.pi * math.e * std**2)
        torch.testing.assert_close(entropy[row], torch.full((2, 3), wanted), rtol=0, atol=1e-5)


def noise_head(feature_dim: int) -> NoiseHead:
    head = NoiseHead(feature_dim, 5, 0.08, 0.16, hidden_sizes=(6,))
    head.init_weights(generator(3))
    for layer in head.layers:
        layer.weight.data.mul_(5.0)
    return head


def test_learned_noise_stays_within_its_bounds():
    head = noise_head(5)
    head.layers[-1].weight.data.mul_(100.0)
    std = head(100.0 * torch.randn(500, 5, generator=generator(4))).detach()
    assert float(std.min()) == pytest.approx(0.08, abs=1e-4) and float(std.max()) == pytest.approx(0.16, abs=1e-4)
    for layer in head.layers:
        layer.weight.data.zero_()
    # tanh(0) is the middle of the log-variance, so the geometric mean of the deviations.
    assert float(head(torch.zeros(1, 5)).detach()[0, 0]) == pytest.approx(math.sqrt(0.08 * 0.16), abs=1e-6)


@pytest.mark.parametrize("joint", ["sum", "mean"])
def test_joint_log_prob_covers_the_start_and_the_steps(joint: Literal["sum", "mean"]):
    head, num_steps = noise_head(5), 3
    sampler = Sampler(num_steps, ETA, 2, 3, head, joint)
    chain = sampler.sample(linear(0.8, -0.6), (8, 4, 5), generator(2), CPU)
    points = chain.stored["flow_chain"]
    assert points.shape == (8, num_steps, 4, 5)
    reached = [*points.unbind(1)[1:], chain.actions]
    total = -0.5 * points[:, 0].square() - 0.5 * math.log(2 * math.pi)
    entropy = torch.zeros(8, 4, 5)
    for step, (x, following) in enumerate(zip(points.unbind(1), reached, strict=True)):
        mean = x - (0.8 * x - 0.6 * (2 - step / num_steps)) / num_steps
        with torch.no_grad():
            std = head(x)
        total = total - 0.5 * ((following - mean) / std) ** 2 - (std * math.sqrt(2 * math.pi)).log()
        entropy = entropy + 0.5 * (2 * math.pi * math.e * std**2).log()
    if joint == "mean":
        total, entropy = total / (num_steps + 1), entropy / num_steps
    torch.testing.assert_close(chain.logprobs, total[:, :2, :3], rtol=0, atol=2e-5)
    result = sampler.evaluate(linear(0.8, -0.6), chain.stored)
    torch.testing.assert_close(result.entropy, entropy[:, :2, :3], rtol=0, atol=1e-5)


def test_ratios_of_the_joint_log_prob_average_to_one():
    """E[p_new / p_old] under the old policy is 1; of the mean over the steps it is not."""
    head, rows = noise_head(5), 20_000
    old, new = linear(0.8, -0.6), linear(0.8, -0.57)
    averages = {}
    for joint in ("sum", "mean"):
        sampler = Sampler(3, ETA, 2, 3, head, joint)
        chain = sampler.sample(old, (rows, 4, 5), generator(4), CPU)
        with torch.no_grad():
            ratio = (sampler.evaluate(new, chain.stored).logprobs - chain.logprobs).sum((1, 2)).exp()
        averages[joint] = (float(ratio.mean()), float(ratio.std()) / math.sqrt(rows))
    average, error = averages["sum"]
    assert abs(average - 1.0) < 4 * error
    average, error = averages["mean"]
    assert abs(average - 1.0) > 4 * error


def test_learned_noise_has_the_deviation_that_the_head_says():
    head, rows = noise_head(5), 4000
    for layer in head.layers:
        layer.weight.data.zero_()
    sampler = Sampler(1, ETA, 2, 3, head)
    chain = sampler.sample(linear(0.0, 0.5), (rows, 4, 5), generator(2), CPU)
    noise = chain.actions - (chain.stored["flow_chain"][:, 0] - 1.0)  # v = .5 (1 + tau) = 1, over the one step
    count = noise.numel()
    variance = 0.08 * 0.16
    assert abs(float(noise.mean())) < 4 * math.sqrt(variance / count)
    assert abs(float(noise.var()) - variance) < 4 * variance * math.sqrt(2 / count)


@pytest.mark.parametrize("learned_noise", [False, True])
def test_draws_are_a_function_of_the_seed(learned_noise: bool):
    sampler = Sampler(4, ETA, 2, 3, noise_head(5) if learned_noise else None)
    first, again, other = (sampler.sample(linear(0.8, 0.1), (8, 4, 5), generator(s), CPU) for s in (7, 7, 8))
    assert torch.equal(first.actions, again.actions) and torch.equal(first.logprobs, again.logprobs)
    assert not torch.equal(first.actions, other.actions)
    # Another network takes as many draws, so that what is drawn next does not depend on it.
    left = [generator(7), generator(7)]
    for source, a in zip(left, (0.8, -2.0), strict=True):
        sampler.sample(linear(a, 0.1), (8, 4, 5), source, CPU)
    assert torch.equal(torch.randn(3, generator=left[0]), torch.randn(3, generator=left[1]))


# The ODE -------------------------------------------------------------------------------------------------------------


def test_euler_follows_a_known_field():
    # dx/dtau = a x + c (1 + tau): Euler's recursion, and its limit from the closed form of the linear equation.
    a, c = 0.8, -0.6
    start = torch.tensor([1.5]).view(1, 1, 1)
    x = 1.5
    for step in range(4):
        x -= (a * x + c * (1 + (1 - step / 4))) / 4
    assert float(integrate(linear(a, c), start, 4)) == pytest.approx(x, abs=1e-6)
    # x(tau) = k exp(a tau) - c (1 + tau) / a - c / a^2 with x(1) = 1.5
    k = (1.5 + 2 * c / a + c / a**2) / math.exp(a)
    assert float(integrate(linear(a, c), start, 2000)) == pytest.approx(k - c / a - c / a**2, abs=2e-3)


def test_a_straight_flow_reaches_the_data_in_one_step():
    data, noise = torch.randn(2, 3, 4, generator=generator()), torch.randn(2, 3, 4, generator=generator(1))

    def velocity(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        return noise - data, x

    torch.testing.assert_close(integrate(velocity, noise, 1), data)
    torch.testing.assert_close(integrate(velocity, noise, 7), data)


def test_the_reversed_convention_ends_at_the_same_data():
    """A network of time from noise (0) to data (1), whose velocity is data - noise."""
    data, noise = torch.randn(2, 3, 4, generator=generator()), torch.randn(2, 3, 4, generator=generator(1))
    seen: list[float] = []

    def network(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(float(t[0]))
        torch.testing.assert_close(x, (1 - t[:, None, None]) * noise + t[:, None, None] * data)
        return data - noise, x

    torch.testing.assert_close(integrate(reversed_velocity(network), noise, 4), data)
    assert seen == [0.0, 0.25, 0.5, 0.75]


def test_the_reversed_step_is_the_one_that_gr00t_writes():
    """In its time, noise and data weigh 1 - (t + d) - sigma^2 d / (2 (1 - t)) and t + d, sigma eta sqrt((1-t)/t)."""
    x, v = torch.randn(2, 3, 4, generator=generator()).double(), torch.randn(2, 3, 4, generator=generator(1)).double()
    t, delta = 0.25, 0.25
    sigma = ETA * math.sqrt((1 - t) / t)
    noise, data = x - v * t, x + v * (1 - t)
    wanted = noise * (1 - (t + delta) - sigma**2 * delta / (2 * (1 - t))) + data * (t + delta)
    one = torch.ones(2, 1, 1, dtype=torch.float64)
    torch.testing.assert_close(step_mean(x, -v, (1 - t) * one, delta, sde_sigma(1, 4, ETA) * one), wanted)
