"""`embodrl data check --policy`: errors of a policy on demonstrations, by hand."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from embodrl.config.schema import Config
from embodrl.data.demos import Demos
from embodrl.data.facts import DatasetFacts
from embodrl.tools.data_check.check import (
    DataReport,
    PolicyErrors,
    _policy_findings,  # pyright: ignore[reportPrivateUsage]
    camera_findings,
    picture_difference,
    policy_errors,
)
from embodrl.tools.data_check.checks import DataFinding
from embodrl.tools.data_check.cli import show
from embodrl.types import PolicyOutput


def demos() -> Demos:
    rng = np.random.default_rng(0)
    actions = np.stack([rng.normal(size=60), np.where(np.arange(60) % 20 < 10, 1.0, -1.0)], axis=1)
    columns = {"images": np.zeros((60, 1, 2, 2, 3)), "state": np.arange(60.0)[:, None], "actions": actions}
    return Demos.of_episodes(columns, [20, 20, 20], ["a", "b", "c"], ["t"] * 3)


class Told:
    """Says the actions of the frame that its state names, changed."""

    def __init__(self, data: Demos, factor: tuple[float, float]) -> None:
        self.data, self.factor = data, np.array(factor, np.float32)

    def predict_action_batch(self, seen, mode, sampling, compute_values):
        chunk = self.data.action_chunks(seen.state[:, 0].astype(np.int64), 3)[0] * self.factor
        return PolicyOutput(chunk, torch.zeros(chunk.shape), None, {})

    def out_of_range(self, actions, state):
        return np.abs(actions) > 1.5


@pytest.mark.parametrize(
    ("factor", "codes"),
    [
        ((1, 1), {"policy-range"}),
        ((1, -1), {"policy-range", "gripper-inverted"}),
        ((-1, 1), {"policy-range", "policy-untrained"}),
    ],
)
def test_errors_are_those_of_each_dimension(factor: tuple[float, float], codes: set[str]):
    data = demos()
    policy = Told(data, factor)
    errors = policy_errors(policy, data, include_state=True)
    index, inside = data.action_chunks(np.arange(60), 3)
    expected = np.abs(index * np.array(factor) - index)[inside].mean(axis=0)
    np.testing.assert_allclose(errors.mean_abs_error, expected, atol=1e-6)
    np.testing.assert_allclose(errors.of_the_mean, np.abs(index - data.actions.mean(0))[inside].mean(0), rtol=1e-6)
    np.testing.assert_allclose(errors.of_zero, np.abs(index)[inside].mean(0), rtol=1e-6)
    other = policy_errors(policy, data, include_state=True, mean=np.zeros(2, np.float32))  # of the training data
    assert other.of_the_mean == other.of_zero
    np.testing.assert_allclose(errors.out_of_range, (np.abs(data.actions) > 1.5).mean(0))
    config = SimpleNamespace(sft=Config().sft)
    assert {finding.code for finding in _policy_findings(errors, policy, data, config)} == codes


@pytest.mark.parametrize(
    ("recorded", "wanted", "codes"),
    [
        (["agentview", "wrist"], ["agentview", "wrist"], []),
        (["wrist", "side", "agentview"], ["agentview", "wrist"], ["camera-order"]),
        (["top", "wrist"], ["agentview", "wrist"], ["camera-missing"]),
        (["top"], ["agentview"], []),
        ([], ["agentview"], ["camera-missing"]),
    ],
)
def test_cameras_are_compared_with_those_of_the_environment(recorded: list[str], wanted: list[str], codes: list[str]):
    assert [finding.code for finding in camera_findings(recorded, wanted)] == codes


def test_pictures_are_compared_camera_by_camera_and_at_one_size():
    rng = np.random.default_rng(0)
    small = rng.integers(0, 200, (2, 3, 4, 6, 3), dtype=np.uint8)
    large = small.repeat(8, axis=2).repeat(8, axis=3)
    assert picture_difference(small, small[:, [2, 0]], [2, 0]) == 0
    assert picture_difference(small, small[:, [2, 0]] + np.uint8(7), [2, 0]) == 7
    assert picture_difference(small, small[:, [2, 0]], [0, 2]) > 20
    same, other = (picture_difference(small, large[:, places], [2, 0]) for places in ([2, 0], [0, 2]))
    assert same is not None and other is not None and same < 0.6 * other
    assert picture_difference(small, small, [0, 1]) is None


@pytest.mark.parametrize("suggest", [True, False])
def test_a_check_without_a_simulator_says_what_one_would_find(suggest, capsys):
    show(DataReport(Path("data"), DatasetFacts({}, 7, 0, None, None), 1, 5, []), suggest_replay=suggest)
    assert ("--env" in capsys.readouterr().out) is suggest


@pytest.mark.parametrize("code", [None, "held-out-other-dataset"])
def test_episodes_are_called_untrained_only_where_that_is_known(
    code: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [] if code is None else [DataFinding("warning", code, "trained elsewhere", "")]
    errors = PolicyErrors(4, 1, [0.1], [0.2], [0.3], [0.0])
    facts = DatasetFacts({}, 1, 0, None, None)
    show(DataReport(Path("data"), facts, 1, 5, findings, policy=errors), suggest_replay=False, held_out=True)
    assert ("not trained on" in " ".join(capsys.readouterr().out.split())) == (code is None)
