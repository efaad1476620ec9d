"""What is accepted in the form that users try first, and what is accepted with a note."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodrl.config import load_config
from embodrl.config.explain import summary
from embodrl.names import nearest
from embodrl.trainer.files import run_directory


def notes(*arguments: str) -> dict[str, str]:
    return {note.code: note.key for note in load_config(list(arguments)).notes}


def test_an_item_of_a_list_is_set_and_the_rest_of_it_stays() -> None:
    before = load_config([]).config.env.cameras
    after = load_config(["env.cameras.0.height=96", "env.cameras.0.width=96"]).config.env.cameras
    assert [camera.model_dump() for camera in after] == [{**before[0].model_dump(), "height": 96, "width": 96}]
    origins = load_config(["env.cameras.0.height=96"]).origins
    assert str(origins["env.cameras.0.height"]) == "command line: env.cameras.0.height=96"
    assert load_config([]).config.env.cameras == before, "presets are as they were"
    replaced = load_config(["env.tasks=[PushCube-v1,PullCube-v1]", "env.tasks.1=PickCube-v1"]).config.env.tasks
    assert replaced == ("PushCube-v1", "PickCube-v1")


@pytest.mark.parametrize(
    "setting",
    [
        "actor.optim.lr=10",
        "actor.optim.lr=1e-30",
        "algorithm.sampling.temperature=100",
        "algorithm.sampling.temperature=1e-9",
        "algorithm.clip_ratio_high=100",
        "algorithm.update_epoch=1000",
        "env.step_timeout_s=0.001",
        "env.max_abs_reward=1e-9",
        "model.lora.rank=100000",
    ],
)
def test_values_far_outside_of_the_usual_are_noted(setting: str) -> None:
    assert notes(setting).get("values-are-usual") == setting.partition("=")[0]


def test_the_shipped_values_are_usual() -> None:
    for env in ("maniskill", "toy", "metaworld", "gymnasium"):
        assert "values-are-usual" not in notes(f"env={env}")


def test_a_function_that_is_hardly_a_reward_is_noted() -> None:
    assert notes("reward.fn='json:loads'")["reward-function-takes-an-episode"] == "reward.fn"


def test_an_experiment_with_another_environment_is_noted() -> None:
    assert notes("experiment=push_and_pull", "env=maniskill_pick")["experiment-overridden"] == "env"
    assert "experiment-overridden" not in notes("experiment=push_and_pull", "env=maniskill_mix")


@pytest.mark.parametrize(
    ("setting", "own"),
    [
        ("rollout.max_restarts=1", "rollout.own_process=true"),
        ("actor.max_restarts=1", "actor.own_process=true"),
        ("actor.max_restarts=1", "actor.training_backend=fsdp"),
    ],
)
def test_restarts_where_there_is_no_process_to_restart_are_noted(setting: str, own: str) -> None:
    assert notes("env=toy", setting)["setting-applies"] == setting.partition("=")[0]
    assert "setting-applies" not in notes("env=toy", setting, own) | notes("env=toy")


def test_a_smoke_test_of_fine_tuning_needs_one_key() -> None:
    assert notes("sft.max_steps=30")["sft-is-shorter-than-its-warm-up"] == "sft.max_steps"


def test_case_does_not_count_for_the_nearest_name() -> None:
    assert nearest("PPO", ["cpgd", "ppo", "gspo"]) == "ppo"
    assert nearest("OpenVLA-OFT", ["openvla", "openvla_oft"]) == "openvla_oft"


def test_a_run_is_named_after_the_algorithm_that_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_directory(load_config(["env=toy"]).config).name.startswith("toy-openvla-ppo-")


def test_the_summary_counts_minibatches_below_the_limit() -> None:
    changes = "env.train.total_num_envs=4 env.max_episode_steps=20 algorithm.group_size=2 algorithm.update_epoch=3"
    loaded = load_config(["env=toy", "algorithm=grpo", "model.warm_start=null", *changes.split()])
    # 4 environments, 2 rollouts of 4 chunks each: 32 chunks, one minibatch per epoch
    assert "3 optimizer steps of up to 160 chunks" in summary(loaded.config)
