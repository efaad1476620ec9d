"""Evaluations in other environments than training: tasks, cameras, another simulator, and its settings."""

from __future__ import annotations

import pytest
from expect import raises_code

from embodrl.config import Config, load_config, load_resolved
from embodrl.envs.maniskill.spec import ManiSkillConfig
from embodrl.errors import ConfigError

SETTINGS = "env.eval.settings"
LIBERO = ("env=libero_spatial", "model=openvla_oft")
OTHER = ("env=toy", "model=cnn", "env.eval.env_type=maniskill")


def evaluated(*overrides: str) -> Config:
    return load_config(list(overrides)).config.evaluated


def test_nothing_given_or_nothing_new_is_the_configuration_itself() -> None:
    for given in ((), ("env.eval.tasks=[reach-red]", "env.eval.max_episode_steps=20")):
        config = load_config(["env=toy", *given]).config
        assert config.evaluated is config


def test_tasks_and_step_limit_are_those_of_the_evaluation() -> None:
    config = load_config(
        ["env=toy", "env.tasks=[reach-red]", "env.eval.tasks=[reach-green]", "env.eval.max_episode_steps=9"]
    ).config
    assert (config.evaluated.env.tasks, config.evaluated.env.max_episode_steps) == (("reach-green",), 9)
    assert config.env.tasks == ("reach-red",) and config.evaluated.env.train == config.env.train
    assert config.evaluated.evaluated.env == config.evaluated.env


def test_cameras_are_those_of_the_evaluation() -> None:
    view = "{name: base_camera, eye: [0.4, 0.3, 0.5], target: [0, 0, 0.1]}"
    config = load_config(["env=maniskill", "model=openvla", f"env.eval.cameras=[{view}]"]).config
    assert config.env.cameras[0].eye is None and config.evaluated.env.cameras[0].eye == (0.4, 0.3, 0.5)
    assert config.evaluated.env.cameras[0].height == config.env.cameras[0].height


def test_another_simulator_has_its_own_settings_and_interpreter(tmp_path) -> None:
    given = [*OTHER, "env.eval.tasks=[PullCube-v1]", f"{SETTINGS}.mesh_decimation=0.5", "env.max_episode_steps=7"]
    loaded = load_config(given)
    env = loaded.config.evaluated.env
    assert (env.env_type, env.tasks, env.max_episode_steps) == ("maniskill", ("PullCube-v1",), 7)
    assert isinstance(env, ManiSkillConfig) and (env.mesh_decimation, env.python) == (0.5, "auto")
    assert loaded.config.env.env_type == "toy"
    (tmp_path / "config.yaml").write_text(loaded.to_yaml())
    assert load_resolved(tmp_path / "config.yaml").evaluated == loaded.config.evaluated


def test_what_follows_from_a_setting_follows_in_evaluations() -> None:
    whole = evaluated(*LIBERO, "env.eval.settings={suite: libero_10}").env
    long = load_config(["env=libero_10", "model=openvla_oft"]).config.env
    assert (whole.tasks, whole.max_episode_steps) == (long.tasks, long.max_episode_steps)
    task = long.tasks[3]
    settled = load_config(["env=libero_10", "model=openvla_oft", f"env.tasks=['{task}']", f"{SETTINGS}.settle_steps=3"])
    assert settled.config.evaluated.env.tasks == (task,)  # a step of settling chooses no tasks


def test_a_saved_configuration_keeps_it(tmp_path) -> None:
    loaded = load_config([*LIBERO, "env.eval.settings={suite: libero_10}", "env.eval.tasks=null"])
    (tmp_path / "config.yaml").write_text(loaded.to_yaml())
    assert load_resolved(tmp_path / "config.yaml").evaluated == loaded.config.evaluated


KIND = "env.eval.env_type"
PLAYED, LIMIT = "evaluations-can-be-played", "env.eval.max_episode_steps"


@pytest.mark.parametrize(
    ("overrides", "key", "code"),
    [
        (("env=toy", "env.eval.tasks=[reach-blue]"), "env.eval.tasks", "tasks-exist"),
        (("env=toy", "env.eval.tasks=[reach-red,reach-red]"), "env.eval.tasks", "tasks-exist"),
        ((*LIBERO, f"{SETTINGS}.suite=libero_11"), f"{SETTINGS}.suite", "suite-exists"),
        ((*LIBERO, f"{SETTINGS}.suit=libero_10"), f"{SETTINGS}.suit", PLAYED),
        ((*LIBERO, f"{SETTINGS}.settle_steps=few"), f"{SETTINGS}.settle_steps", PLAYED),
        ((*LIBERO, f"{SETTINGS}.num_processes=3"), f"{SETTINGS}.num_processes", PLAYED),
        (("env=toy", "model=openvla_oft", f"{LIMIT}=2"), LIMIT, PLAYED),
        (("env=toy", "env.eval.cameras=[{height: 32}]"), "env.eval.cameras", PLAYED),
        (("env=toy", "env.eval.cameras=[{}, {}]"), "env.eval.cameras", PLAYED),
        (("env=metaworld", "env.eval.cameras=[{name: side}]"), "env.eval.cameras.0.name", "env-has-the-cameras"),
        (OTHER, "env.eval.tasks", "tasks-exist"),
        (("env=toy", f"{KIND}=dataset"), KIND, PLAYED),
        (("env=toy", f"{KIND}=metaworld", "env.eval.tasks=[reach-v3]"), KIND, PLAYED),
        (("env=maniskill", f"{KIND}=libero", f"{SETTINGS}.suite=libero_10", "env.reward_mode=sparse"), KIND, PLAYED),
        (
            (*LIBERO, "env.tasks=[x]", f"{SETTINGS}.suite=libero_10", "env.eval.num_episodes=9"),
            "env.eval.num_episodes",
            "every-task-is-evaluated",
        ),
        ((*LIBERO, "protocol=openvla_oft", f"{LIMIT}=300"), LIMIT, "evaluations-follow-what-is-given"),
    ],
)
def test_what_could_not_be_evaluated_is_refused(overrides: tuple[str, ...], key: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(list(overrides))
    assert (key, code) in {(problem.key, problem.code) for problem in caught.value.problems}, caught.value.report()


def test_a_verb_that_only_evaluates_does_not_ignore_tasks_of_the_command_line() -> None:
    given = ["env=toy", "env.tasks=[reach-red]", "env.eval.tasks=[reach-green]"]
    with raises_code("evaluations-follow-what-is-given"):
        load_config(given, verb="eval")
    load_config(given, verb="train")
