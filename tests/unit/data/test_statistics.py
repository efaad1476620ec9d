"""Statistics of demonstrations against numpy, and the files that they are read from."""

import json
from pathlib import Path

import numpy as np
import pytest
from expect import raises_code

from embodrl.data.statistics import RobotStatistics, dimension_stats, read_statistics
from embodrl.errors import FileDamagedError

QUANTILES = {"q01": 1, "q10": 10, "q50": 50, "q90": 90, "q99": 99}


def test_statistics_are_those_of_numpy():
    values = np.random.default_rng(0).normal([1e4, -3, 0], [1, 1e-3, 50], (997, 3)).astype(np.float32)
    stats, narrow = dimension_stats(values)
    wide = values.astype(np.float64)
    expected = {name: np.percentile(wide, q, axis=0) for name, q in QUANTILES.items()}
    expected |= {"mean": wide.mean(0), "std": wide.std(0), "min": wide.min(0), "max": wide.max(0)}
    assert stats.keys() == expected.keys() and narrow == []
    for name, found in stats.items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-12)


def test_quantiles_of_what_hardly_moves_are_its_range():
    moves, still, constant = np.linspace(-1, 1, 500), np.zeros(500), np.full(500, 0.25)
    still[7] = 3.0
    stats, narrow = dimension_stats(np.stack([moves, still, constant], axis=1))
    assert narrow == [1]
    np.testing.assert_allclose(stats["q01"], [-0.98, 0.0, 0.25])
    np.testing.assert_allclose(stats["q99"], [0.98, 3.0, 0.25])


def test_what_is_written_comes_back(tmp_path: Path):
    action, state = dimension_stats(np.eye(3))[0], dimension_stats(np.eye(2))[0]
    RobotStatistics("so100", action, state, "libero", 12, 3).write(tmp_path / "s.json")
    found = read_statistics(tmp_path / "s.json")
    assert found == RobotStatistics("so100", action, state, "libero", 12, 3, str(tmp_path / "s.json"))


@pytest.mark.parametrize(
    "content",
    [
        {"action": {"min": [0]}, "observation.state": {"min": [1]}, "timestamp": {"min": [0]}},  # LeRobot
        {"norm_stats": {"actions": {"min": [0]}, "state": {"min": [1]}}},  # openpi
    ],
)
def test_other_layouts(tmp_path: Path, content: dict[str, object]):
    (tmp_path / "s.json").write_text(json.dumps(content))
    found = read_statistics(tmp_path / "s.json")
    assert found.action == {"min": [0]} and found.state == {"min": [1]} and found.gripper == "as_is"


def test_a_file_without_actions_is_refused(tmp_path: Path):
    (tmp_path / "s.json").write_text('{"observation.state": {}}')
    with raises_code("file-damaged", FileDamagedError):
        read_statistics(tmp_path / "s.json")
