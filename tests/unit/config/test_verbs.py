"""Rules know the verb: what it does not read is not checked, and refused where it is on the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from expect import raises_code
from shared_file import as_file

from embodrl.config import load_config
from embodrl.config.check import schema_keys, shipped_schemas
from embodrl.config.rules import RULES
from embodrl.config.schema.readers import Verb, readers, reads, settings_of
from embodrl.config.schema.section import Section
from embodrl.errors import ConfigError
from embodrl.pipelines.load import LoadedRun, graph_of
from embodrl.pipelines.load import load_config as load_run_config
from embodrl.specs import VERBS, VerbSpec

TOY = ["env=toy", "model.warm_start=null"]
TINY = [*TOY, "model.random_weights=true"]  # as `eval` and `serve` want it
BATCHES = ["actor.global_batch_size=7", "actor.micro_batch_size=3", "env.train.max_steps_per_rollout_epoch=55"]
"""A batch that fills no rollout, a micro-batch that divides no batch."""


def refused(overrides: list[str], verb: Verb | None) -> set[str]:
    try:
        load_config([], as_file(overrides), verb=verb)
    except ConfigError as error:
        return {problem.code for problem in error.problems}
    return set()


def test_training_batches_concern_only_training() -> None:
    wrong = [*TINY, *BATCHES]
    assert {"batches-fill-rollouts", "micro-batches-fill-batches"} <= refused(wrong, "train") | refused(wrong, None)
    assert refused(wrong, "train") == refused(wrong, None) == refused(wrong, "plan")
    verbs: tuple[Verb, ...] = ("eval", "sft", "collect")
    for verb in verbs:
        assert refused(wrong, verb) == set()


def test_what_a_verb_reads_is_still_refused() -> None:
    assert "processes-share-the-environments" in refused([*TINY, "env.eval.total_num_envs=33"], "eval")
    assert "processes-share-the-environments" not in refused([*TINY, "env.train.total_num_envs=33"], "eval")
    assert "sft-warm-up-ends" in refused([*TINY, "sft.lr_warmup_steps=20", "sft.max_steps=10"], "sft")
    assert refused([*TINY, "sft.lr_warmup_steps=20", "sft.max_steps=10"], "train") == set()


def test_settings_of_another_verb_are_refused(tmp_path: Path) -> None:
    given = [*TINY, "actor.optim.lr=1e-3", "env.eval.num_episodes=64", "env.video.fps=a", "sft={lr: 1e-3, lrr: 2}"]
    with pytest.raises(ConfigError) as caught:
        load_config(given, verb="eval")
    assert {(each.key, each.code) for each in caught.value.problems} == {
        ("actor.optim.lr", "setting-of-another-verb"),
        ("sft.lr", "setting-of-another-verb"),
        ("sft.lrr", "config-unknown-key"),
        ("env.video.fps", "config-type"),
    }
    assert "read by `embodrl sft`, `embodrl store`" in str(caught.value)
    file = tmp_path / "shared.yaml"  # files may be shared by verbs
    file.write_text(
        "presets: {env: toy}\nmodel: {warm_start: null, random_weights: true}\nactor: {optim: {lr: 0.001}}\n"
    )
    assert load_config([], file, verb="eval").notes == []
    shared = {"env": "toy", "model": {"warm_start": None, "random_weights": True}, "sft": {"lr": 0.001}}
    assert load_config([], shared, verb="eval").config.sft.lr == 0.001


MEMBERS: dict[Verb, tuple[str, str]] = {
    "train": ("algorithm.gamma actor.fsdp.cpu_offload env.video.every_eval", "axes sft.lr store.collector serve.port"),
    "plan": ("algorithm.gamma runner.name cluster.training_share", "axes sft.lr recipe.stages"),
    "eval": ("axes env.video.fps rollout.workflow cluster.launcher", "algorithm.bc_coef actor.optim.betas"),
    "collect": ("collect.noise_std model.action_dim env.eval.seed", "model.warm_start runner.seed collect.sample"),
    "record": ("collect.sample model.warm_start runner.seed", "collect.noise_std runner.output_dir env.video.fps"),
    "sft": ("sft.lr actor.optim.betas runner.keep_best cluster.num_nodes", "actor.optim.lr runner.max_iterations"),
    "serve": ("serve.port serve.gr00t.actions actor.param_dtype env.tasks", "env.num_processes protocol runner.name"),
    "store": ("store.url sft.lr collect.seed algorithm.dagger.gate_steps", "sft.data_dir cluster.launcher axes"),
    "run": ("recipe.stages", "sft.lr store.url"),
}
"""Settings that a verb reads, and others."""


@pytest.mark.parametrize("verb", MEMBERS)
def test_what_a_verb_reads(verb: Verb) -> None:
    schema = shipped_schemas()[0]
    settings = settings_of(verb, schema)
    own, others = (text.split() for text in MEMBERS[verb])
    assert set(own) <= set(settings) and set(others).isdisjoint(settings)
    assert set(others) <= set(settings_of("train", schema)) | set(settings_of("serve", schema)) | {
        key for key in others if readers(key, schema)
    }


def test_declarations_name_verbs_and_settings() -> None:
    for schema in shipped_schemas():
        named = [readers(key, schema) for key in schema_keys(schema)]
        assert set().union(*(each for each in named if each is not None)) <= {*MEMBERS} - {"plan"}
    assert reads(None, "sft.lr") and not reads("eval", "algorithm.gae_lambda")
    assert all(
        dataclasses.is_dataclass(rule)
        and any(reads("train", key) or "sft" in key or "collect" in key or "serve" in key for key in rule.keys)
        for rule in RULES
    )


def test_a_verb_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VERBS, "_entries", dict(VERBS._entries))

    class TuneConfig(Section):
        trials: int = 3

    VERBS.register(VerbSpec(name="tune", target="tune:run", sections={"tune": TuneConfig}, reads_as="train"))
    loaded = load_config([*TOY, "tune.trials=4", "algorithm.gamma=0.5"], verb="tune")
    assert loaded.config.model_dump()["tune"] == {"trials": 4}
    for setting, verb in (("tune.trials=4", "train"), ("sft.lr=1", "tune")):
        assert refused([*TOY, setting], verb) == set()
        with raises_code("setting-of-another-verb"):
            load_config([*TOY, setting], verb=verb)


def test_suggestions_are_settings_of_the_verb() -> None:
    for verb, key in (("collect", "collect.seed"), ("train", "runner.seed")):
        with pytest.raises(ConfigError) as caught:
            load_config([*TINY, "cluster.seed=3"], verb=verb)
        assert caught.value.problems[0].nearest == key, verb


MODULE = """
from pathlib import Path
from embodrl.pipelines.builtin import on_policy

