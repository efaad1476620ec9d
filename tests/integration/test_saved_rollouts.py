"""Rollouts that a run saves, and runs that train on them again without simulators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from expect import raises_code
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import embodrl
from embodrl.errors import FileFormatError
from embodrl.reporting.rows import is_measured
from embodrl.workers.saved_rollouts import load_rollout, rollout_file

pytestmark = pytest.mark.slow
TOY = ["env=toy", "model=mlp", "env.state=full", "env.num_processes=1", "env.train.total_num_envs=4"]
TOY += ["env.train.max_steps_per_rollout_epoch=10", "actor.global_batch_size=8", "actor.micro_batch_size=8"]
TOY += ["runner.max_iterations=2", "runner.eval_interval=0", "runner.eval_at_start=false", "env.eval.num_episodes=4"]
TOY += ["actor.optim.critic_warmup_iterations=0", "actor.optim.lr_warmup_iterations=0", "runner.logger.console=off"]


def run(directory: Path, *settings: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    result = embodrl.train([*TOY, *settings, f"runner.output_dir={directory}"])
    rows = [{k: v for k, v in row.items() if not is_measured(k)} for row in result.metrics]
    return rows, load_file(directory / "policy" / "model.safetensors")


def test_a_replay_learns_what_the_run_learned(tmp_path: Path) -> None:
    rows, weights = run(tmp_path / "run", "runner.save_rollouts=true")
    saved = tmp_path / "run" / "rollouts"
    assert [path.name for path in sorted(saved.iterdir())] == [rollout_file(saved, i).name for i in (0, 1)]
    batch, metrics = load_rollout(rollout_file(saved, 0))
    assert batch.meta["env_steps"] == 40 and not any(name.startswith("time/") for name in metrics)
    again, same = run(tmp_path / "again", f"rollout.replay={saved}")
    assert again == rows
    assert all((weights[name] == same[name]).all() for name in weights)
    other, _ = run(tmp_path / "other", f"rollout.replay={saved}", "algorithm.gamma=0.5")
    assert other[1]["train/value_loss"] != rows[1]["train/value_loss"], "the same rollouts, judged otherwise"
    with raises_code("rollout-of-another-policy"):
        sizes = ("model.num_action_chunks=2", "actor.global_batch_size=4", "actor.micro_batch_size=4")
        run(tmp_path / "chunks", f"rollout.replay={saved}", *sizes)


def test_what_can_not_be_replayed_is_refused_before_the_run(tmp_path: Path) -> None:
    replay = f"rollout.replay={tmp_path}"
    processes = (replay, "cluster.device=cpu", "cluster.component_placement={actor: '0:0', rollout: '0:0-1'}")
    absent = (f"rollout.replay={tmp_path / 'absent'}",)
    for settings in ((replay,), absent, (replay, "runner.save_rollouts=true"), processes):
        with raises_code("rollouts-can-be-replayed"):
            embodrl.load_config([*TOY, *settings])


def test_a_rollout_without_a_column_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "run", "runner.save_rollouts=true", "runner.max_iterations=1")
    path = rollout_file(tmp_path / "run" / "rollouts", 0)
    with safe_open(path, "pt") as reader:
        facts = reader.metadata()
    for column in ('["rewards"]', '["valid"]'):
        save_file({name: tensor for name, tensor in load_file(path).items() if name != column}, path, facts)
        with raises_code("rollout-unreadable", FileFormatError, json.loads(column)[0]):
            load_rollout(path)


def test_files_that_are_no_rollouts_are_refused(tmp_path: Path) -> None:
    path = rollout_file(tmp_path, 0)
    for content in (None, b"no safetensors"):
        if content is not None:
            path.write_bytes(content)
        with raises_code("rollout-unreadable", FileFormatError):
            load_rollout(path)
    save_file({}, path)
    with raises_code("rollout-unreadable", FileFormatError):
        load_rollout(path)
