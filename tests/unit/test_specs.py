"""Specs of simulators and models: settings, facts and entry points from outside the package."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from expect import raises_code
from fresh import forget_extensions

from embodrl.config.yaml_text import to_yaml
from embodrl.envs.registry import SupportedEnv
from embodrl.errors import ConfigError, ConfigProblem
from embodrl.models.registry import SupportedModel
from embodrl.pipelines.load import load_config, load_run
from embodrl.registry import Registry
from embodrl.specs import ENVS, MODELS, WORKFLOW_RUNNERS, SimulatorSpec, WorkflowRunnerSpec
from embodrl.workers.env import env_kwargs

EXAMPLES = Path(__file__).parents[2] / "examples"
LINE = ("extensions=[line_world]", "env.env_type=line_world", "env.tasks=[push-right]", "model.warm_start=null")


@pytest.fixture(autouse=True)
def _extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("new_env", "new_model"):
        monkeypatch.syspath_prepend(str(EXAMPLES / name))
    forget_extensions(monkeypatch, ("line_world", "new_model", "small_vla"))


def problem_of(*arguments: str) -> ConfigProblem:
    with pytest.raises(ConfigError) as caught:
        load_config(list(arguments))
    [problem] = caught.value.problems
    return problem


def test_a_setting_of_an_extension_reaches_its_environment_and_is_shown() -> None:
    loaded = load_config([*LINE, "env.friction=0.25"])
    assert env_kwargs(loaded.config)["friction"] == 0.25
    assert "friction: 0.25" in to_yaml(loaded.config, None)
    assert str(loaded.origins["env.friction"]) == "command line: env.friction=0.25"
    assert env_kwargs(load_config([*LINE]).config)["friction"] == 0.0


@pytest.mark.parametrize(
    ("setting", "code", "says"),
    [
        ("env.friction=slippery", "config-type", "is not a number"),
        ("env.friction=1.5", "config-range", "is too large"),
        ("env.fricton=0.1", "config-unknown-key", "no such key"),
        ("env.suite=libero_goal", "setting-of-another-type", "libero has it"),
    ],
)
def test_a_wrong_setting_of_an_extension_is_refused(setting: str, code: str, says: str) -> None:
    problem = problem_of(*LINE, setting)
    assert (problem.code, problem.origin) == (code, f"command line: {setting}")
    assert says in problem.message
    if code == "config-unknown-key":
        assert problem.nearest == "env.friction"


def test_a_setting_of_an_extension_is_refused_elsewhere() -> None:
    problem = problem_of("extensions=[line_world]", "env=toy", "env.friction=0.1")
    assert problem.code == "setting-of-another-type" and "line_world has it" in problem.message


def test_a_setting_of_a_model_from_outside() -> None:
    arguments = ["extensions=[new_model]", "env=toy", "model.model_type=small_vla", "model.warm_start=null"]
    config = load_config([*arguments, "model.hidden_size=64"]).config
    assert config.model.model_dump()["hidden_size"] == 64
    assert problem_of(*arguments, "model.hiden_size=64").nearest == "model.hidden_size"
    assert problem_of(*arguments, "model.hidden_size=4").code == "config-range"


def test_a_configuration_survives_being_sent(tmp_path: Path) -> None:
    config = load_config([*LINE, "env.friction=0.25"]).config
    assert type(config).model_validate_json(config.model_dump_json()) == config


def test_a_file_of_a_run_may_hold_settings_of_other_simulators(tmp_path: Path) -> None:
    plain = json.loads(load_config(["env=toy"]).config.model_dump_json())
    plain["env"] |= {"sim_backend": "auto", "suite": None}
    plain["model"] |= {"pi": {"image_size": 32}}
    (tmp_path / "config.yaml").write_text(json.dumps(plain))
    loaded = load_run(tmp_path / "config.yaml")
    assert "sim_backend" not in loaded.config.env.model_dump()


def test_unknown_and_invalid_facts_are_refused() -> None:
    with raises_code("spec-fact-unknown") as caught:
        SupportedModel.register("mine", "nowhere:build", max_camera=1)
    assert "max_cameras" in caught.value.hint
    with raises_code("spec-fact-invalid"):
        SupportedModel.register("mine", "nowhere:build", max_cameras="1")
    with raises_code("spec-fact-invalid"):
        SupportedEnv.register("mine", "nowhere:Env", settings=("vidoe",))
    with raises_code("spec-fact-unknown"):
        SupportedEnv.register("mine", "nowhere:Env", action_dims=7)
    assert "mine" not in MODELS and "mine" not in ENVS


def test_entry_points_of_installed_packages_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "somebody-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[embodrl.envs]\nplanet = planets:SPEC\nbroken = no_such_module:SPEC\n")
    (tmp_path / "planets.py").write_text(
        "from embodrl.specs import SimulatorSpec\nSPEC = SimulatorSpec(name='planet', target='planets:World')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry("environment", SimulatorSpec, "embodrl.envs", {})
    assert "planet" in registry and "planets" not in sys.modules
    assert registry.entry("planet").target == "planets:World"
    found = [spec.name for spec in registry.all() if spec.name not in ENVS.builtin]
    assert "broken" in registry.names() and found == ["planet"]
    with raises_code("entry-point-broken"):
        registry.entry("broken")


def test_no_package_takes_the_first_place_or_the_name_of_a_feature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "somebody-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n")
    points = "[embodrl.workflow_runners]\naaa = planets:RUNNER\ncoroutines = planets:RUNNER\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    table = "embodrl.workers.registry:WORKFLOW_RUNNERS"
    registry = Registry("runner", WorkflowRunnerSpec, "embodrl.workflow_runners", table)
    assert registry.names()[0] == "coroutines"
    assert registry.entry("coroutines").target == WORKFLOW_RUNNERS.entry("coroutines").target


def test_a_missing_module_of_a_target_is_named() -> None:
    SupportedModel.register("mine", "no_such_module_at_all:build")
    with raises_code("spec-target-missing") as caught:
        MODELS.get("mine")
    assert "no_such_module_at_all" in caught.value.message


@pytest.mark.parametrize("pictures", [np.full((1, 16, 16, 3), 0.9), np.zeros((1, 8, 16, 3), np.uint8)])
def test_pictures_that_are_no_uint8_of_the_right_size_are_refused(
    pictures: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    import line_world

    monkeypatch.setattr(line_world.Line, "images", lambda self: pictures)
    with raises_code("simulator-images"):
        world = line_world.LineWorld(1, ["push-right"], [{"name": "base_camera", "height": 16, "width": 16}])
        world.reset(np.zeros(1, np.int64), np.zeros(1, np.int32), np.arange(1))


def test_a_step_that_returns_no_sim_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import line_world

    monkeypatch.setattr(line_world.Line, "step", lambda self, action: (0.0, False))
    world = line_world.LineWorld(1, ["push-right"], [{"name": "base_camera", "height": 16, "width": 16}])
    world.reset(np.zeros(1, np.int64), np.zeros(1, np.int32), np.arange(1))
    with raises_code("simulator-step") as caught:
        world.chunk_step(np.zeros((1, 2, 7), np.float32), np.ones(1, np.bool_))
    assert "step() of Line returned tuple" in caught.value.message


def test_only_the_cause_is_reported_if_an_extension_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    rest = ("env.env_type=mine", "env.my_gain=3", "model.warm_start=null")
    register = "from embodrl import register_env\nregister_env('mine', 'nowhere:Env', {})\n"
    (tmp_path / "ext_fact.py").write_text(register.format("tsaks=('a',)"))
    problem = problem_of("extensions=[ext_fact]", *rest)
    assert (problem.code, problem.hint) == ("spec-fact-unknown", "did you mean 'tasks'?")
    (tmp_path / "ext_reads.py").write_text(register.format("settings=('success_threshold',)"))
    assert "settings=ThatClass" in problem_of("extensions=[ext_reads]", *rest).hint
    (tmp_path / "ext_broken.py").write_text("\nundefined_name\n")
    problem = problem_of("extensions=[ext_broken]", *rest)
    assert problem.code == "extension-import" and problem.hint.endswith("ext_broken.py, line 2")


@pytest.mark.parametrize("text", ["x = 1\nx ==== 2\n", "x = 1\nimport a_module_that_is_not_there\n"])
def test_the_line_of_an_extension_that_cannot_be_imported_is_named(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ext_unreadable.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(["env=toy", "extensions=[ext_unreadable]"])
    [problem] = caught.value.problems
    assert problem.code == "extension-import" and problem.hint.endswith("ext_unreadable.py, line 2")


def test_an_unknown_key_is_still_reported_beside_a_broken_extension_if_the_environment_is_known() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["extensions=[no_such_module]", "env=toy", "env.my_gain=3", "model.warm_start=null"])
    assert {problem.code for problem in caught.value.problems} == {"extension-import", "config-unknown-key"}


def test_an_invalid_default_of_a_setting_is_refused() -> None:
    from embodrl import EnvConfig

    class Wrong(EnvConfig):
        """A default of another type than the setting."""

        my_gain: float = "fast"  # type: ignore[assignment]

    SupportedEnv.register("wrong_default", "nowhere:Env", settings=Wrong)
    with raises_code("settings-class-invalid") as caught:
        load_config(["env.env_type=wrong_default", "model.warm_start=null"])
    assert "my_gain" in caught.value.message


def test_the_note_about_a_common_setting_that_is_not_read_says_how_to_read_it() -> None:
    notes = {note.key: note.hint for note in load_config([*LINE, "env.reward_mode=sparse"]).notes}
    assert "reads=" in notes["env.reward_mode"]
    assert notes_of_toy()["env.reward_mode"] == "leave it out"


def notes_of_toy() -> dict[str, str]:
    loaded = load_config(["env=toy", "model.warm_start=null", "env.reward_mode=sparse"])
    return {note.key: note.hint for note in loaded.notes}


def test_a_policy_without_a_method_is_named() -> None:
    import torch

    from embodrl.config.schema import ModelConfig
    from embodrl.models.base import VLAPolicy
    from embodrl.models.load_report import LoadReport
    from embodrl.models.registry import build_policy

    class Half(VLAPolicy):
        """A policy whose author forgot everything."""

    for name, policy in (("half", Half), ("other", torch.nn.Identity)):
        SupportedModel.register(name, lambda config, policy=policy, **_: (policy(), LoadReport("")))
        with raises_code("policy-incomplete") as caught:
            build_policy(ModelConfig(model_type=name), device="cpu", dtype=torch.float32, seed=0)
        assert "evaluate_actions" in caught.value.message + caught.value.hint


def test_a_module_of_gymnasium_that_is_missing_is_named() -> None:
    pytest.importorskip("gymnasium")
    from embodrl.envs.gymnasium.env import _make

    with raises_code("gymnasium-module-missing") as caught:
        _make("no_such_module_at_all:MyArm-v0", 5)
    assert "PYTHONPATH" in caught.value.hint and "no_such_module_at_all" in caught.value.message