def mine(config):
    with Path("{calls}").open("a") as file:
        file.write("called\\n")
    return on_policy(config)
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "calls"
    (tmp_path / "pipeline_that_writes.py").write_text(MODULE.format(calls=path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


def test_a_pipeline_is_built_once(calls: Path) -> None:
    loaded = load_run_config([*TOY, "pipeline.fn=pipeline_that_writes:mine"], verb="train").with_absolute_paths()
    assert isinstance(loaded, LoadedRun) and loaded.graph is not None
    env = loaded.config.env.model_copy(update={"num_processes": 1})
    measured = loaded.with_config(loaded.config.model_copy(update={"env": env}))
    assert graph_of(loaded) is graph_of(measured) is loaded.graph
    assert calls.read_text() == "called\n"
    kl = loaded.config.algorithm.kl.model_copy(update={"coef": 0.1})
    other = loaded.with_config(
        loaded.config.model_copy(update={"algorithm": loaded.config.algorithm.model_copy(update={"kl": kl})})
    )
    assert other.graph is None, "a graph of other settings is not kept"


def test_verbs_without_a_loop_do_not_call_the_pipeline(calls: Path) -> None:
    verbs: tuple[Verb, ...] = ("eval", "sft", "collect")
    for verb in verbs:
        assert load_run_config([], as_file([*TINY, "pipeline.fn=pipeline_that_writes:mine"]), verb).graph is None
    assert not calls.exists()


@pytest.mark.parametrize(
    ("verb", "settings"),
    [
        # Simulators shape rewards with the discount, and datasets record both.
        ("collect", ("env.reward_mode=potential", "algorithm.gamma=0.95", "algorithm.reward_type=action_level")),
        ("eval", ("algorithm.gamma=0.95",)),
        # The process that evaluates is restarted as often.
        ("sft", ("runner.eval_async=true", "rollout.max_restarts=5")),
    ],
)
def test_settings_that_simulators_and_evaluations_read(verb: Verb, settings: tuple[str, ...]) -> None:
    schema = load_config(["env=toy"]).config.__class__
    assert all(reads(verb, setting.partition("=")[0], schema) for setting in settings)


TWO = "cluster.component_placement={actor:0,rollout:'0:0-1',env:0}"


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_evaluations_may_act_in_processes_whatever_learns(algorithm: str) -> None:
    settings = ["env=toy", "model=mlp", f"algorithm={algorithm}", "env.num_processes=2", TWO]
    loaded = load_config([*settings, "model.warm_start=null", "model.random_weights=true"], verb="eval")
    assert loaded.deployment.rolls_out_in_processes
    assert "rollouts-of-one-process" not in {note.code for note in loaded.notes}


def test_a_workflow_that_an_evaluation_plays_needs_no_setting_of_rollouts() -> None:
    loaded = load_config([*TINY, "rollout.workflow=embodrl.workers.workflows.workflow:ChunkWorkflow"], verb="eval")
    assert loaded.config.env.train.auto_reset and not loaded.notes


@pytest.mark.parametrize("verb", ["collect", "record"])
def test_collections_may_act_in_processes_whatever_learns(verb: Verb) -> None:
    loaded = load_config(["env=toy", "algorithm=sac", "model=mlp", "env.num_processes=2", TWO], verb=verb)
    assert loaded.deployment.rolls_out_in_processes
    assert "rollouts-of-one-process" not in {note.code for note in loaded.notes}


def test_imitation_says_that_its_evaluations_act_in_one_process() -> None:
    loaded = load_config(["env=toy", "env.num_processes=2", TWO], verb="sft")
    assert "rollouts-of-one-process" in {note.code for note in loaded.notes}
