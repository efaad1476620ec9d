"""Equations of offline algorithms, with values computed by hand."""

from __future__ import annotations

import math

import torch

from embodrl.algorithms.offline import (
    advantage_indicator,
    advantage_weights,
    expectile_loss,
    n_step_advantages,
    rewards_to_go,
    steps_to_go_rewards,
    two_hot,
)


def test_an_expectile_weighs_what_is_above_more() -> None:
    loss = expectile_loss(torch.tensor([2.0, -2.0, 0.0, 0.5]), 0.7)
    assert torch.allclose(loss, torch.tensor([0.7 * 4, 0.3 * 4, 0.0, 0.7 * 0.25]))
    assert torch.allclose(expectile_loss(torch.tensor([3.0, -3.0]), 0.5), torch.tensor([4.5, 4.5]))


def test_its_minimum_is_the_expectile() -> None:
    """Of 0 and 1 the expectile tau is tau: tau (1 - v) = (1 - tau) v."""
    values = torch.linspace(0, 1, 1001)
    losses = [float(expectile_loss(torch.tensor([0.0, 1.0]) - v, 0.9).sum()) for v in values]
    assert math.isclose(float(values[losses.index(min(losses))]), 0.9, abs_tol=1e-3)


def test_weights_grow_exponentially_up_to_a_bound() -> None:
    weights = advantage_weights(torch.tensor([0.0, 1.0, -1.0, 10.0]), 3.0, 100.0)
    assert torch.allclose(weights, torch.tensor([1.0, math.exp(3), math.exp(-3), 100.0]))
    assert torch.equal(advantage_weights(torch.tensor([5.0, -5.0]), 0.0, 100.0), torch.ones(2))


def test_returns_count_the_steps_that_are_left() -> None:
    assert rewards_to_go(steps_to_go_rewards(4, True, 300.0)).tolist() == [-3, -2, -1, 0]
    assert rewards_to_go(steps_to_go_rewards(3, False, 300.0)).tolist() == [-302, -301, -300]


def test_advantages_add_up_n_rewards_and_the_value_after_them() -> None:
    rewards, values = torch.tensor([-1.0, -1.0, -1.0, 0.0]), torch.tensor([-5.0, -4.0, -2.0, -1.0])
    # A_0 = -1 - 1 + V_2 - V_0 = -2 - 2 + 5; from the third frame on the episode ends first.
    assert n_step_advantages(rewards, values, 2).tolist() == [1.0, -2 - 1 + 4, -1 + 2, 0 + 1]
    assert n_step_advantages(rewards, values, 9).tolist() == (rewards_to_go(rewards) - values).tolist()


def test_the_indicator_marks_the_best_share() -> None:
    advantages = torch.tensor([0.1, -3.0, 0.2, 5.0, 0.0, -1.0, 0.3, -2.0, 1.0, 0.4])
    assert advantage_indicator(advantages, 0.3).nonzero()[:, 0].tolist() == [3, 8, 9]
    assert advantage_indicator(torch.zeros(4), 0.5).all()  # equal ones are at the percentile


def test_bins_share_a_target_by_its_distance() -> None:
    centers = torch.linspace(-1.0, 0.0, 5)
    shares = two_hot(torch.tensor([-1.0, 0.0, -0.5, -0.3125]), centers)
    assert torch.allclose(shares[3], torch.tensor([0.0, 0.0, 0.25, 0.75, 0.0]))
    assert torch.allclose(shares @ centers, torch.tensor([-1.0, 0.0, -0.5, -0.3125]))
    assert torch.allclose(shares.sum(1), torch.ones(4))
