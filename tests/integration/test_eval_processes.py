"""`embodrl eval` whose episodes are played in rollout processes: the results of one process, also when one dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import embodrl

TWO = "cluster.component_placement={actor:0,rollout:'0:0-1',env:0}"
ORDER = (
    *("eval", "env=toy", "model=mlp", "model.warm_start=null", "model.random_weights=true", "extensions=[stop_at]"),
    *("env.num_processes=2", "env.eval.total_num_envs=4", "env.eval.num_episodes=7", "env.max_episode_steps=20"),
    *(
        "env.video.enabled=true",
        "env.video.num_episodes=5",
        "env.eval.decoding=all",
        "axes=noise",
        "env.eval.to_step_limit=true",
        "runner.logger.console=plain",
    ),
)
OF_A_RUN = ("seconds in simulators and policy", "command", "date")
"""Settings that differ between any two evaluations."""


def evaluation(directory: Path, *more: str, **options: Any) -> dict[str, Any]:
    done = embodrl(*ORDER, *more, "--output", directory, "--json", directory.with_suffix(".json"), **options)
    assert done.code == 0, done.stderr
    found, copy = (json.loads(path.read_text()) for path in (directory / "eval.json", directory.with_suffix(".json")))
    for result in (found, copy):
        result["settings"] = {name: value for name, value in result["settings"].items() if name not in OF_A_RUN}
    assert copy == found
    return found


def videos(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("episode_*.mp4"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    """The evaluation in one process with two threads, and its videos."""
    directory = tmp_path_factory.mktemp("whole") / "eval"
    return evaluation(directory, "cluster.num_threads=2"), videos(directory)


def test_two_processes_evaluate_as_one_does(whole: tuple[dict[str, Any], list[str]], tmp_path: Path) -> None:
    directory = tmp_path / "eval"
    found = evaluation(directory, TWO, "cluster.num_threads=2")
    assert found["per_episode"] == whole[0]["per_episode"] and len(found["per_episode"]) == 7
    assert found["axes"] and set(found["decodings"]) == {"greedy", "sampled"}
    assert (found, videos(directory)) == whole
    assert sorted(path.name for path in (directory / "logs").glob("rollout_*.log")) == [
        "rollout_0.log",
        "rollout_1.log",
    ]


@pytest.mark.long
def test_a_process_that_is_killed_plays_again(whole: tuple[dict[str, Any], list[str]], tmp_path: Path) -> None:
    directory = tmp_path / "eval"
    died = {"stop_at": "decide:3:SIGKILL:rank_1_once", "children": tmp_path / "children"}
    found = evaluation(directory, TWO, "cluster.num_threads=2", **died)
    assert (found, videos(directory)) == whole


@pytest.mark.long
def test_processes_on_ray_evaluate_as_one_does(whole: tuple[dict[str, Any], list[str]], tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    directory = tmp_path / "eval"
    found = evaluation(directory, TWO, "cluster.launcher=ray", "cluster.num_threads=2")
    assert (found, videos(directory)) == whole


def test_an_interrupted_evaluation_leaves_nothing_behind(tmp_path: Path) -> None:
    done = embodrl(*ORDER, TWO, "--output", tmp_path / "eval", stop_at="decide:3:SIGINT:parent_of_1")
    assert done.code == 130, done.stderr
    assert not (tmp_path / "eval" / "eval.json").exists()
