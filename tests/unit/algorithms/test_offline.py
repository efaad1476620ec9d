"""Equations of offline algorithms, with values computed by hand."""

from __future__ import annotations

import math

import torch

from embodrl.algorithms.offline import advantage_weights, expectile_loss


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
