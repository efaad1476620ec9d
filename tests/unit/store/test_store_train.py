"""The trainer of a store."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from expect import raises_code

from embodrl.config.load import LoadedConfig
from embodrl.config.yaml_text import to_yaml
from embodrl.fields import Fields
from embodrl.pipelines.load import load_config
from embodrl.storage.checkpoint import CheckpointManager
from embodrl.store.learner import StoreLearner
from embodrl.store.shards import EPISODES
from embodrl.store.store import Store
from embodrl.store.train import refuse_others, train
from embodrl.trainer.settings import STATE_KEY

SETTINGS = ["env=toy", "model=mlp", "env.state=full", "store.url=/a", "sft.output_dir=run", "algorithm=ppo_gaussian"]


def load(*changes: str) -> LoadedConfig:
    return load_config([*SETTINGS, *changes], verb="store")


@pytest.fixture(scope="module")
def begun() -> str:
    return to_yaml(load().config, None)


@pytest.mark.parametrize(
    "change", ["sft.lr=7e-5", "store.successes_only=false", "store.url=/b", "runner.seed=9", "env.max_episode_steps=9"]
)
def test_a_training_is_not_continued_with_other_settings(begun: str, change: str) -> None:
    with raises_code("store-other-settings") as caught:
        refuse_others(load(change).config, begun, Path("run"))
    assert change.partition("=")[0] in caught.value.message


def test_the_command_refuses_before_it_changes_anything(
    begun: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(state=Fields({STATE_KEY: begun}, "state"))
    monkeypatch.setattr(CheckpointManager, "latest_good", lambda manager: (found, []))
    with raises_code("store-other-settings"):
        train(load("sft.lr=7e-5", f"sft.output_dir={tmp_path}"))
    assert not (tmp_path / "config.yaml").exists()


def test_a_training_may_become_longer_and_look_elsewhere_more_often(begun: str) -> None:
    refuse_others(load("sft.max_steps=4000", "store.poll_s=9", "sft.micro_batch_size=8").config, begun, Path("run"))


def test_used_shards_are_removed_but_for_the_newest_of_each_collector(tmp_path):
    store = Store(str(tmp_path))
    store.create()
    names = [f"{EPISODES}/{name}" for name in ("desk-000000", "desk-000001", "desk-000002", "robot-000000")]
    for name in names:
        store.put_note(name, {})
    trainer = object.__new__(StoreLearner)
    trainer.weights = SimpleNamespace(store=store)
    trainer.followed = SimpleNamespace(finished=lambda: [name for name in names if name != names[1]])
    trainer.remove_used()
    assert store.names(EPISODES) == names[1:]
