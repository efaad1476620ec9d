"""Real-time chunking: the paper's equations computed otherwise, and what guidance does to each flow family."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tiny_families
import torch
from expect import raises_code
from torch import Tensor

from embodrl.models.common.flow import integrate
from embodrl.models.common.rtc import guidance_weight, guided, prefix_weights
from embodrl.types import ChunkPrefix, SamplingParams


def weight_of(i: int, d: int, s: int, horizon: int) -> float:
    """Equation 5, with the paper's names."""
    if i < d:
        return 1.0
    if i >= horizon - s:
        return 0.0
    c = (horizon - s - i) / (horizon - s - d + 1)
    return c * (math.e**c - 1) / (math.e - 1)


def test_weights_are_one_then_fade_then_zero():
    cases = [(0, 3), (2, 4), (3, 3), (5, 8)]  # d, s
    found = prefix_weights(torch.tensor([d for d, _ in cases]), torch.tensor([8 - s for _, s in cases]), 8)
    for row, (d, s) in zip(found, cases, strict=True):
        if d <= 8 - s:
            assert row.tolist() == pytest.approx([weight_of(i, d, s, 8) for i in range(8)], rel=1e-6)


def test_the_guidance_is_clipped():
    """Equations 2 and 4 in the paper's time t, from noise 0 to data 1."""
    for t in (0.1, 0.5, 0.9):
        r_squared = (1 - t) ** 2 / (t**2 + (1 - t) ** 2)
        wanted = min(5.0, (1 - t) / (t * r_squared))
        assert guidance_weight(torch.tensor([1 - t]), 5.0).item() == pytest.approx(wanted, rel=1e-5)
    assert guidance_weight(torch.tensor([1.0]), 5.0).item() == 5.0


def test_guided_denoising_is_that_of_the_paper():
    """A linear field mixes all actions: the Jacobian is written out, in numpy, in the paper's time and direction."""
    rng = np.random.default_rng(0)
    horizon, dims, steps, limit = 3, 2, 5, 4.0
    matrix = rng.normal(size=(6, 6)) * 0.3
    noise, wish = rng.normal(size=(2, 3, 2)), rng.normal(size=(2, 3, 2))
    weights = np.repeat(prefix_weights(torch.tensor([1, 0]), torch.tensor([2, 3]), horizon).numpy(), dims, axis=1)

    def network(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:  # here: noise minus data
        flat = x.flatten(1) @ torch.from_numpy(matrix).float().T + tau[:, None]
        return flat.view_as(x), x

    wanted = noise.reshape(2, 6)
    for step in range(steps):
        t = step / steps
        v = -(wanted @ matrix.T + (1 - t))
        estimate = wanted + (1 - t) * v
        jacobian = np.eye(6) - (1 - t) * matrix
        pull = ((wish.reshape(2, 6) - estimate) * weights) @ jacobian
        r_squared = (1 - t) ** 2 / (t**2 + (1 - t) ** 2)
        wanted = wanted + (v + min(limit, (1 - t) / (t * r_squared) if t else math.inf) * pull) / steps
    held = torch.from_numpy(weights).float().view(2, 3, 2)
    velocity = guided(network, torch.from_numpy(wish).float(), held, limit)
    with torch.no_grad():
        found = integrate(velocity, torch.from_numpy(noise).float(), steps)
    np.testing.assert_allclose(found.flatten(1).numpy(), wanted, atol=1e-5)


@pytest.mark.parametrize("delay", [1, 2])
def test_a_chunk_stays_on_the_side_that_the_last_one_chose(delay):
    """Data are two chunks, +1 and -1 throughout: the field is exact. Without guidance the noise chooses the side."""

    def network(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        left = tau[:, None, None]
        data = torch.tanh((1.0 - left) * x.sum((1, 2), keepdim=True) / left.square()).expand_as(x)
        return (x - data) / left, x

    noise = torch.randn(64, 6, 2, generator=torch.Generator().manual_seed(0))
    noise = noise - noise.mean((1, 2), keepdim=True) + 0.2  # all towards +1
    last = torch.full_like(noise, -1.0)
    weights = prefix_weights(torch.full((64,), delay), torch.full((64,), 4), 6)[..., None].expand_as(noise)
    with torch.no_grad():
        free = integrate(network, noise, 10)
        held = integrate(guided(network, last, weights, 5.0), noise, 10)
    assert (free - 1.0).abs().max() < 1e-3  # a step of 2 at the border of the chunks
    assert (held + 1.0).abs().max() < 0.1


@pytest.mark.parametrize("family", tiny_families.FLOW_FAMILIES)
def test_a_family_continues_chunks(family):
    policy = tiny_families.build(family, num_action_chunks=4)
    observation = tiny_families.observation(family, batch=2)
    plain = policy.predict_action_batch(observation, "eval", SamplingParams(), compute_values=False).actions
    nothing = ChunkPrefix(np.zeros((2, 1, policy.action_dim), np.float32), np.zeros(2, np.int64), np.zeros(2, np.int64))
    np.testing.assert_array_equal(policy.continue_chunk(observation, nothing, 5.0), plain)
    left = np.random.default_rng(0).uniform(-0.4, 0.4, (2, 3, policy.action_dim)).astype(np.float32)
    held = ChunkPrefix(left, np.array([3, 0]), np.array([2, 0]))
    found = policy.continue_chunk(observation, held, 5.0)
    np.testing.assert_allclose(found[1], plain[1], atol=1e-6)  # in one batch with a row that is guided
    joints = slice(0, policy.action_dim - 1)  # the last one may be a gripper of two states
    near, far = (np.abs(actions[0, :2, joints] - left[0, :2, joints]).mean() for actions in (found, plain))
    assert near < 0.5 * far


def test_other_policies_say_that_they_cannot():
    policy = tiny_families.build("openvla")
    with raises_code("policy-continues-no-chunk"):
        policy.continue_chunk(tiny_families.observation("openvla"), ChunkPrefix.stack([(np.zeros((1, 7)), 0)]), 5.0)
