"""A run of two tasks, each with an advantage estimator of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import embodrl, metrics
from safetensors.torch import load_file

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


@pytest.mark.slow
def test_one_task_has_a_kl_to_the_reference(tmp_path: Path) -> None:
    """Without a KL for any task the policy is that of a run without one; with one for a task it is another."""
    found = []
    for name, own in (
        ("none", ()),
        ("no_task", ("{task: reach-red, kl_weight: 0}", "{task: reach-green, kl_weight: 0}")),
        ("one_task", ("{task: reach-red, kl_weight: 0}",)),
    ):
        settings = ("algorithm.kl.coef=5", f"algorithm.by_task=[{', '.join(own)}]") if own else ()
        outcome = embodrl(
            "train", *SETTINGS, "runner.max_iterations=2", *settings, f"runner.output_dir={tmp_path / name}"
        )
        assert outcome.code == 0, outcome.stderr
        found.append(load_file(tmp_path / name / "policy" / "model.safetensors"))
        assert not own or (metrics(tmp_path / name)[-1]["train/ref_kl"] > 0) == (name == "one_task")
    none, no_task, one_task = found
    assert all(torch.equal(value, no_task[name]) for name, value in none.items())
    assert any(not torch.equal(value, one_task[name]) for name, value in none.items())
