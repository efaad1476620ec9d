"""Rules know the verb: what it does not read is not refused, and noted where it is on the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from embodrl.config import load_config
from embodrl.config.check import shipped_schemas
from embodrl.config.rules import RULES
from embodrl.config.rules.verbs import READ, UNREAD, Verb, reads
from embodrl.errors import ConfigError
from embodrl.pipelines.load import LoadedRun, graph_of
from embodrl.pipelines.load import load_config as load_run_config

TINY = ["env=toy", "model.warm_start=null"]
BATCHES = ["actor.global_batch_size=7", "actor.micro_batch_size=3", "env.train.max_steps_per_rollout_epoch=55"]
"""A batch that fills no rollout, a micro-batch that divides no batch."""


def refused(overrides: list[str], verb: Verb | None) -> set[str]:
    try:
        load_config(overrides, verb=verb)
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


def test_settings_of_another_verb_are_noted(tmp_path: Path) -> None:
    notes = load_config([*TINY, "actor.optim.lr=1e-3", "env.eval.num_episodes=64"], verb="eval").notes
    assert [(note.key, note.code) for note in notes] == [("actor.optim.lr", "setting-of-another-verb")]
    file = tmp_path / "shared.yaml"  # files may be shared by verbs
    file.write_text("presets: {env: toy}\nmodel: {warm_start: null}\nactor: {optim: {lr: 0.001}}\n")
    assert load_config([], file, verb="eval").notes == []


def test_the_tables_name_settings() -> None:
    config = shipped_schemas()[0]()
    for tables in (UNREAD, READ):
        for keys in tables.values():
            for key in keys:
                value: object = config
                for part in key.split("."):
                    value = getattr(value, part)
    assert reads(None, "sft.lr") and reads("eval", "algorithm.sampling.top_k") and not reads("eval", "algorithm.gamma")
    assert all(
        dataclasses.is_dataclass(rule)
        and any(reads("train", key) or "sft" in key or "collect" in key or "serve" in key for key in rule.keys)
        for rule in RULES
    )


MODULE = """
from pathlib import Path
from embodrl.pipelines.builtin import ppo

def mine(config):
    with Path("{calls}").open("a") as file:
        file.write("called\\n")
    return ppo(config)
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "calls"
    (tmp_path / "pipeline_that_writes.py").write_text(MODULE.format(calls=path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


def test_a_pipeline_is_built_once(calls: Path) -> None:
    loaded = load_run_config([*TINY, "pipeline.fn=pipeline_that_writes:mine"], verb="train").with_absolute_paths()
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
        assert load_run_config([*TINY, "pipeline.fn=pipeline_that_writes:mine"], verb=verb).graph is None
    assert not calls.exists()
