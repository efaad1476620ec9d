"""Settings of a model family that another one does not read."""

from __future__ import annotations

from pathlib import Path

import pytest
from expect import raises_code

from embodrl.config import load_config
from embodrl.config.policy_card import ASSETS
from embodrl.errors import ConfigError
from embodrl.learners.imitation_policy import with_vision


def noted(*arguments: str) -> set[str]:
    return {problem.key for problem in load_config(list(arguments)).notes}


SAC = ("model=mlp", "env=toy", "algorithm=sac")
PER_NUMBER = "algorithm.off_policy.target_entropy_per_number"


@pytest.mark.parametrize(
    ("verb", "arguments", "freezes"),
    [
        ("train", ["model=openvla"], True),
        ("train", ["model=openvla", "algorithm=grpo"], True),
        ("plan", ["model=openvla"], True),
        (None, ["model=openvla"], True),
        ("store", ["model=openvla"], False),
        ("train", ["model=openvla_7b", f"model.warm_start={ASSETS / 'openvla_tiny'}"], False),
        ("train", ["model=openvla", "model.freeze_vision=false"], False),
        ("train", ["model=openvla", "model.warm_start=null"], False),
        ("train", ["model=openvla", "model.trainable=lora"], False),
        ("train", ["model=openvla", "algorithm=dagger"], False),
        ("train", ["model=smolvla"], False),
        ("sft", ["model=openvla", "model.warm_start=null"], False),
    ],
)
def test_a_warm_start_that_learns_from_reward_keeps_its_vision(verb, arguments, freezes):
    loaded = load_config(arguments, verb=verb)
    assert loaded.config.model.freeze_vision is freezes
    assert (str(loaded.origins["model.freeze_vision"]) == "follows from model.warm_start") is freezes


def test_imitation_trains_vision_that_the_user_has_not_frozen():
    assert not with_vision(load_config(["model=openvla"])).config.model.freeze_vision
    assert with_vision(load_config(["model=openvla", "model.freeze_vision=true"])).config.model.freeze_vision


@pytest.mark.parametrize("model", ["openvla", "openvla_oft", "pi0", "pi05", "gr00t"])
def test_presets_give_no_notes(model: str) -> None:
    assert not noted(f"model={model}", "env=maniskill")


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("model=pi0", "algorithm.sampling.temperature=0.5"), "algorithm.sampling.temperature"),
        (("model=gr00t", "sft.label_smoothing_bins=2"), "sft.label_smoothing_bins"),
        (("model=pi0", "model.pi.discrete_state=true"), "model.pi.discrete_state"),
        (("model=openvla", "model.lora.rank=4"), "model.lora.rank"),
        (("model=openvla", "model.trainable=head", "model.freeze_vision=true"), "model.freeze_vision"),
        (("model=pi0", "model.flow.noise_std_min=0.1"), "model.flow.noise_std_min"),
        *(
            ((f"model={name}", "model.center_crop=true"), "model.center_crop")
            for name in ("pi0", "pi05", "pi0_fast", "smolvla")
        ),
        (("model=pi0_fast", "sft.label_smoothing_bins=2"), "sft.label_smoothing_bins"),
        *(
            ((*SAC, f"algorithm.off_policy={{{other}, target_entropy_per_number: -0.5}}"), PER_NUMBER)
            for other in ("alpha_lr: null", "target_entropy: -3")
        ),
        (("model=pi0", "model.flow.method=flow_noise", "model.flow.noise_level=0.3"), "model.flow.noise_level"),
    ],
)
def test_a_setting_without_effect_is_noted(arguments: tuple[str, ...], key: str) -> None:
    assert noted(*arguments) == {key}


