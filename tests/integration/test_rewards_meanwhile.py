"""Rewards are computed where rollouts are collected, while these continue, and are the same everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import TINY, embodrl, metrics

TWO = "cluster.component_placement={actor:0,rollout:'0:0-1',env:0}"
AHEAD = ("runner.max_staleness=1", "algorithm.decoupled.enabled=true")
JUDGED = "reward.fn=meanwhile_reward:meets_the_last_chunk"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY.replace("extensions: [stop_at]", "extensions: [stop_at, meanwhile_reward]"))
    return path


def rows_of(config: Path, run_dir: Path, *overrides: str, **more: object) -> list[dict[str, object]]:
    order = (f"runner.output_dir={run_dir}", "runner.max_iterations=2", "env.include_state=true", *overrides)
    done = embodrl("train", "--config", config, *order, **more)
    assert done.code == 0, done.stderr
    return metrics(run_dir)


@pytest.mark.long
def test_two_rollout_processes_are_paid_as_one_is(config: Path, tmp_path: Path) -> None:
    one = rows_of(config, tmp_path / "one", JUDGED, "cluster.num_threads=2")
    two = rows_of(config, tmp_path / "two", JUDGED, TWO)
    assert one == two and len(one) == 3
    assert [row["reward/errors"] for row in two[1:]] == [0, 0]
    assert len({row["reward/mean"] for row in two[1:]}) == 2


@pytest.mark.parametrize("where", ["cluster.num_threads=2", pytest.param(TWO, marks=pytest.mark.long)])
@pytest.mark.long
def test_ahead_of_training(config: Path, tmp_path: Path, where: str) -> None:
    rows = rows_of(config, tmp_path / "run", JUDGED, where, *AHEAD)
    assert [row["reward/errors"] for row in rows[1:]] == [0, 0]
    assert all(row["reward/mean"] > len("reach the") for row in rows[1:]), "its instruction is known"


@pytest.mark.parametrize("where", [(TWO,), AHEAD, (TWO, *AHEAD)])
@pytest.mark.long
def test_episodes_of_workflows_are_judged_while_others_play(config: Path, tmp_path: Path, where: tuple[str]) -> None:
    alone = ("rollout.workflow=meanwhile_reward:OneEndsEarly", "env.train.auto_reset=false", "env.max_episode_steps=12")
    rows = rows_of(config, tmp_path / "run", JUDGED, *alone, *where)
    assert [row["reward/errors"] for row in rows[1:]] == [0, 0]
    assert 1 < rows[1]["reward/mean"] < rows[2]["reward/mean"] == 4, "chunks of an episode"


@pytest.mark.long
def test_errors_come_from_rollout_processes_as_from_one(tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY)
    order = (f"runner.output_dir={tmp_path / 'run'}", "reward.fn=failing_reward:fails", "reward.retries=0", TWO)
    done = embodrl("train", "--config", config, *order)
    assert done.code == 1
    assert "have no reward: reward.fn failed at" in done.stderr and "failing_reward.py" in done.stderr
