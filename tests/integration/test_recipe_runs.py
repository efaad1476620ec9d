"""A recipe from demonstrations to RL, killed on its way, is continued by the same command."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import embodrl, metrics
from safetensors.torch import load_file

pytestmark = pytest.mark.long

TOY = """
presets: {env: toy, model: mlp, algorithm: rlpd}
env:
  state: full
  pin_cpus: false
  cameras: [{height: 16, width: 16}]
  num_processes: 1
  train: {total_num_envs: 4, max_steps_per_rollout_epoch: 20}
  eval: {total_num_envs: 4, num_episodes: 4, decoding: greedy}
model: {gaussian: {max_state_dim: 4, hidden_sizes: [16]}}
algorithm: {off_policy: {critic_hidden_sizes: [16], warm_up: 20, num_q: 2, subset: 2, utd: 0.5, policy_delay: 1}}
actor: {global_batch_size: 16, micro_batch_size: 16}
cluster: {num_threads: 1}
collect: {num_episodes: 8}
sft: {max_steps: 20, batch_size: 16, lr_warmup_steps: 5, save_interval: 10, log_interval: 10}
runner:
  max_iterations: 4
  eval_interval: 4
  save_interval: 1
  logger: {tensorboard: false, console: plain}
recipe: {stages: [collect, sft, rl]}
extensions: [stop_at]
"""


def test_a_recipe_that_was_killed_twice_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    config = tmp_path / "toy.yaml"
    config.write_text(TOY)

    def recipe(directory: Path, stop_at: str = "") -> tuple[int, str]:
        outcome = embodrl("run", "--config", config, f"runner.output_dir={directory}", "runner.seed=1", stop_at=stop_at)
        return outcome.code, outcome.stdout + outcome.stderr

    run, whole = tmp_path / "run", tmp_path / "whole"
    code, _ = recipe(run, "sft_step:15:SIGKILL")
    assert code == 137 and (run / "sft" / "checkpoints" / "step_10").is_dir()
    code, text = recipe(run, "store:3:SIGKILL")
    assert code == 137 and (run / "sft" / "policy").is_dir() and 2 <= len(metrics(run / "rl")) <= 3, text
    code, text = recipe(run)
    assert code == 0 and text.count("done already") == 2 and "resuming from" in text, text
    alone = [f"algorithm.off_policy.demos={run / 'collect'}", f"model.warm_start={run / 'sft' / 'policy'}"]
    assert embodrl("train", "--config", config, *alone, "runner.seed=1", f"runner.output_dir={whole}").code == 0
    assert metrics(run / "rl") == metrics(whole)
    left, right = (load_file(path / "policy" / "model.safetensors") for path in (run / "rl", whole))
    assert all(left[name].equal(right[name]) for name in left) and left.keys() == right.keys()
