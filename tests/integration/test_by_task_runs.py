"""A run of two tasks, each with an advantage estimator of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import embodrl, metrics

SETTINGS = [
    *("env=toy", "env.tasks=[reach-red,reach-green]", "model=mlp", "env.state=full", "runner=debug", "algorithm=grpo"),
    *("env.max_episode_steps=20", "env.train.total_num_envs=16", "env.train.max_steps_per_rollout_epoch=20"),
    *("env.num_processes=1", "env.eval.num_episodes=2", "env.train.ignore_terminations=true"),
    *("actor.global_batch_size=16", "actor.micro_batch_size=16"),
]


@pytest.mark.slow
def test_two_tasks_train_by_their_own_estimators(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    own = "algorithm.by_task=[{task: reach-green, adv_type: rloo, gamma: 0.9, weight: 0.25}]"
    outcome = embodrl("train", *SETTINGS, own, f"runner.output_dir={run_dir}")
    assert outcome.code == 0, outcome.stderr
    row = metrics(run_dir)[-1]
    assert row["advantage/reach-red/chunks"] == row["advantage/reach-green/chunks"] > 0
    assert row["advantage/reach-red/std"] == pytest.approx(1, rel=1e-4)
    assert row["advantage/reach-green/std"] == pytest.approx(0.25, rel=1e-4)
    assert row["train/num_updates"] > 0
