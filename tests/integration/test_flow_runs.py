"""Flow policies without log-probs, and demonstrations beside PPO: what is resumed ends with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import embodrl, metrics
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.long]

FLOW = """
presets: {env: toy, model: pi0}
env:
  pin_cpus: false
  num_processes: 1
  max_episode_steps: 6
  cameras: [{height: 16, width: 16}]
  train: {total_num_envs: 8, max_steps_per_rollout_epoch: 6}
  eval: {num_episodes: 8, decoding: greedy}
model:
  num_action_chunks: 1
  pi:
    image_size: 16
    siglip: {width: 16, depth: 1, num_heads: 2, mlp_dim: 32}
    depth: 1
    num_heads: 2
    head_dim: 16
    vlm_width: 32
    vlm_mlp_dim: 64
    expert_width: 32
    expert_mlp_dim: 64
    max_action_dim: 8
    action_horizon: 1
actor:
  global_batch_size: 16
  micro_batch_size: 16
  optim: {lr_warmup_iterations: 0, critic_warmup_iterations: 0, lr_scheduler: constant}
cluster: {num_threads: 1}
runner: {eval_interval: 0, eval_at_start: false, save_interval: 1, logger: {tensorboard: false, console: plain}}
"""


IMITATING = "algorithm.bc_coef=0.5 algorithm.off_policy.demos={tmp}/demos"


@pytest.mark.parametrize(
    "extra", ["algorithm=fpo", "algorithm=pi_nft", "algorithm=pi_nft model.flow.method=cfm", IMITATING]
)
def test_a_run_in_two_halves_is_the_whole(extra: str, tmp_path: Path) -> None:
    config, extra = tmp_path / "flow.yaml", extra.format(tmp=tmp_path)
    config.write_text(FLOW)
    if "demos" in extra:
        made = ["env.max_episode_steps=20", "collect.num_episodes=3", f"collect.output_dir={tmp_path / 'demos'}"]
        assert embodrl("collect", "--config", config, *made).code == 0
    for name, iterations in (("whole", 2), ("halves", 1)):
        given = [*extra.split(), f"runner.max_iterations={iterations}", f"runner.output_dir={tmp_path / name}"]
        outcome = embodrl("train", "--config", config, *given)
        assert outcome.code == 0, outcome.stderr
    outcome = embodrl("resume", tmp_path / "halves", "runner.max_iterations=2")
    assert outcome.code == 0, outcome.stderr
    rows, again = metrics(tmp_path / "whole"), metrics(tmp_path / "halves")
    losses = [[row["train/policy_loss"] for row in found] for found in (rows, again)]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    assert ("train/bc_loss" in rows[0]) == ("demos" in extra)
    assert rows[0]["train/first_minibatch_kl"] == pytest.approx(0, abs=1e-8)
    left, right = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("whole", "halves"))
    assert all(left[name].equal(right[name]) for name in left)
