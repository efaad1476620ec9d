"""The estimators of the benchmark of the learning signal against known values."""

from __future__ import annotations

import learning_signal
import numpy as np
import pytest
from nested_variance import components, explained, gradient_signal, share_intervals


def simulated(sizes=(4000, 5, 3), deviations=(0.5, 1.0, 2.0), seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((sizes[0], 1, 1), (*sizes[:2], 1), sizes)
    parts = [rng.normal(size=shape) for shape in shapes]
    return 7 + sum(deviation * part for deviation, part in zip(deviations, parts, strict=True))


def test_components_of_a_table_of_two_by_two_by_two_by_hand():
    # means of chunks 2, 5 | 7, 12; of states 3.5 | 9.5; of all 6.5
    table = np.array([[[1.0, 3.0], [4.0, 6.0]], [[7.0, 7.0], [10.0, 14.0]]])
    # mean squares: 4 (3^2 + 3^2) / 1 = 72; 2 (2 1.5^2 + 2 2.5^2) / 2 = 17; (1 + 1 + 1 + 1 + 0 + 0 + 4 + 4) / 4 = 3
    assert components(table).variances == pytest.approx([(72 - 17) / 4, (17 - 3) / 2, 3])
    assert components(table).shares.sum() == pytest.approx(100)


def test_components_of_simulated_outcomes_are_those_they_were_drawn_with():
    assert components(simulated()).variances == pytest.approx([0.25, 1, 4], abs=0.12)


def test_components_are_unbiased_and_may_be_negative():
    without = [components(simulated((6, 3, 2), (0.0, 0.0, 1.0), seed)).variances for seed in range(2000)]
    assert np.mean(without, axis=0) == pytest.approx([0, 0, 1], abs=0.03)
    assert np.min(without, axis=0)[0] < 0


def test_shares_where_nothing_varies_are_zero():
    assert components(np.ones((3, 2, 2))).shares.tolist() == [0, 0, 0]


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2), (2, 2, 1)])
def test_an_axis_of_one_is_refused(shape):
    with pytest.raises(ValueError, match="at least 2"):
        components(np.zeros(shape))


def test_the_interval_holds_the_share():
    outcomes = simulated((200, 5, 3))
    low, high = share_intervals(outcomes, np.random.default_rng(1), draws=100).T
    assert (low < components(outcomes).shares).all() and (components(outcomes).shares < high).all()


def test_a_linear_effect_is_found_and_noise_is_not():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(60, 12, 4))
    features[..., 3] = 1.0  # a number that never changes is no direction
    effect = features[..., :2].sum(-1)  # variance 2
    other = rng.normal(size=(60, 12)) * np.sqrt(2)  # as much between chunks that is not linear
    outcomes = (effect + other)[..., None] + rng.normal(size=(60, 12, 2)) + rng.normal(size=(60, 1, 1)) * 5
    found = explained(outcomes, features, rng)
    assert found.directions == 3
    assert found.of_chunks == pytest.approx(50, abs=6)
    assert found.adjusted_r2 == pytest.approx(2 / 4.5, abs=0.06)
    nothing = explained(rng.normal(size=(60, 12, 2)), features, rng)
    assert abs(nothing.adjusted_r2) < 3 * nothing.chance_r2 < 0.05


def test_more_directions_than_chunks_are_refused():
    with pytest.raises(ValueError, match="draw more"):
        explained(np.zeros((2, 2, 2)), np.random.default_rng(0).normal(size=(2, 2, 8)), np.random.default_rng(0))


def test_the_signal_of_gradients_is_unbiased():
    rng = np.random.default_rng(0)
    mean = np.full(50, 0.2)  # squared norm 2
    found = []
    for _ in range(400):
        gradients = mean + rng.normal(size=(8, 50))  # of squared norm 52
        found.append(gradient_signal(gradients @ gradients.T))
    assert np.mean([each.squared_mean for each in found]) == pytest.approx(2, abs=0.15)
    assert np.mean([each.squared_norm for each in found]) == pytest.approx(52, abs=0.5)
    spread = np.std([each.squared_mean for each in found])
    assert np.sqrt(np.mean([each.standard_error**2 for each in found])) == pytest.approx(spread, rel=0.25)


def test_the_share_of_a_larger_batch_has_less_noise():
    found = gradient_signal(3 * np.eye(4) + 1)
    assert found.share(1) == pytest.approx((25, 0)) and found.share(3) == pytest.approx((50, 0))
    assert gradient_signal(np.zeros((4, 4))).share(1) == (0, 0)


def test_advantages_are_those_over_the_other_chunks_of_the_state():
    outcomes = np.array([[[1.0, 3.0], [5.0, 5.0], [0.0, 2.0]]])  # means 2, 5, 1
    assert learning_signal.branch_advantages(outcomes).tolist() == [[-1.0, 3.5, -2.5]]
