"""Real-time chunking: the paper's equations computed otherwise, and what guidance does to each flow family."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tiny_families
import torch
from expect import raises_code
from torch import Tensor

from embodrl.models.flow.flow import integrate
from embodrl.models.flow.rtc import conditioned, drawn_delays, guidance_weight, guided, prefix_weights
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


def published_weights(start: int, end: int, total: int) -> np.ndarray:
    """The soft mask as a recursion-free ramp, the way the authors' own simulation states it (kinetix, cc6c5f5).

    A line that is 1 one step before ``start`` and 0 at ``end``, clipped, bent by ``w (e^w - 1) / (e - 1)``.
    """
    line = 1.0 - (np.arange(total) - (start - 1)) / (end - (start - 1))
    line = np.clip(line, 0.0, 1.0)
    return np.where(np.arange(total) < end, line * np.expm1(line) / np.expm1(1.0), 0.0)


def test_the_soft_mask_is_that_of_the_authors_simulation():
    horizon = 8
    cases = [(d, n) for n in range(horizon + 1) for d in range(n + 1)]
    found = prefix_weights(torch.tensor([d for d, _ in cases]), torch.tensor([n for _, n in cases]), horizon)
    np.testing.assert_allclose(found.numpy(), [published_weights(d, n, horizon) for d, n in cases], atol=1e-6)


def test_the_guidance_weight_is_that_of_the_authors_simulation():
    """There it is ``c / r^2`` of the time t from noise, ``c = (1 - t) / t`` replaced by beta where that is infinite."""
    for limit in (1.0, 5.0, 10.0):
        t = np.arange(10) / 10  # the ten steps from pure noise on
        with np.errstate(divide="ignore"):
            c = np.where(t == 0, limit, (1 - t) / t)
        wanted = np.minimum(c * (t**2 + (1 - t) ** 2) / (1 - t) ** 2, limit)
        np.testing.assert_allclose(guidance_weight(torch.from_numpy(1 - t), limit).numpy(), wanted, rtol=1e-6)


# Trained: the network is given the first actions -------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny_families.FLOW_FAMILIES)
def test_one_noise_level_for_each_action_is_one_for_all_where_they_agree(family):
    policy = tiny_families.build(family, num_action_chunks=4)
    inputs = policy.preprocess(tiny_families.observation(family, batch=2))
    shape = (2, policy.horizon, policy.padded_action_dim)
    x, tau = torch.randn(shape, generator=torch.Generator().manual_seed(0)), torch.tensor([0.3, 0.8])
    with torch.no_grad():
        network = policy.velocity(policy.encode(inputs))
        one, each = network(x, tau)[0], network(x, tau[:, None].expand(shape[:2]))[0]
        moved = tau[:, None].repeat(1, shape[1])
        moved[:, 0] = 0.0
        other = network(x, moved)[0]
    torch.testing.assert_close(each, one, atol=2e-5, rtol=1e-4)
    assert (other - one).abs().max() > 1e-5  # and the level of one action matters


@pytest.mark.parametrize("family", tiny_families.FLOW_FAMILIES)
def test_imitation_gives_the_first_actions_and_learns_the_rest(family):
    policy = tiny_families.build(family, num_action_chunks=4)
    observation = tiny_families.observation(family, batch=6)
    actions = torch.rand(6, policy.action_horizon, policy.action_dim, generator=torch.Generator().manual_seed(1)) - 0.5
    torch.manual_seed(5)
    plain = policy.sft_inputs(observation, actions)
    state = torch.get_rng_state()
    policy.rtc_max_delay = 3
    torch.manual_seed(5)
    batch = policy.sft_inputs(observation, actions)
    assert "given" not in plain and all(torch.equal(batch[name], plain[name]) for name in plain)
    assert not torch.equal(torch.get_rng_state(), state)
    delays = torch.tensor([0, 1, 3, 2, 1, 0])
    batch["given"] = torch.arange(policy.horizon) < delays[:, None]
    batch["action_mask"] = torch.ones(6, policy.action_horizon, dtype=torch.bool)
    batch["action_mask"][3, 3:] = False
    with torch.no_grad():
        loss = policy.sft_loss(batch)[0].item()
        network = policy.velocity(policy.encode(batch))
        x, times = batch["noise"].clone(), torch.zeros(6, policy.horizon)
        total, count = 0.0, 0
        for row, delay in enumerate(delays.tolist()):
            for place in range(policy.horizon):
                tau = 0.0 if place < delay else batch["tau"][row].item()
                times[row, place] = tau
                x[row, place] = tau * batch["noise"][row, place] + (1 - tau) * batch["target"][row, place]
        v = network(x, times)[0]
        for row, delay in enumerate(delays.tolist()):
            for place in range(delay, 3 if row == 3 else policy.action_horizon):
                miss = v[row, place] - (batch["noise"][row, place] - batch["target"][row, place])
                total += miss[: policy.loss_action_dims()].square().sum().item()
                count += policy.loss_action_dims()
        batch["noise"][batch["given"]] = 100.0
        assert policy.sft_loss(batch)[0].item() == pytest.approx(loss, rel=1e-5)  # their noise is nowhere
    assert loss == pytest.approx(total / count, rel=1e-4)


def test_delays_are_drawn_equally_often():
    torch.manual_seed(0)
    counts = torch.bincount(drawn_delays(4000, 3))
    assert counts.tolist() == pytest.approx([1000] * 4, abs=4 * math.sqrt(750))


@pytest.mark.parametrize("family", tiny_families.FLOW_FAMILIES)
def test_a_trained_policy_runs_the_actions_that_it_is_given(family):
    policy = tiny_families.build(family, num_action_chunks=4)
    observation = tiny_families.observation(family, batch=3)
    plain = policy.predict_action_batch(observation, "eval", SamplingParams(), compute_values=False).actions
    policy.rtc_max_delay = 2
    left = np.random.default_rng(0).uniform(-0.4, 0.4, (3, 3, policy.action_dim)).astype(np.float32)
    prefix = ChunkPrefix(left, np.array([3, 3, 3]), np.array([2, 1, 0]))
    found = policy.continue_chunk(observation, prefix, 5.0)
    joints = slice(0, policy.action_dim - 1)  # the last one may be a gripper of two states
    np.testing.assert_allclose(found[0, :2, joints], left[0, :2, joints], atol=1e-5)
    np.testing.assert_allclose(found[1, :1, joints], left[1, :1, joints], atol=1e-5)
    np.testing.assert_allclose(found[2], plain[2], atol=1e-4)
    left[:, 2] = 9.0  # beyond the delay, so not read
    np.testing.assert_array_equal(policy.continue_chunk(observation, prefix, 5.0), found)
    left[0, 0, :3] += 0.3
    assert np.abs(policy.continue_chunk(observation, prefix, 5.0)[0, 2:] - found[0, 2:]).max() > 1e-6
    with raises_code("policy-rtc-delay"):
        policy.continue_chunk(observation, ChunkPrefix(left, np.array([3, 3, 3]), np.array([3, 1, 0])), 5.0)


def test_the_given_actions_stay_and_have_no_noise():
    """Three Euler steps of a linear field by hand: given actions do not move, and the others see tau 0 there."""
    seen = []

    def network(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(tau.clone())
        return x.sum(1, keepdim=True) + tau[..., None], x

    start = torch.tensor([[[1.0], [2.0], [-1.0]]])
    found = integrate(conditioned(network, torch.tensor([[True, False, False]])), start, 2)
    first, second = 2.0, -1.0
    for tau in (1.0, 0.5):
        whole = 1.0 + first + second
        first, second = first - 0.5 * (whole + tau), second - 0.5 * (whole + tau)
    assert found.flatten().tolist() == pytest.approx([1.0, first, second])
    assert [tau.tolist() for tau in seen] == [[[0.0, 1.0, 1.0]], [[0.0, 0.5, 0.5]]]
