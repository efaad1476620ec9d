"""Statistics of demonstrations in every family: its formula, its files, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from expect import raises_code
from tiny_families import FLOW_FAMILIES, NETWORKS, STATE_DIM, TOKEN_FAMILIES, build, observation

from embodrl.data.statistics import RobotStatistics, dimension_stats
from embodrl.errors import StatisticsMissingError
from embodrl.models.common.gripper import to_model

RNG = np.random.default_rng(0)
ACTIONS = RNG.normal([-40, 0.02, 300, 3], [9, 0.004, 120, 0.1], (400, 4)).astype(np.float32)
STATE = RNG.normal(0, 30, (400, STATE_DIM)).astype(np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("stats") / "statistics.json"
    state = dimension_stats(STATE)[0]
    RobotStatistics("so100", dimension_stats(ACTIONS)[0], state, "as_is", 400, 4).write(file)
    return file


def given(family: str, path: Path, **changes: object):
    return build(family, action_dim=4, stats_path=str(path), **changes)


def normalised(family: str, values: np.ndarray) -> np.ndarray:
    """The published formulas, in numpy."""
    wide = values.astype(np.float64)
    if family in ("pi0", "smolvla"):
        eps = 1e-6 if family == "pi0" else 1e-8
        return (wide - wide.mean(0)) / (wide.std(0) + eps)
    if family == "gr00t":
        return 2 * (wide - wide.min(0)) / (wide.max(0) - wide.min(0)) - 1
    low, high = np.percentile(wide, 1, axis=0), np.percentile(wide, 99, axis=0)
    eps = 1e-6 if family == "pi05" else 0.0
    scaled = 2 * (wide - low) / (high - low + eps) - 1
    return scaled.clip(-1, 1) if family == "gr00t_n1_7" else scaled


@pytest.mark.parametrize("family", FLOW_FAMILIES)
def test_flow_families_learn_normalised_actions_and_states(family: str, path: Path):
    policy = given(family, path)
    seen = observation(family)
    seen.state = STATE[:3]
    chunk = torch.from_numpy(np.repeat(ACTIONS[:3, None], policy.action_horizon, axis=1))
    inputs = policy.sft_inputs(seen, chunk)
    np.testing.assert_allclose(inputs["target"][:, 0, :4], normalised(family, ACTIONS)[:3], atol=2e-5)
    if "state" in inputs:
        np.testing.assert_allclose(inputs["state"][:, :STATE_DIM], normalised(family, STATE)[:3], atol=2e-5)


@pytest.mark.parametrize("family", TOKEN_FAMILIES)
def test_token_families_bin_between_the_quantiles(family: str, path: Path):
    policy = given(family, path)
    tokens = policy.sft_inputs(observation(family), torch.from_numpy(ACTIONS[:6].reshape(3, 2, 4)))["action_tokens"]
    said = policy.bins.decode(tokens.numpy()).reshape(6, 4)
    np.testing.assert_allclose(said, np.clip(normalised(family, ACTIONS)[:6], -1, 1), atol=2 / 255)


@pytest.mark.parametrize("family", NETWORKS)
def test_they_travel_with_the_policy(family: str, path: Path, tmp_path: Path):
    policy = given(family, path)
    seen = observation(family)
    seen.state = STATE[:3, : seen.state.shape[1]]
    policy.save_pretrained(tmp_path / "policy")
    again = build(family, action_dim=4, warm_start=str(tmp_path / "policy"))
    expected = policy.predict(seen.images, seen.instruction, seen.state)
    found = again.predict(seen.images, seen.instruction, seen.state)
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # lerobot keeps statistics in float32
    low, high = ACTIONS.min(0) - 5 * np.ptp(ACTIONS, axis=0), ACTIONS.max(0) + 5 * np.ptp(ACTIONS, axis=0)
    assert ((expected > low) & (expected < high)).all()  # in the robot's units


@pytest.mark.parametrize("family", NETWORKS)
def test_only_data_of_other_units_are_out_of_range(family: str, path: Path):
    plain, policy = build(family, action_dim=4), given(family, path)
    assert (plain.out_of_range(ACTIONS, STATE).mean(0) > 0.5).tolist() == [True, False, True, family in TOKEN_FAMILIES]
    assert policy.out_of_range(ACTIONS, STATE).mean(0).max() <= 0.02
    fits = np.clip(ACTIONS / 1000, -1, 1)
    assert not plain.out_of_range(fits, STATE).any()


def test_a_constant_dimension_takes_its_value_only(tmp_path: Path):
    actions = np.stack([np.linspace(0, 9, 50), np.full(50, 0.1, np.float32)], axis=1).astype(np.float32)
    RobotStatistics("x", dimension_stats(actions)[0], None).write(tmp_path / "s.json")
    policy = build("openvla", action_dim=2, stats_path=str(tmp_path / "s.json"))
    assert not policy.out_of_range(actions, STATE)[:, 1].any()
    assert policy.out_of_range(actions + np.float32(0.01), STATE)[:, 1].all()


@pytest.mark.parametrize("family", TOKEN_FAMILIES)
def test_a_gripper_of_a_convention_is_not_normalised(family: str, tmp_path: Path):
    actions = np.stack([np.linspace(-9, 9, 100), np.repeat([-1.0, 1.0], 50)], axis=1)
    file = tmp_path / "s.json"
    RobotStatistics("x", dimension_stats(to_model(actions, "libero"))[0], None, "libero").write(file)
    policy = build(family, action_dim=2, gripper="libero", stats_path=str(file))
    assert policy.stats.mask.tolist() == [True, False]
    tokens = policy.sft_inputs(observation(family), torch.from_numpy(actions[[0, 99, 0, 99, 0, 99]]).view(3, 2, 2))
    said = policy.bins.decode(tokens["action_tokens"].numpy())
    np.testing.assert_allclose(said[0], [[-1, 1], [1, 0]], atol=0.01)  # open in the model's units, then closed
    with raises_code("statistics-gripper"):
        build(family, action_dim=2, stats_path=str(file))


def test_the_state_token_of_oft_is_normalised(path: Path, tmp_path: Path):
    policy = given("openvla_oft", path, use_proprio=True)
    seen = observation("openvla_oft")
    seen.state = STATE[:3]
    expected = np.clip(normalised("openvla_oft", STATE)[:3], -1, 1)
    np.testing.assert_allclose(policy.preprocess(seen)["proprio"], expected, atol=1e-5)
    policy.save_pretrained(tmp_path / "policy")
    again = build("openvla_oft", action_dim=4, warm_start=str(tmp_path / "policy"), use_proprio=True)
    np.testing.assert_allclose(again.preprocess(seen)["proprio"], expected, atol=1e-5)


@pytest.mark.parametrize("family", NETWORKS)
def test_a_checkpoint_without_this_robot_says_so(family: str, path: Path, tmp_path: Path):
    given(family, path).save_pretrained(tmp_path / "policy")
    where = {"action_dim": 4, "model_path": str(tmp_path / "policy"), "unnorm_key": "my_robot"}
    with pytest.raises(StatisticsMissingError):
        build(family, **where)
    if family.startswith("gr00t"):  # a robot has encoders of its own
        where["unnorm_key"] = "new_embodiment"
    assert build(family, **where, stats_path=str(path)).action_dim == 4


def test_statistics_of_absolute_actions_are_refused_where_they_are_relative(path: Path, tmp_path: Path):
    import json

    given("pi0", path).save_pretrained(tmp_path / "policy")
    file = tmp_path / "policy" / "config.json"
    config = json.loads(file.read_text())
    config["embodrl"]["relative_dims"] = 3
    file.write_text(json.dumps(config))
    with raises_code("statistics-relative"):
        given("pi0", path, warm_start=str(tmp_path / "policy"))
