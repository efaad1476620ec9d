"""Whole runs whose rollouts are played in processes of their own: the same runs, also when processes die."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import TINY, embodrl, metrics

TWO = "cluster.component_placement={actor:0,rollout:'0:0-1',env:0}"
NEW = "rollout/restarts"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY.replace("decoding: greedy", "decoding: all"))
    return path


@pytest.fixture(scope="module")
def plain(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """The run in one process with two threads."""
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    done = embodrl("train", "--config", config, f"runner.output_dir={run_dir}", "cluster.num_threads=2")
    assert done.code == 0, done.stderr
    return metrics(run_dir)


def test_two_rollout_processes_play_as_two_threads_do(config: Path, plain: list, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = embodrl("train", "--config", config, f"runner.output_dir={run_dir}", TWO)
    assert done.code == 0, done.stderr
    assert metrics(run_dir) == plain
    sampled = [row["iteration"] for row in plain if "eval/success_rate_sampled" in row]
    assert sampled == [0, 4] and "eval/success_rate" in plain[2]
    assert sorted(path.name for path in (run_dir / "logs").glob("rollout_*.log")) == ["rollout_0.log", "rollout_1.log"]
    assert "2 rollout process(es), weights by memory" in log_of(run_dir)


@pytest.mark.long
def test_actor_and_rollout_apart(config: Path, plain: list, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    apart = ("actor.own_process=true", "rollout.own_process=true", "cluster.num_threads=2")
    done = embodrl("train", "--config", config, f"runner.output_dir={run_dir}", *apart)
    assert done.code == 0, done.stderr
    assert metrics(run_dir) == plain


@pytest.mark.long
def test_a_rollout_process_that_is_killed_plays_again(config: Path, plain: list, tmp_path: Path) -> None:
    """In the second rollout of four; what was played is as if nothing had been."""
    run_dir, children = tmp_path / "run", tmp_path / "children"
    order = (f"runner.output_dir={run_dir}", TWO, "rollout.weight_sync=disk")
    done = embodrl("train", "--config", config, *order, stop_at="act:6:SIGKILL:rank_1_once", children=children)
    assert done.code == 0, done.stderr
    rows = metrics(run_dir)
    assert [row.get(NEW) for row in rows] == [None, 0, 1, 1, 1]
    assert [without(row) for row in rows] == [without(row) for row in plain]
    assert "restart 1 of 3 of a rollout process: rollout[1] was killed by SIGKILL" in log_of(run_dir)


@pytest.mark.parametrize(
    ("sync", "stop_at"),
    [
        pytest.param("collective", "optimizer_step:6:SIGKILL:worker", marks=pytest.mark.long),
        pytest.param("collective", "take_weights:3:SIGKILL:rank_1_once", marks=pytest.mark.long),
        pytest.param("collective", "join:1:SIGKILL:rank_1_once", marks=pytest.mark.long),
        pytest.param("collective", "decide:6:SIGKILL:rank_1_once", marks=pytest.mark.long),
        pytest.param("memory", "optimizer_step:6:SIGKILL:worker", marks=pytest.mark.long),
        pytest.param("memory", "take_weights:3:SIGKILL:rank_1_once", marks=pytest.mark.long),
        pytest.param("disk", "take_weights:3:SIGKILL:rank_1_once", marks=pytest.mark.long),
    ],
)
def test_a_rollout_process_may_die_at_any_time(
    config: Path, plain: list, tmp_path: Path, sync: str, stop_at: str
) -> None:
    """While others train, evaluate, or take weights over."""
    run_dir, children = tmp_path / "run", tmp_path / "children"
    order = (f"runner.output_dir={run_dir}", TWO, f"rollout.weight_sync={sync}")
    done = embodrl("train", "--config", config, *order, stop_at=stop_at, children=children, timeout_s=200)
    assert done.code == 0, done.stderr
    rows = metrics(run_dir)
    assert [without(row) for row in rows] == [without(row) for row in plain]
    assert log_of(run_dir).count("restart 1 of 3 of a rollout process") == 1
    assert not (run_dir / "weight_sync").exists()


@pytest.mark.long
def test_a_rollout_process_that_dies_again_and_again_ends_the_run(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    order = (f"runner.output_dir={run_dir}", TWO, "rollout.max_restarts=1")
    done = embodrl("train", "--config", config, *order, stop_at="act:6:SIGKILL:rank_1")
    assert done.code == 1
    assert "stopped after 1 restarts of rollout processes: rollout[1] was killed by SIGKILL" in done.stderr
    assert "embodrl resume" in done.stderr


@pytest.mark.long
def test_an_interrupted_rollout_is_undone_and_resumed_bit_exactly(config: Path, plain: list, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    order = (f"runner.output_dir={run_dir}", TWO, "rollout.weight_sync=collective")
    done = embodrl("train", "--config", config, *order, stop_at="act:11:SIGINT:parent_of_1")
    assert done.code == 130, done.stderr
    # The signal may come too late for the rollout; it then ends the run after its update.
    assert len(metrics(run_dir)) in (3, 4) and (run_dir / "checkpoints" / "step_2").is_dir()
    resumed = embodrl("resume", run_dir)
    assert resumed.code == 0, resumed.stderr
    assert metrics(run_dir) == plain


@pytest.mark.long
def test_simulators_of_rollout_processes_are_restarted(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    order = (f"runner.output_dir={run_dir}", TWO)
    done = embodrl("train", "--config", config, *order, stop_at="act:6:SIGKILL:simulator")
    assert done.code == 0, done.stderr
    rows = metrics(run_dir)
    assert [row.get("env/restarts") for row in rows] == [None, 0, 2, 2, 2]
    assert rows[2]["rollout/lost_episodes"] == 4 and rows[3]["rollout/lost_episodes"] == 0
    assert [row.get(NEW) for row in rows][1:] == [0, 0, 0, 0]


@pytest.mark.long
def test_ahead_of_training(config: Path, tmp_path: Path) -> None:
    """Chunks are never older than the bound, and each shard is trained on once, whoever dies."""
    run_dir, children = tmp_path / "run", tmp_path / "children"
    ahead = ("runner.max_staleness=1", "runner.max_iterations=6", "algorithm.decoupled.enabled=true")
    order = (f"runner.output_dir={run_dir}", TWO, *ahead)
    done = embodrl("train", "--config", config, *order, stop_at="act:9:SIGKILL:rank_1_once", children=children)
    assert done.code == 0, done.stderr
    rows = metrics(run_dir)
    assert [row["env_steps"] for row in rows] == [48 * i for i in range(7)]
    assert all(row["staleness/max"] <= 1 for row in rows[1:])
    assert rows[-1][NEW] == 1


@pytest.mark.long
def test_a_run_ahead_of_training_is_interrupted_and_continues(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ahead = ("runner.max_staleness=1", "runner.max_iterations=6", "algorithm.decoupled.enabled=true")
    order = (f"runner.output_dir={run_dir}", TWO, *ahead)
    done = embodrl("train", "--config", config, *order, stop_at="optimizer_step:10:SIGINT")
    assert done.code == 130, done.stderr
    assert len(metrics(run_dir)) == 4, "the update is finished first"
    resumed = embodrl("resume", run_dir)
    assert resumed.code == 0, resumed.stderr
    rows = metrics(run_dir)
    assert [row["env_steps"] for row in rows] == [48 * i for i in range(7)]
    assert all(row["staleness/max"] <= 1 for row in rows[1:])


def without(row: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if name != NEW}


def log_of(run_dir: Path) -> str:
    return (run_dir / "logs" / "embodrl.log").read_text()
