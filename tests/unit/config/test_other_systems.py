"""Names of other systems lead to the right one here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import pytest
from expect import raises_code

from embodrl.config import load_config
from embodrl.config.check import schema_keys, shipped_schemas
from embodrl.config.other_systems import OTHER_KEYS, OTHER_NAMES
from embodrl.config.presets import groups, presets
from embodrl.errors import ConfigError, ConfigProblem
from embodrl.names import import_workflow
from embodrl.specs import ADVANTAGES, ENGINES, LOSSES, MODELS


@pytest.mark.parametrize(("key", "name"), OTHER_NAMES)
def test_a_name_of_another_system_is_answered(key: str, name: str) -> None:
    near, hint = OTHER_NAMES[key, name]
    with pytest.raises(ConfigError) as caught:
        load_config(["env=toy", "model.warm_start=null", f"{key}='{name.upper()}'"])
    (problem,) = [found for found in caught.value.problems if found.key == key]
    assert (problem.nearest, problem.hint) == (near, hint)
    known: dict[str, Callable[[], list[str]]] = {
        "algorithm.adv_type": ADVANTAGES.names,
        "algorithm.loss_type": LOSSES.names,
        "model.model_type": MODELS.names,
        "rollout.backend": ENGINES.names,
        "runner.logger": list,
    }
    names = known[key]() if key in known else presets(key)
    assert name not in names and (near in names or not near) and (key in groups() or key in known)


@pytest.mark.parametrize("key", OTHER_KEYS)
def test_a_key_of_another_system_is_answered(key: str) -> None:
    near, hint = OTHER_KEYS[key]
    (problem,) = problems(f"{key}=x")
    assert (problem.code, problem.nearest, problem.hint) == ("config-unknown-key", near, hint)
    assert key.startswith(problem.key) and (not near or near in schema_keys(shipped_schemas()[0]))


@pytest.mark.parametrize(
    ("arguments", "code", "written"),
    [
        (["runner.seed=1,2,3"], "argument-sweep", "embodrl sweep runner.seed=1,2,3"),
        (["env", "toy"], "argument-form", "env=toy"),
        (["runner.seed", "3"], "argument-form", "runner.seed=3"),
        (['cluster.component_placement={"actor,rollout":all}'], "argument-syntax", r"{actor\,rollout:all}"),
        (["recipe.rl=[runner.seed=8]"], "argument-syntax", 'recipe.rl=["runner.seed=8"]'),
        (["cluster.component_placement=env:0"], "config-type", "'cluster.component_placement={"),
    ],
)
def test_a_form_that_is_refused_is_answered_with_the_one_that_works(
    arguments: list[str], code: str, written: str
) -> None:
    (problem,) = problems(*arguments)
    assert problem.code == code and written in problem.hint


HINTS = sorted({hint for _, hint in (*OTHER_NAMES.values(), *OTHER_KEYS.values())})
SETTINGS = re.compile(r"(?:(?:'[a-z_.]+=[^']+'|\b[a-z_.]+=[a-z0-9_]+\b(?!-))(?: (?=[a-z_.']+=))?)+")
WRITTEN = sorted({found for hint in HINTS for found in SETTINGS.findall(hint)})


@pytest.mark.parametrize("written", WRITTEN)
def test_settings_of_the_hints_are_valid(written: str) -> None:
    arguments = shlex.split(written)
    load_config([*arguments, *["cluster=8xh100"] * ("cluster." in written)], verb="plan")


def test_what_the_hints_write_is_valid() -> None:
    placed = load_config([r"cluster.component_placement={actor\,rollout\,env:all}"]).config.cluster.component_placement
    assert placed == {"actor,rollout,env": "all"}
    assert load_config(['recipe.rl=["runner.seed=8"]']).config.recipe.rl == ("runner.seed=8",)


def test_arguments_of_a_gymnasium_constructor_are_registered() -> None:
    (problem,) = problems("env=gymnasium_reacher", "env.goal_width=3")
    assert problem.code == "config-unknown-key"
    assert "gymnasium.register" in problem.hint and "'goal_width'" in problem.hint


def problems(*arguments: str) -> list[ConfigProblem]:
    with pytest.raises(ConfigError) as caught:
        load_config(list(arguments))
    return caught.value.problems


def test_a_workflow_without_its_methods_is_named_with_them() -> None:
    with raises_code("workflow-abstract") as caught:
        import_workflow("embodrl.extras.workflows.workflow:RolloutWorkflow")
    assert "run_episode" in caught.value.message


def test_an_evaluation_says_that_it_plays_no_workflow() -> None:
    settings = {"rollout": {"workflow": "embodrl.extras.workflows.workflow:ChunkWorkflow"}}
    settings["env"] = {"train": {"auto_reset": False, "max_steps_per_rollout_epoch": 25}}  # type: ignore[dict-item]
    for verb, notes in (("eval", 1), ("train", 0)):
        found = [note.code for note in load_config([], settings, verb=verb).notes]
        assert found.count("evaluations-play-no-workflow") == notes
