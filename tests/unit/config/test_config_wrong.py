"""Every wrong configuration is refused, with its key, its origin and a way out."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
from config_case import Wrong
from config_cases import BASE, FORM
from config_cases import RULES as GENERAL
from config_cases_algorithm import ALGORITHMS
from config_cases_cluster import CLUSTER
from config_cases_data import DATA
from config_cases_families import FAMILIES
from config_cases_libero import LIBERO
from config_cases_robot import ROBOT
from config_cases_serve import SERVE
from expect import raises_code

from embodrl.config import rules as rule_package
from embodrl.config.policy_card import CARD_FILE
from embodrl.errors import ConfigError
from embodrl.pipelines.load import load_config
from embodrl.specs import ADVANTAGES, LOSSES, MODELS

RULES = GENERAL + ALGORITHMS + CLUSTER + FAMILIES + LIBERO + DATA + SERVE + ROBOT
CASES = FORM + RULES


@pytest.fixture(autouse=True)
def _machine_without_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)


class Refusals:
    """The errors of the cases, each loaded once, and the rules that they break."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.broken: set[str] = set()
        self._errors: dict[str, ConfigError] = {}
        (folder / "file").write_text("")
        (folder / "teacher").mkdir()
        (folder / "teacher" / "config.json").write_text('{"model_type": "openvla"}')
        (folder / "teacher" / CARD_FILE).write_text('{"model_type": "openvla_oft"}')

    def error(self, case: Wrong) -> ConfigError:
        """Return the error of a wrong configuration."""
        if case.name not in self._errors:
            self._errors[case.name] = self._refuse(case)
        return self._errors[case.name]

    def arguments(self, case: Wrong) -> list[str]:
        return [argument.replace("{tmp}", str(self.folder)) for argument in case.args]

    def _refuse(self, case: Wrong) -> ConfigError:
        path = None
        if case.text is not None:
            path = self.folder / "mine.yaml"
            path.write_text(case.text)
        base = BASE if case in RULES else ()
        if any(arg.startswith(("model=", "model.model_type=")) for arg in case.args):  # the sizes are OpenVLA's
            base = tuple(arg for arg in base if not arg.startswith("model.architecture."))
        rules = [self._watched(rule) for rule in rule_package.RULES]
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as caught:
            patch.setattr(rule_package, "RULES", rules)
            load_config([*base, *self.arguments(case)], path)
        return caught.value

    def _watched(self, rule: rule_package.Rule) -> rule_package.Rule:
        @functools.wraps(rule.check)  # a rule's code is the name of its function
        def check(context):  # type: ignore[no-untyped-def]
            findings = list(rule.check(context))
            if findings:
                self.broken.add(rule.check.__name__)
            return iter(findings)

        return dataclasses.replace(rule, check=check)


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> Refusals:
    return Refusals(tmp_path_factory.mktemp("refusals"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_configuration_is_refused(case: Wrong, refusals: Refusals) -> None:
    error = refusals.error(case)
    assert {problem.key for problem in error.problems} == {case.key, *case.more}
    report = error.report()
    [paragraph] = [part for part in report.split("\n\n") if part.split(". ", 1)[-1].startswith(f"{case.key}: ")]
    assert case.names in paragraph
    assert "     hint:   " in paragraph
    origin = f"mine.yaml:{case.line}" if case.line else f"command line: {refusals.arguments(case)[0]}"
    assert origin in paragraph
    [problem] = [problem for problem in error.problems if problem.key == case.key]
    assert problem.code == case.code
    assert problem.hint, "every problem has a way out"


def test_there_are_enough_cases() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 100


def test_most_reports_name_what_is_allowed(refusals: Refusals) -> None:
    problems = [problem for case in CASES for problem in refusals.error(case).problems]
    assert sum(bool(p.allowed or p.nearest) for p in problems) > 0.6 * len(problems)


def test_every_rule_is_broken_by_a_case(refusals: Refusals) -> None:
    for case in RULES:
        refusals.error(case)
    # these want a model, a directory, a package or a verb that is not there by default, and have tests of their own
    elsewhere = {"model_has_value_heads", "outputs_can_be_written", "vllm_is_installed"}
    elsewhere |= {"vllm_serves_what_it_can", "vllm_sleeps_on_gpus", "experts_show_the_tasks", "there_is_a_simulator"}
    elsewhere |= {"interfaces_agree", "adapters_exist", "statistics_have_weights", "wire_keys_fit"}
    elsewhere |= {"policy_has_weights", "checkpoint_is_of_the_family", "protocols_carry_what_the_policy_writes"}
    elsewhere |= {"trained_model_has_gradients", "fine_tuned_model_has_gradients"}
    assert {rule.check.__name__ for rule in rule_package.RULES} - refusals.broken <= elsewhere


@pytest.fixture
def _more_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (ADVANTAGES, LOSSES, MODELS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    ADVANTAGES.add("grouped", "nowhere:grouped", needs_values=False, needs_groups=True)
    MODELS.add("headless", "nowhere:headless", value_head=False)


WITHOUT_CRITIC = (
    *BASE,
    "algorithm.adv_type=grouped",
    "algorithm.loss_type=actor",
    "model.add_value_head=false",
    "actor.optim.critic_warmup_iterations=0",
    "env.train.ignore_terminations=true",
    "algorithm.group_size=8",
)


@pytest.mark.usefixtures("_more_algorithms")
def test_algorithm_without_critic_is_allowed() -> None:
    assert load_config(list(WITHOUT_CRITIC)).config.algorithm.adv_type == "grouped"


@pytest.mark.usefixtures("_more_algorithms")
@pytest.mark.parametrize(
    ("change", "key", "code"),
    [
        ("algorithm.group_size=1", "algorithm.group_size", "groups-for-group-estimators"),
        ("env.train.ignore_terminations=false", "env.train.auto_reset", "groups-keep-step"),
        ("model.add_value_head=true", "model.add_value_head", "critic-is-complete"),
        ("actor.optim.critic_warmup_iterations=2", "actor.optim.critic_warmup_iterations", "critic-learns"),
        ("algorithm.loss_type=actor_critic", "algorithm.loss_type", "critic-is-complete"),
    ],
)
def test_algorithm_without_critic(change: str, key: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([*WITHOUT_CRITIC, change])
    assert (key, code) in [(problem.key, problem.code) for problem in caught.value.problems]


@pytest.mark.usefixtures("_more_algorithms")
def test_model_without_value_head() -> None:
    with raises_code("model-has-value-heads"):
        load_config(["model.model_type=headless"])


def test_wandb_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from embodrl.config.rules import runner

    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda name: None)
    with raises_code("wandb-is-installed"):
        load_config(["runner.logger.wandb_mode=offline"])


def test_output_without_permission(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from embodrl.config.rules import runner

    monkeypatch.setattr(runner.os, "access", lambda path, mode: Path(path) != tmp_path)
    with raises_code("outputs-can-be-written"):
        load_config([f"runner.output_dir={tmp_path}/run"])


TWO_BATCHES = ("actor.global_batch_size=160", "actor.micro_batch_size=50")


def test_all_problems_are_in_one_report(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("runner:\n  seed: x\n  seed: y\nenv:\n  num_processes: 3\n_target_: os.system\n")
    with pytest.raises(ConfigError) as caught:
        load_config(["model=openvl", "algorithm.gama=1", *TWO_BATCHES, "a==b"], path)
    keys = [problem.key for problem in caught.value.problems]
    assert set(keys) == {
        "a",
        "runner.seed",  # given twice
        "_target_",
        "model",
        "algorithm.gama",
        "env.train.total_num_envs",
        "env.eval.total_num_envs",
        "actor.micro_batch_size",
    }
    assert keys.count("runner.seed") == 2  # twice in the file, and not a number
    assert "The configuration has 9 problems" in str(caught.value)


def test_rules_wait_for_valid_types() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["env.num_processes=x", "env.train.total_num_envs=33"])
    assert "env.train.total_num_envs" not in [problem.key for problem in caught.value.problems]


def test_unreadable_file(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.yaml", tmp_path):
        with raises_code("config-file-unreadable"):
            load_config([], path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with raises_code("config-file-unreadable"):
        load_config([], tmp_path / "binary.yaml")


def test_bomb_of_aliases(tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    path.write_text("\n".join(lines))
    with raises_code("config-yaml-size"):
        load_config([], path)
