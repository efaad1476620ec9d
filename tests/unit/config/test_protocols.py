"""Evaluation protocols: what they set, what wins over them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from expect import raises_code

from embodrl.config import load_config
from embodrl.config.load import load_run
from embodrl.config.protocol import protocol_of
from embodrl.config.rules.base import value_of
from embodrl.errors import ConfigError
from embodrl.specs import PROTOCOLS

LIBERO = ["env=libero", "env.suite=libero_goal", "model.warm_start=null", "model.random_weights=true"]


@pytest.mark.parametrize(
    ("protocol", "model", "expected"),
    [
        ("openvla", "openvla", {"env.max_episode_steps": 300, "env.settle_steps": 10, "env.fixture_seed": 0}),
        ("openvla", "openvla", {"model.num_action_chunks": 1, "model.center_crop": True, "model.gripper": "libero"}),
        ("openvla_oft", "openvla_oft", {"env.max_episode_steps": 300, "model.num_action_chunks": 8}),
        ("openpi", "pi05", {"env.fixture_seed": 7, "model.num_action_chunks": 5, "model.center_crop": False}),
        ("simplevla", "openvla_oft", {"env.max_episode_steps": 512, "env.fixtures_redrawn": False}),
        ("rlinf", "openvla_oft", {"env.max_episode_steps": 512, "env.settle_steps": 15}),
        ("rlinf", "pi05", {"env.max_episode_steps": 320, "env.eval.to_step_limit": True, "env.fixture_seed": None}),
    ],
)
def test_settings_are_those_of_the_source(protocol: str, model: str, expected: dict[str, object]):
    config = load_config([*LIBERO, f"model={model}", f"protocol={protocol}"], verb="eval").config
    assert {key: value_of(config, key) for key in expected} == expected
    assert (config.env.eval.seed, config.env.eval.num_episodes, config.env.render_detail) == (0, 500, "full")
    assert [(camera.height, camera.width) for camera in config.env.cameras] == [(256, 256)]


def test_the_user_wins_and_is_notified():
    loaded = load_config(
        [*LIBERO, "protocol=openvla", "env.settle_steps=3", "env.tasks=[open_the_middle_drawer_of_the_cabinet]"]
    )
    assert loaded.config.env.settle_steps == 3
    assert loaded.config.env.eval.num_episodes == 50  # of one task
    assert [note.key for note in loaded.notes if note.code == "protocol-holds"] == ["env.settle_steps"]
    report = protocol_of(loaded.config)
    assert report is not None and report["changed"] == {"env.settle_steps": 3} and "run_libero_eval" in report["source"]


def test_a_run_keeps_what_it_had_and_an_argument_changes_it(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(load_config([*LIBERO, "protocol=openvla", "env.settle_steps=3"]).to_yaml())
    assert load_run(path, verb="eval").config.env.settle_steps == 3
    changed = load_run(path, ["protocol=rlinf"], verb="eval").config
    assert (changed.env.settle_steps, changed.env.max_episode_steps) == (15, 320)


def test_a_model_that_a_protocol_says_nothing_of_is_reported():
    notes = load_config([*LIBERO, "model=pi0", "protocol=openvla"]).notes
    assert [note.key for note in notes if note.code == "protocol-holds"] == ["protocol"]


def test_wrong_protocols_are_refused():
    with raises_code("protocol-is-of-the-environment"):
        load_config(["env=toy", "protocol=openvla"])
    with pytest.raises(ConfigError) as caught:
        load_config([*LIBERO, "protocol=openvl"])
    assert [(problem.code, problem.nearest) for problem in caught.value.problems] == [
        ("protocol-is-of-the-environment", "openvla")
    ]


def test_every_protocol_has_limits_for_every_suite_and_known_keys():
    for spec in PROTOCOLS.all():
        assert all(
            set(limits) == {"libero_spatial", "libero_object", "libero_goal", "libero_10"}
            for limits in spec.step_limits.values()
        )
        assert "" in spec.step_limits and spec.source.startswith("github.com/")
        for model in spec.models:
            load_config([*LIBERO, f"model={model}", f"protocol={spec.name}"], verb="eval")


SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
TWO = [("agentview", 256), ("wrist", 256)]
PRESETS = {
    "openvla_libero": (1, "libero", True, TWO[:1], False),
    "openvla_oft_libero": (8, "libero", True, TWO[:1], False),
    "pi0_libero": (5, "as_is", False, TWO, True),
    "pi05_libero": (5, "as_is", False, TWO, True),
    "pi0_fast_libero": (10, "as_is", False, TWO, True),
    "gr00t_libero": (5, "libero", False, TWO, True),
    "gr00t_n1_7_libero": (8, "libero", False, TWO, True),
}


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_of_published_pairs_are_valid_in_every_suite(preset: str, suite: str):
    loaded = load_config([f"env={suite}", f"model={preset}"])
    env, model = loaded.config.env, loaded.config.model
    cameras = [(camera.name, camera.height) for camera in env.cameras]
    found = (model.num_action_chunks, model.gripper, model.center_crop, cameras, env.include_state)
    assert found == PRESETS[preset]
    if preset.startswith("openvla"):
        assert model.unnorm_key == suite
    assert not [note for note in loaded.notes if note.key.startswith("model")]


def test_what_a_model_preset_says_of_the_environment_gives_way_to_the_user():
    config = load_config(
        [
            "env=libero_goal",
            "model=pi0_libero",
            "env.cameras.0.height=128",
            "env.cameras.0.width=128",
            "env.cameras.1.height=128",
            "env.cameras.1.width=128",
        ]
    ).config
    assert [camera.height for camera in config.env.cameras] == [128, 128]
