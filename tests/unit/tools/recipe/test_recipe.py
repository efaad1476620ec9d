"""Recipes: what goes to which stage, what is refused before the first starts, and what a repeated command does."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from documented import ROOT

from embodrl.config import load_config
from embodrl.config.presets import presets
from embodrl.errors import ConfigError, EmbodrlError, MissingDependencyError, OutputError, UsageError
from embodrl.storage.integrity import write_checksums
from embodrl.tools.recipe import stages as module
from embodrl.tools.recipe.stages import Recipe, plan_recipe

TOY = """
presets: {env: toy, model: mlp, algorithm: rlpd}
recipe: {stages: [collect, sft, rl], sft: [env.eval.total_num_envs=8]}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "toy.yaml"
    path.write_text(TOY)
    return path


@pytest.fixture
def plan(config: Path, tmp_path: Path) -> Callable[..., Recipe]:
    return lambda *settings: plan_recipe([*settings, f"runner.output_dir={tmp_path / 'run'}"], config)


class Verbs:
    """In place of the commands: each writes what its stage ends with, unless it is to fail."""

    def __init__(self) -> None:
        self.started: list[list[str]] = []
        self.codes: dict[str, int] = {}

    def __call__(self, command: list[str], **_: object) -> Verbs:
        arguments = command[4:]
        self.started.append(arguments)
        verb, last = arguments[0], arguments[-1]
        keys = {"collect": "collect.output_dir=", "sft": "sft.output_dir=", "train": "runner.output_dir="}
        given = [text.removeprefix(keys[verb]) for text in arguments if verb in keys and text.startswith(keys[verb])]
        directory = Path((given or [last])[0].strip("'"))
        name = directory.name
        self._code = self.codes.pop(name, 0)
        metrics = {"sft": "sft_metrics.jsonl", "rl": "metrics.jsonl", "teacher": "metrics.jsonl"}.get(name)
        outputs = directory if metrics is None else directory / "policy"
        (directory if self._code else outputs).mkdir(parents=True, exist_ok=True)
        if metrics is not None:
            (directory / metrics).touch()
        if not self._code:
            (outputs / "file").write_text(name)
            write_checksums(outputs)
        return self

    def wait(self) -> int:
        return self._code

    def names(self) -> list[str]:
        return [arguments[0] for arguments in self.started]


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> Verbs:
    stub = Verbs()
    monkeypatch.setattr(module.subprocess, "Popen", stub)
    return stub


def do(recipe: Recipe) -> int:
    return module.run_recipe(recipe, lambda _: None)