@pytest.mark.parametrize(
    ("family", "setting", "key", "owners"),
    [
        ("pi0", "model.architecture.hidden_size=64", "model.architecture", "openvla, openvla_oft have it"),
        ("pi0", "model.gr00t.head_dim=16", "model.gr00t", "gr00t has it"),
        (
            "openvla",
            "model.flow.num_steps=8",
            "model.flow",
            "gr00t, gr00t_n1_7, pi0, pi05, smolvla have it",
        ),
        ("openvla", "model.keep_stop_token=false", "model.keep_stop_token", "openvla_oft has it"),
    ],
)
def test_a_setting_of_another_family_is_refused(family: str, setting: str, key: str, owners: str) -> None:
    with raises_code("setting-of-another-type", ConfigError) as caught:
        load_config([f"model={family}", setting])
    assert isinstance(caught.value, ConfigError)
    [problem] = caught.value.problems
    assert problem.key == key and owners in problem.message and setting in problem.origin


def test_settings_that_are_read_give_no_notes() -> None:
    assert not noted("model=pi05", "model.pi.discrete_state=true", "model.flow.num_steps=8", "env.include_state=true")
    assert not noted("model=openvla", "model.trainable=lora", "model.lora.rank=4", "sft.label_smoothing_bins=2")
    assert not noted("model=openvla_oft", "model.warm_start=null", "model.keep_stop_token=false")


def test_a_checkpoint_that_reads_the_state_wants_it() -> None:
    for family in ("pi0", "pi0_fast", "gr00t"):
        assert noted(f"model={family}", "model.model_path=somebody/policy") == {"model.model_path"}
    assert not noted("model=pi0", "model.model_path=somebody/pi0_libero", "env=libero_wrist")
    bridge = ("model.unnorm_key=bridge_orig", "model.gripper=bridge")
    assert not noted("model=openvla", "model.model_path=openvla/openvla-7b", *bridge)


@pytest.mark.parametrize(
    ("arguments", "bootstrap"),
    [
        (["env=gymnasium_reacher"], "truncation"),
        (["env=gymnasium", "algorithm.bootstrap_type=none"], "none"),
        (["env=gymnasium_reacher", "env.reward_mode=sparse"], "none"),
        (["env=maniskill"], "none"),
    ],
)
def test_gymnasiums_own_rewards_may_go_on_after_the_step_limit(arguments: list[str], bootstrap: str) -> None:
    loaded = load_config(arguments)
    assert loaded.config.algorithm.bootstrap_type == bootstrap
    assert not [note for note in loaded.notes if note.key == "algorithm.bootstrap_type"]


def test_a_robot_is_not_moved_by_draws_unless_asked_to() -> None:
    robot = ["env=robot", "env.instruction=push", "model.random_weights=true"]
    assert load_config(robot, verb="eval").config.env.eval.decoding == "greedy"


FSDP = (
    "actor=fsdp",
    "actor.micro_batch_size=16",
    "cluster.device=cpu",
    "cluster.component_placement={actor: '0:0-1', rollout: 0, env: 0}",
)


@pytest.mark.parametrize("algorithm", ["ppo", "dagger", "iql", "sac", "rlpd", "hil_serl"])
def test_policies_are_sharded_whatever_they_learn_from(algorithm: str, tmp_path: Path) -> None:
    given = algorithm in ("iql", "rlpd", "hil_serl")
    demos = [f"algorithm.off_policy.demos={tmp_path}"] if given else []
    loaded = load_config(["env=toy", "model=mlp", f"algorithm={algorithm}", *FSDP, *demos])
    assert loaded.config.actor.training_backend == "fsdp"


@pytest.mark.parametrize("setting", ["use_proprio=true", "use_film=true", "keep_stop_token=false", "action_head=l1"])
def test_the_shipped_oft_has_the_default_parts(setting: str) -> None:
    arguments = ["env=maniskill", "env.include_state=true", "model=openvla_oft"]
    with pytest.raises(ConfigError) as caught:
        load_config([*arguments, f"model.{setting}"], verb="eval")
    found = {problem.key for problem in caught.value.problems if problem.code == "shipped-weights-have-one-form"}
    assert found == {f"model.{setting.partition('=')[0]}"}
