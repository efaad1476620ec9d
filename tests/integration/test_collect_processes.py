"""`embodrl collect` whose attempts are played in rollout processes: the dataset of one process, also when one dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import embodrl

TWO = "cluster.component_placement={actor:0,rollout:'0:0-1',env:0}"
ORDER = (
    *("env=toy", "env.tasks=[reach-red,reach-green]", "env.num_processes=2", "env.train.total_num_envs=4"),
    *("env.max_episode_steps=20", "collect.num_episodes=11", "collect.noise_std=0.8", "collect.min_speed=0.4"),
    *("extensions=[stop_at]", "runner.logger.console=plain"),
)
TRAIN = (
    *("train", "env=toy", "model=mlp", "model.warm_start=null", "env.tasks=[reach-red,reach-green]"),
    *("env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=16", "runner.max_iterations=1"),
    *("actor.global_batch_size=8", "actor.micro_batch_size=8", "env.eval.num_episodes=2", "env.eval.total_num_envs=2"),
)


def dataset(directory: Path, *more: str, **options: Any) -> tuple[dict[str, bytes], Any]:
    """Return the bytes of a collection's data files, and its description without the directory."""
    done = embodrl("collect", *ORDER, *more, f"collect.output_dir={directory}", **options)
    assert done.code == 0, done.stderr
    data = {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.suffix in (".safetensors", ".mp4", ".parquet")
    }
    if (directory / "index.json").exists():
        content = json.loads((directory / "index.json").read_text())
    else:
        content = {"meta": json.loads((directory / "meta" / "embodrl.json").read_text())}
    content["meta"]["collect"].pop("output_dir")
    return data, content


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], Any]:
    return dataset(tmp_path_factory.mktemp("whole") / "data", "collect.format=raw")


def test_two_processes_collect_as_one_does(whole: tuple[dict[str, bytes], Any], tmp_path: Path) -> None:
    found = dataset(tmp_path / "data", "collect.format=raw", TWO)
    assert found == whole
    assert [one["task"] for one in found[1]["episodes"]].count("reach-red") == 6
    assert sorted(path.name for path in (tmp_path / ".data.logs").glob("rollout_*.log")) == [
        "rollout_0.log",
        "rollout_1.log",
    ]


@pytest.mark.long
def test_two_processes_write_the_lerobot_dataset_of_one(tmp_path: Path) -> None:
    one, two = (dataset(tmp_path / name, *more) for name, more in (("one", ()), ("two", (TWO,))))
    assert two == one and any(name.endswith(".mp4") for name in one[0])


@pytest.mark.long
def test_a_process_that_is_killed_plays_its_attempts_again(whole: tuple[dict[str, bytes], Any], tmp_path: Path) -> None:
    died = {"stop_at": "expert_actions:9:SIGKILL:rank_1_once", "children": tmp_path / "children"}
    assert dataset(tmp_path / "data", "collect.format=raw", TWO, **died) == whole


@pytest.mark.long
def test_a_policy_in_two_processes_records_what_it_does_in_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = embodrl(*TRAIN, f"runner.output_dir={run}")
    assert done.code == 0, done.stderr
    acting = (f"policy={run}", "collect.format=raw", "collect.keep_failures=true", "cluster.num_threads=2")
    for decoding in ("collect.sample=false", "collect.sample=true"):
        one, two = (dataset(tmp_path / f"{decoding}_{len(more)}", *acting, decoding, *more) for more in ((), (TWO,)))
        assert two == one
        assert (b"action_log_prob" in one[0]["shard_0000.safetensors"]) == (decoding == "collect.sample=true")
