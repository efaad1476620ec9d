"""Conventions of policy and environment are compared before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embodrl.config import load_config
from embodrl.config.policy_card import policy_card
from embodrl.errors import ConfigError
from embodrl.interface import CLOSES_POSITIVE, LIBERO, OPENS_POSITIVE, ZERO_CLOSES, Interface


def checkpoint(path: Path, card: dict[str, object] | None = None) -> str:
    path.mkdir()
    (path / "config.json").write_text("{}")
    if card is not None:
        (path / "embodrl.json").write_text(json.dumps(card))
    return str(path)


def mismatches(*settings: str, verb: str | None = "eval") -> dict[str, tuple[str, str]]:
    """Return key -> (message, hint) of what disagrees."""
    try:
        load_config(list(settings), verb=verb)
    except ConfigError as error:
        found = [problem for problem in error.problems if problem.code == "interfaces-agree"]
        return {problem.message.partition(":")[0]: (problem.key, problem.hint) for problem in found}
    return {}


def test_only_what_both_state_is_compared():
    policy = Interface(rotation="euler_xyz", gripper=ZERO_CLOSES, control_hz=20.0)
    env = Interface(rotation="axis_angle", control_hz=20.0, state=("joints",))
    assert policy.differences(env) == [("rotation", "euler_xyz", "axis_angle")]
    assert Interface().differences(LIBERO) == []


def test_a_file_is_read_by_type():
    stored = {"rotation": "axis_angle", "state": ["a", "b"], "gripper": 3, "cameras": [1], "new": 1}
    assert Interface.of(stored) == Interface(rotation="axis_angle", state=("a", "b"))


def test_a_libero_policy_acts_in_libero(tmp_path: Path):
    weights = checkpoint(tmp_path / "pi0_libero")
    assert mismatches("env=libero_goal", "model=pi0_libero", f"model.model_path={weights}") == {}
    found = mismatches("env=libero_goal", "model=pi0", f"model.model_path={weights}", "model.num_action_chunks=5")
    assert found["cameras"][0] == "env.cameras" and "agentview, wrist" in found["cameras"][1]
    turned = mismatches("env=libero_goal", "model=pi0_libero", f"model.model_path={weights}", "model.gripper=libero")
    assert turned == {"gripper": ("model.gripper", "set model.gripper=as_is")}
    gr00t = checkpoint(tmp_path / "gr00t")
    settings = ("env=libero_10", "model=gr00t_libero", f"model.model_path={gr00t}")
    assert mismatches(*settings) == {}
    assert mismatches(*settings, "model.gripper=as_is") == {"gripper": ("model.gripper", "set model.gripper=libero")}


@pytest.mark.parametrize(
    ("family", "file", "content", "missing"),
    [
        ("pi0", "assets/physical-intelligence/libero/norm_stats.json", {}, set()),
        ("pi05", "physical-intelligence/libero/norm_stats.json", {}, set()),
        ("gr00t", "experiment_cfg/metadata.json", {"libero_franka": {}}, set()),
        ("gr00t_n1_7", "statistics.json", {"libero_sim": {}}, set()),
        ("smolvla", "train_config.json", {"dataset": {"repo_id": "HuggingFaceVLA/libero"}}, {"state"}),
        ("pi0_fast", "train_config.json", {"dataset": {"repo_id": "me/libero_10"}}, {"state"}),
    ],
)
def test_the_files_of_a_checkpoint_tell_that_it_is_of_libero(
    family: str, file: str, content: dict[str, object], missing: set[str], tmp_path: Path
):
    """A directory with any name: without a word its gripper would be inverted, or never open."""
    weights = checkpoint(tmp_path / "weights")
    settings = (f"model={family}", f"model.model_path={weights}", "env.include_state=true")
    assert mismatches("env=maniskill", *settings) == {}, "nothing says what it is of"
    (tmp_path / "weights" / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "weights" / file).write_text(json.dumps(content))
    assert set(mismatches("env=maniskill", *settings)) == {"rotation", "gripper", "state", "pictures"} - missing
    wrong, right = ("as_is", "libero") if family.startswith("gr00t") else ("libero", "as_is")
    here = ("env=libero_wrist", "env.suite=libero_spatial", *settings)
    assert mismatches(*here, f"model.gripper={right}") == {}
    assert mismatches(*here, f"model.gripper={wrong}") == {"gripper": ("model.gripper", f"set model.gripper={right}")}


@pytest.mark.parametrize("content", ["[1]", "{", '{"dataset": []}', '{"dataset": {"repo_id": 3}}'])
def test_damaged_files_say_nothing(content: str, tmp_path: Path):
    weights = checkpoint(tmp_path / "weights")
    (tmp_path / "weights" / "train_config.json").write_text(content)
    settings = ("model=smolvla", f"model.model_path={weights}", "env.include_state=true")
    assert mismatches("env=maniskill", *settings) == {}


def test_a_libero_policy_is_refused_in_another_simulator_all_at_once(tmp_path: Path):
    weights = checkpoint(tmp_path / "pi0_libero")
    settings = ("env=maniskill", "model=pi0", f"model.model_path={weights}", "env.include_state=true")
    found = mismatches(*settings)
    assert set(found) == {"rotation", "gripper", "state", "pictures"}
    assert found["rotation"][0] == "env.env_type" and "no setting" in found["rotation"][1]
    assert "no value of model.gripper" not in found["gripper"][1]
    assert mismatches(*settings, verb="sft") == {}  # demonstrations will say


def test_the_bridge_checkpoint_wants_its_gripper_converted(tmp_path: Path):
    weights = checkpoint(tmp_path / "openvla")
    settings = ("env=maniskill", "model=openvla", f"model.model_path={weights}", "model.unnorm_key=bridge_orig")
    assert mismatches(*settings) == {"gripper": ("model.gripper", "set model.gripper=bridge")}
    assert mismatches(*settings, "model.gripper=bridge") == {}


def test_a_policy_carries_what_it_was_trained_with(tmp_path: Path):
    trained = load_config(["env=maniskill"]).config
    card = json.loads(json.dumps(policy_card(trained)))
    assert card["interface"]["gripper"] == OPENS_POSITIVE and card["interface"]["rotation"] == "euler_xyz"
    weights = checkpoint(tmp_path / "mine", card)
    here = ("model=openvla", f"model.warm_start={weights}")
    assert mismatches("env=maniskill", *here) == {}
    assert set(mismatches("env=libero_goal", *here)) == {"rotation", "gripper", "pictures"}
    converted = load_config(["env=libero", "model.warm_start=null", "model.gripper=libero"]).config
    own = policy_card(converted)["interface"]
    assert own is not None and own["gripper"] == ZERO_CLOSES
    plain = policy_card(load_config(["env=libero"]).config)["interface"]
    assert plain is not None and plain["gripper"] == CLOSES_POSITIVE


def test_what_is_not_stated_is_noted_and_not_refused(tmp_path: Path):
    weights = checkpoint(tmp_path / "something")
    loaded = load_config(["env=libero_goal", "model=pi0_libero", f"model.model_path={weights}"], verb="eval")
    assert [note.key for note in loaded.notes if note.code == "interface-is-stated"] == ["model.model_path"]
    assert mismatches("env=toy", "model=openvla", f"model.model_path={checkpoint(tmp_path / 'libero')}") == {}


def test_cards_without_conventions_are_not_compared(tmp_path: Path):
    card = policy_card(load_config(["env=maniskill"]).config)
    del card["interface"]
    assert mismatches("env=libero_goal", f"model.warm_start={checkpoint(tmp_path / 'old', card)}") == {}


@pytest.mark.parametrize("env", ["maniskill", "libero", "metaworld"])
def test_simulators_with_grippers_state_theirs(env: str):
    interface = load_config([f"env={env}", "model.warm_start=null"]).config
    assert policy_card(interface)["interface"] is not None
