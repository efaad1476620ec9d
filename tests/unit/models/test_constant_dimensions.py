"""A dimension that never moved in training is normalised by 1, by statistics of any kind; others are as they were."""

import json
from pathlib import Path

import numpy as np
import pytest

from embodrl.data.statistics import dimension_stats
from embodrl.learners.imitation_policy import constant_dimensions
from embodrl.models.common.config_file import fields_of
from embodrl.models.common.norm_stats import ActionStats, MeanStd, Quantiles, choose_stats, stats_sets
from embodrl.models.gr00t.robots import KeyStats
from embodrl.models.openpi.config import Normalization
from embodrl.models.openpi.stats import choose
from embodrl.models.openvla_oft.config import ProprioStats

REAL = Path(__file__).resolve().parents[4] / "shared/real_fixtures/openpi/pi05_simpler_bridge.norm_stats.json"
LOW, HIGH, ALL = np.array([0.0, 0.3, -1.0]), np.array([0.0, 0.3 + 1e-8, 1.0]), np.ones(3, np.bool_)
KINDS = {
    "mean_std": MeanStd((LOW + HIGH) / 2, HIGH - LOW, 1e-8).normalize,
    "quantiles": Quantiles(LOW, HIGH, 1e-8).normalize,
    "actions": ActionStats("x", LOW, HIGH, ALL).normalize,
    "proprio": ProprioStats(LOW, HIGH, ALL).normalize,
    "gr00t": KeyStats("x", "mean_std", LOW, HIGH).scale,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_never_moved_is_normalised_by_one(kind: str) -> None:
    rest = LOW.copy()
    moved = KINDS[kind](rest + 1e-3) - KINDS[kind](rest)
    assert np.abs(moved).max() <= 2.1e-3


STILL = {
    "mean_std": MeanStd((LOW + HIGH) / 2, HIGH - LOW, 1e-8),
    "quantiles": Quantiles(LOW, HIGH, 1e-8),
    "actions": ActionStats("x", LOW, HIGH, ALL),
    "gr00t mean_std": KeyStats("x", "mean_std", LOW, HIGH),
    "gr00t min_max": KeyStats("x", "min_max", LOW, HIGH),
}


@pytest.mark.parametrize("kind", STILL)
@pytest.mark.parametrize("said", [-5.0, 0.7, 5.0])
def test_an_action_that_never_moved_is_held_still_whatever_the_network_says(kind: str, said: float) -> None:
    np.testing.assert_allclose(STILL[kind].unnormalize(np.full(3, said))[:2], LOW[:2], atol=1e-7)


@pytest.mark.parametrize("scaling", [MeanStd(LOW, HIGH - LOW), Quantiles(LOW, HIGH)])
def test_what_a_still_action_can_not_say_is_out_of_range(scaling: MeanStd | Quantiles) -> None:
    assert np.isinf(scaling.scale(LOW + 0.01)).tolist() == [True, True, False]
    assert (scaling.scale(LOW) == scaling.normalize(LOW)).all()


def test_a_line_names_the_actions_that_are_held_still(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "embodrl")
    q01, q99 = LOW.tolist(), HIGH.tolist()
    choose_stats(stats_sets(fields_of({"robot": {"action": {"q01": q01, "q99": q99}}}, "a file")), None, 3, "a file")
    parts = fields_of({"robot": {"actions": {"q01": q01, "q99": q99}}}, "a file")
    choose(stats_sets(parts), None, Normalization("identity", "quantiles", 1e-6), 3, "a file")
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == [[0, 1], [0, 1]]


NOISE = np.array([2e-8, 2e-8, 1e-3])
"""Ranges of two dimensions around 0 that are noise, and of one that is small and moves."""
LEAST, MOST = -NOISE / 2, NOISE / 2
AROUND_0 = {
    "mean_std": MeanStd(np.zeros(3), MOST, 1e-8),
    "quantiles": Quantiles(LEAST, MOST, 1e-8),
    "actions": ActionStats("x", LEAST, MOST, ALL),
    "proprio": ProprioStats(LEAST, MOST, ALL),
    "gr00t mean_std": KeyStats("x", "mean_std", LEAST, MOST),
    "gr00t min_max": KeyStats("x", "min_max", LEAST, MOST),
    "gr00t q99": KeyStats("x", "q99", LEAST, MOST),
    "gr00t bounded": KeyStats("x", "bounded", LEAST, MOST),
}


@pytest.mark.parametrize("kind", AROUND_0)
def test_noise_around_0_is_no_movement_and_a_millimetre_is(kind: str) -> None:
    normalize = AROUND_0[kind].normalize
    moved = np.abs(normalize(LEAST + 1e-3) - normalize(LEAST))
    assert moved[:2].max() <= 2.1e-3
    assert np.ptp([normalize(LEAST)[2], normalize(MOST)[2]]) == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("kind", ["mean_std", "quantiles", "actions"])
def test_an_action_that_is_noise_is_held_still_and_its_noise_can_be_said(kind: str) -> None:
    stats = AROUND_0[kind]
    assert isinstance(stats, MeanStd | Quantiles | ActionStats)
    np.testing.assert_allclose(stats.unnormalize(np.full(3, 3.0))[:2], 0, atol=1e-7)
    assert stats.constant.tolist() == [True, True, False]
    if isinstance(stats, ActionStats):
        assert not stats.outside(MOST).any()
    else:
        assert np.isfinite(stats.scale(MOST)).all()


def test_statistics_of_noise_around_0_are_told_as_constant() -> None:
    values = np.random.default_rng(0).normal(size=(200, 3)) * [1e-9, 1e-8, 1e-3]
    assert constant_dimensions(dimension_stats(values)[0]) == [0, 1]


@pytest.mark.parametrize("scale", [1e-1, 1.0, 1e5])
def test_what_moves_is_normalised_as_before(scale: float) -> None:
    mean, std, x = np.array([0.2, -3.0]) * scale, np.array([0.5, 1e-4]) * scale, np.array([0.4, 1.0]) * scale
    assert (MeanStd(mean, std).normalize(x) == (x - mean) / (std + 1e-6)).all()
    ends = (mean - std, mean + std)
    assert (Quantiles(*ends).normalize(x) == (x - ends[0]) / (ends[1] - ends[0] + 1e-6) * 2.0 - 1.0).all()


def test_the_padding_of_a_public_state_is_constant() -> None:
    if not REAL.is_file():
        pytest.skip(f"no {REAL}")
    stats = json.loads(REAL.read_text())["norm_stats"]["state"]
    assert 6 in constant_dimensions(stats) and 0 not in constant_dimensions(stats)
    scaled = Quantiles(np.array(stats["q01"]), np.array(stats["q99"]))
    moved = np.array(stats["q01"])
    moved[6] += 1e-3
    assert abs(scaled.normalize(moved)[6] - scaled.normalize(np.array(stats["q01"]))[6]) < 0.01