def refused(action: Callable[[], object]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        action()
    return {problem.key: problem.code for problem in caught.value.problems}


def test_a_setting_goes_to_the_stages_that_read_it(plan: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = plan("runner.seed=3", "sft.lr=0.1", "runner.max_iterations=7", "env.include_state=true")
    collect, sft, rl = (stage.arguments for stage in recipe.stages)
    run = tmp_path / "run"
    assert collect == ("env.include_state=true", "collect.seed=6500000", f"collect.output_dir='{run / 'collect'}'")
    assert sft == (
        *("env.eval.total_num_envs=8", "runner.seed=3", "sft.lr=0.1", "env.include_state=true"),
        *(f"sft.output_dir='{run / 'sft'}'", f"sft.data_dir='{run / 'collect'}'"),
    )
    assert rl == (
        *("runner.seed=3", "runner.max_iterations=7", "env.include_state=true", f"runner.output_dir='{run / 'rl'}'"),
        *(f"algorithm.off_policy.demos='{run / 'collect'}'", f"model.warm_start='{run / 'sft' / 'policy'}'"),
    )
    assert not run.exists(), "nothing is written before all stages are valid"


TAUGHT = (
    "recipe.stages=[collect,teacher,rl]",
    'recipe.teacher=["algorithm=rlpd", "runner.max_iterations=3"]',
    "algorithm=dagger",
)


def test_a_teacher_is_trained_first_and_is_the_expert_of_the_last_stage(
    plan: Callable[..., Recipe], verbs: Verbs, tmp_path: Path
) -> None:
    recipe = plan(*TAUGHT)
    _, teacher, rl = (stage.arguments for stage in recipe.stages)
    run = tmp_path / "run"
    demos = f"algorithm.off_policy.demos='{run / 'collect'}'"
    assert "runner.max_iterations=3" in teacher and demos in teacher and "runner.max_iterations=3" not in rl
    assert f"algorithm.dagger.expert='{run / 'teacher' / 'policy'}'" in rl and demos not in rl
    verbs.codes["teacher"] = 1
    assert do(recipe) == 1 and do(plan(*TAUGHT)) == 0
    assert verbs.names() == ["collect", "train", "resume", "train"]
    with pytest.raises(ConfigError) as caught:
        plan(*TAUGHT, "algorithm.dagger.expert=elsewhere")
    assert "recipe-path" in {problem.code for problem in caught.value.problems}


def test_demonstrations_have_the_users_seed_where_there_is_one(plan: Callable[..., Recipe]) -> None:
    assert "collect.seed=100" in plan("collect.seed=100", "runner.seed=3").stages[0].arguments
    assert plan("collect.seed=100").stages[0].arguments[-1].startswith("collect.output_dir=")


def test_a_recipe_without_imitation_has_no_warm_start(plan: Callable[..., Recipe]) -> None:
    arguments = plan("recipe.stages=[collect,rl]").stages[-1].arguments
    assert any("demos=" in text for text in arguments) and not any("warm_start" in text for text in arguments)
    arguments = plan("algorithm=ppo").stages[-1].arguments
    assert not any("demos=" in text for text in arguments) and any("warm_start" in text for text in arguments)


def test_an_offline_stage_learns_from_the_demonstrations(plan: Callable[..., Recipe], tmp_path: Path) -> None:
    for stages in ("[collect,rl]", "[collect,sft,rl]"):
        arguments = plan("algorithm=iql", f"recipe.stages={stages}").stages[-1].arguments
        assert f"algorithm.off_policy.demos='{tmp_path / 'run' / 'collect'}'" in arguments


def test_everything_wrong_with_all_stages_is_refused_at_once(plan: Callable[..., Recipe], tmp_path: Path) -> None:
    wrong = ("collect.num_episodes=0", "sft.lr=-1", "runner.max_iterations=0", "serve.port=1", "sft.data_dir=x")
    assert refused(lambda: plan(*wrong)) == {
        "collect.num_episodes": "config-range",
        "sft.lr": "config-range",
        "runner.max_iterations": "config-range",
        "serve.port": "recipe-unread",
        "sft.data_dir": "recipe-path",
    }
    assert refused(lambda: plan("recipe.stages=[rl,sft]")) == {"recipe.stages": "recipe-order"}
    assert refused(lambda: plan("recipe.stages=[walk]")) == {"recipe.stages.0": "config-choice"}
    # Nothing makes the demonstrations that the last stage learns from.
    assert refused(lambda: plan("recipe.stages=[rl]")) == {"algorithm.off_policy.demos": "off-policy-numbers-fit"}
    with pytest.raises(UsageError) as caught:
        plan("recipe.stages=[]")
    assert caught.value.code == "recipe-missing" and not (tmp_path / "run").exists()


def test_stages_of_an_untrusted_file_name_no_code(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(TOY.replace("[env.eval", "['reward.fn=my_module:mine', env.eval"))
    monkeypatch.setattr("embodrl.config.compose.is_trusted", lambda *_, **__: False)
    settings = [f"runner.output_dir={tmp_path / 'run'}"]
    assert refused(lambda: plan_recipe(settings, config)) == {"recipe.sft": "settings-run-code"}


def test_the_same_command_continues(plan: Callable[..., Recipe], verbs: Verbs, tmp_path: Path) -> None:
    verbs.codes = {"sft": -9}
    assert do(plan()) == 137
    assert verbs.names() == ["collect", "sft"]
    # Without a checkpoint fine-tuning begins again, in a directory without the former metrics.
    (tmp_path / "run" / "sft" / "left").touch()
    verbs.codes = {"rl": 143}
    assert do(plan()) == 143
    assert verbs.names()[2:] == ["sft", "train"] and not (tmp_path / "run" / "sft" / "left").exists()
    assert do(plan()) == 0
    assert verbs.started[-1] == ["resume", str(tmp_path / "run" / "rl")]
    assert do(plan()) == 0 and len(verbs.started) == 5, "nothing is left to do"


def test_fine_tuning_continues_from_a_checkpoint(plan: Callable[..., Recipe], verbs: Verbs, tmp_path: Path) -> None:
    verbs.codes = {"sft": 1}
    do(plan())
    (tmp_path / "run" / "sft" / "checkpoints" / "step_20").mkdir(parents=True)
    assert do(plan()) == 0
    assert verbs.started[2] == ["resume", str(tmp_path / "run" / "sft")]


def test_a_stage_that_began_with_other_settings_is_refused(plan: Callable[..., Recipe], verbs: Verbs) -> None:
    verbs.codes = {"sft": 1}
    assert do(plan("sft.lr=0.1")) == 1
    assert refused(lambda: plan("sft.lr=0.2", "env.max_episode_steps=9")) == {
        "sft.lr": "recipe-changed",
        "env.max_episode_steps": "recipe-changed",
    }
    assert do(plan("sft.lr=0.1", "runner.max_iterations=3")) == 0, "the last stage had not begun"
    assert refused(lambda: plan("sft.lr=0.1")) == {"runner.max_iterations": "recipe-changed"}


def test_what_a_later_stage_was_made_from_is_not_made_again(
    plan: Callable[..., Recipe], verbs: Verbs, tmp_path: Path
) -> None:
    assert do(plan()) == 0
    policy = tmp_path / "run" / "sft" / "policy"
    (policy / "file").write_text("damaged")
    with pytest.raises(EmbodrlError) as caught:
        do(plan())
    assert caught.value.code == "file-damaged"
    for path in (*policy.iterdir(),):
        path.unlink()
    policy.rmdir()
    with pytest.raises(OutputError) as stale:
        do(plan())
    assert stale.value.code == "recipe-stale" and len(verbs.started) == 3


def test_no_flipped_bit_of_recipe_json_repeats_a_stage(
    plan: Callable[..., Recipe], verbs: Verbs, tmp_path: Path
) -> None:
    recipe = plan()
    assert do(recipe) == 0
    path = tmp_path / "run" / "recipe.json"
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        found = replace(recipe, begun={}, ended=[])
        with pytest.raises(EmbodrlError):
            found.read()
            found.refuse_other()
            assert (found.begun, found.ended) != (recipe.begun, recipe.ended)
            pytest.fail(f"a flipped bit at byte {at} is taken: {content[max(0, at - 20) : at + 20]!r}")
    assert len(verbs.started) == 3


def test_the_directory_of_something_else_is_refused(plan: Callable[..., Recipe], tmp_path: Path) -> None:
    (tmp_path / "run" / "rl" / "policy").mkdir(parents=True)
    with pytest.raises(OutputError) as caught:
        plan()
    assert caught.value.code == "recipe-directory"


def test_a_stage_that_leaves_nothing_is_an_error(
    plan: Callable[..., Recipe], verbs: Verbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "write_json_file", lambda path, content: None)
    monkeypatch.setattr(Verbs, "__call__", lambda self, command, **_: self)
    verbs._code = 0
    with pytest.raises(OutputError) as caught:
        do(plan())
    assert caught.value.code == "recipe-no-results"


def test_two_processes_do_not_share_a_recipe(plan: Callable[..., Recipe], verbs: Verbs, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = module.RunLock(tmp_path / "run")
    with pytest.raises(OutputError) as caught:
        do(plan())
    lock.close()
    assert caught.value.code == "run-in-use" and not verbs.started


def test_signals_reach_the_stage() -> None:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    before = signal.getsignal(signal.SIGTERM)
    with module._forwarding(process):
        os.kill(os.getpid(), signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("name", presets("experiment"))
def test_recipes_that_ship_are_valid_and_say_what_is_known_of_them(name: str, tmp_path: Path) -> None:
    try:
        recipe = plan_recipe([f"experiment={name}", f"runner.output_dir={tmp_path}"])
    except UsageError as error:
        assert error.code == "recipe-missing" and name in ("hybrid", "human_in_the_loop", "push_and_pull")
        return
    text = module.compose([f"experiment={name}"], None).tree.plain()
    assert recipe.expected and text["recipe"]["stages"][-1] == "rl"
    if "%" not in recipe.expected:  # no figure
        from embodrl.config.presets import describe

        assert "not measured" in recipe.expected and "not measured" in describe("experiment", name)


def test_the_expectation_is_that_of_the_recipe_without_the_users_settings(tmp_path: Path) -> None:
    given = ["experiment=pick_cube", f"runner.output_dir={tmp_path}", "runner.seed=1", "runner.logger.console=plain"]
    known = str(module.compose(given, None).tree.plain()["recipe"]["expected"])
    plain, changed = (plan_recipe([*given, *more]).expected for more in ([], ["collect.num_episodes=5"]))
    assert plain == f"expected: {known}"
    assert changed.endswith(known) and changed != plain


def test_videos_that_cannot_be_written_are_refused_before_the_first_stage(
    plan: Callable[..., Recipe], verbs: Verbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embodrl.preflight.simulators.VIDEO_MODULES", ("no_such_module",))
    with pytest.raises(MissingDependencyError):
        module.run_recipe(plan("env.video.enabled=true"), print)
    assert not verbs.started


def test_a_misspelt_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        module.plan_recipe(["experiment=pickcube"])
    assert [(p.code, p.nearest) for p in caught.value.problems] == [("preset-unknown", "pick_cube")]


def test_the_example_of_the_page_is_valid(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"`('recipe\.rl=[^`]*)`", page)
    arguments = ["experiment=pick_cube", *shlex.split(example), f"runner.output_dir='{tmp_path / 'run'}'"]
    assert "env.train.total_num_envs=16" in module.plan_recipe(arguments).stages[-1].arguments


def test_training_a_recipe_alone_is_noted() -> None:
    note = "recipes-begin-with-other-stages"
    (found,) = [each for each in load_config(["experiment=pick_cube"], verb="train").notes if each.code == note]
    assert "embodrl run experiment=pick_cube" in found.hint
    for settings in (["experiment=push_and_pull"], ["env=toy", "model=mlp"]):
        assert note not in [each.code for each in load_config(settings, verb="train").notes]
