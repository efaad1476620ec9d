"""A critic that is a network of its own: it learns, shares nothing with the policy, and is kept with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from runs import TINY
from safetensors.torch import load_file

import embodrl
from embodrl.config import load_config
from embodrl.errors import EmbodrlError
from embodrl.models.common.heads import VALUE_HEAD_FILE
from embodrl.models.common.own_critic import own_critic
from embodrl.reporting.rows import is_measured
from embodrl.runs.train import resume
from embodrl.types import Observation
from embodrl.workers.policy import build_policy

pytestmark = pytest.mark.slow
TASKS = np.zeros(2, np.int32)
OWN = ("algorithm.critic.kind=network", "algorithm.critic.hidden_sizes=[32]", "algorithm.critic.max_state_dim=8")
SHORT = ("runner.eval_interval=0", "runner.eval_at_start=false", "actor.optim.lr_scheduler=constant", "extensions=[]")


def run(directory: Path, iterations: int, *settings: str) -> list[dict[str, Any]]:
    config = directory.parent / "tiny.yaml"
    config.write_text(TINY)
    given = [*SHORT, *OWN, *settings, f"runner.max_iterations={iterations}", f"runner.output_dir={directory}"]
    rows = embodrl.train(load_config(given, config)).metrics
    return [{name: value for name, value in row.items() if not is_measured(name)} for row in rows]


def test_it_learns_alone_and_is_resumed(tmp_path: Path) -> None:
    alone = ("actor.optim.critic_warmup_iterations=1", "env.include_state=true", "runner.save_interval=1")
    rows = run(tmp_path / "whole", 3, *alone, "runner.keep_last_n=3")
    assert all(row["train/value_loss"] > 0 and row["train/explained_variance"] is not None for row in rows)
    run(tmp_path / "halves", 2, *alone)
    assert resume(tmp_path / "halves", ["runner.max_iterations=3"]) == 0
    heads = [load_file(tmp_path / name / "policy" / VALUE_HEAD_FILE) for name in ("whole", "halves")]
    assert any(name.startswith("encoder.") for name in heads[0])
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    # In the warm-up the critic trains, and no weight of the policy moves.
    start = build_policy(load_config([*SHORT, *OWN, *alone], tmp_path / "tiny.yaml").config).state_dict()
    after = load_file(tmp_path / "whole" / "checkpoints" / "step_1" / "policy.safetensors")
    moved = {name for name in after if not torch.equal(start[name], after[name])}
    assert moved and all(name.startswith("value_head.") for name in moved)


def test_a_policy_is_loaded_with_its_critic_if_that_fits(tmp_path: Path) -> None:
    none = "actor.optim.critic_warmup_iterations=0"
    run(tmp_path / "run", 1, none)
    saved = load_file(tmp_path / "run" / "policy" / VALUE_HEAD_FILE)
    config = tmp_path / "tiny.yaml"
    again = [*SHORT, none, f"model.warm_start={tmp_path / 'run' / 'policy'}"]
    loaded = own_critic(build_policy(load_config([*again, *OWN], config).config))
    assert loaded is not None and all(torch.equal(tensor, saved[name]) for name, tensor in loaded.state_dict().items())
    larger = [*again, "algorithm.critic.kind=network", "algorithm.critic.hidden_sizes=[48]"]
    other = own_critic(build_policy(load_config(larger, config).config))
    assert other is not None and other.head.out.weight.shape[1] == 48
    assert own_critic(build_policy(load_config(again, config).config)) is None


def test_a_critic_of_the_state_alone_is_told_from_a_damaged_head(tmp_path: Path) -> None:
    small = ["env=toy", "model=mlp", "env.state=full", "env.num_processes=1", "env.train.total_num_envs=4", *SHORT[:3]]
    small += ["env.train.max_steps_per_rollout_epoch=10", "actor.global_batch_size=8", "actor.micro_batch_size=8"]
    small += ["actor.optim.critic_warmup_iterations=0", "runner.max_iterations=1", "env.eval.num_episodes=4"]
    run_dir = embodrl.train([*small, *OWN, f"runner.output_dir={tmp_path / 'run'}"]).run_dir
    warm = load_config([*small, f"model.warm_start={run_dir / 'policy'}"], verb="train")
    assert own_critic(build_policy(warm.config)) is None
    policy = build_policy(load_config([*small, *OWN], verb="train").config)
    observation = Observation(np.zeros((2, 0, 8, 8, 3), np.uint8), np.zeros((2, 5), np.float32), ["", ""], TASKS)
    with raises_code("critic-reads-pictures", EmbodrlError):
        policy.predict_values(observation)
    critic = own_critic(policy)
    assert critic is not None and critic(critic.inputs(observation)).shape == (2, 1)
    wide = replace(observation, state=np.zeros((2, 9), np.float32))
    with raises_code("state-size", EmbodrlError, "9"):
        critic.inputs(wide)


@pytest.mark.long
def test_processes_train_it_as_one_does(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    size = (
        "actor.optim.critic_warmup_iterations=0",
        "actor.precision=fp32",
        "rollout.precision=fp32",
        "actor.micro_batch_size=4",
        "actor.global_batch_size=8",
    )
    one = run(tmp_path / "one" / "run", 2, *size)
    placed = ("actor=fsdp", "cluster.device=cpu", "cluster.component_placement={actor: '0:0-1', rollout: 0, env: 0}")
    two = run(tmp_path / "two" / "run", 2, *size, *placed)
    for mine, theirs in zip(two, one, strict=True):
        assert mine["train/value_loss"] == pytest.approx(theirs["train/value_loss"], rel=1e-4)
        assert mine["train/policy_loss"] == pytest.approx(theirs["train/policy_loss"], abs=1e-5)
