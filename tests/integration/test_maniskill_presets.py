"""Every algorithm preset trains the tiny OpenVLA that ships, on the real simulator."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from runs import embodrl, metrics

installed = importlib.util.find_spec("mani_skill") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.sim,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not installed, reason="mani_skill is not installed"),
]

CONFIG = """
presets: {env: maniskill, model: openvla}
env:
  render_backend: cpu
  train: {total_num_envs: 8}
  eval: {total_num_envs: 8, num_episodes: 8, decoding: greedy}
  video: {enabled: false}
runner: {max_iterations: 2, eval_at_start: false, logger: {tensorboard: false, console: plain}}
actor: {global_batch_size: 40, micro_batch_size: 20}
"""
IN_GROUPS = ("algorithm.group_size=4",)
PRESETS: dict[str, tuple[str, ...]] = {
    "ppo": (
        "actor.optim.critic_warmup_iterations=1",
        "env.num_processes=1",  # a simulator takes 10 s to start
        "env.train.max_steps_per_rollout_epoch=50",  # an episode each
    ),
    "grpo": IN_GROUPS,
    "rloo": IN_GROUPS,
    "branch": IN_GROUPS,
    "reinforce_pp": (),
    "dapo": IN_GROUPS,
    "gspo": IN_GROUPS,
    "cpgd": IN_GROUPS,
    "srpo": IN_GROUPS,
}
AHEAD = ("runner.max_staleness=1", "algorithm.decoupled.enabled=true")
# One of each kind runs ahead of training as well: with a critic and in groups.
RUNS_AHEAD = {"ppo": AHEAD, "gspo": (*AHEAD, "rollout.pipeline_stages=2")}


@pytest.mark.long  # test_debug_runs.py has PPO; the others differ in their losses, which the toy environment has too
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains_on_maniskill(preset: str, tmp_path: Path) -> None:
    config, run_dir = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(CONFIG)
    ahead = RUNS_AHEAD.get(preset, ())
    arguments = (f"algorithm={preset}", *PRESETS[preset], *ahead, f"runner.output_dir={run_dir}")
    outcome = embodrl("train", "--config", config, *arguments)
    if outcome.code == 1 and "Vulkan" in outcome.stderr:
        pytest.skip(outcome.stderr)
    assert outcome.code == 0, outcome.stderr
    rows = metrics(run_dir)
    assert [row["iteration"] for row in rows] == [1, 2]
    for row in rows:
        assert row["rollout/success_rate"] is None or 0 <= row["rollout/success_rate"] <= 1
        assert row["rollout/episodes"] >= 8
        if row["train/num_updates"]:
            assert 0 <= row["train/clip_fraction"] <= 1
            assert row["train/num_nonfinite"] == 0
    # DAPO may find nothing to learn from in two iterations; what the others earn always differs.
    assert preset == "dapo" or any(row["train/grad_norm"] > 0 for row in rows if row["train/num_updates"])
    assert 0 <= rows[-1]["eval/success_rate"] <= 1
    if ahead:
        assert rows[-1]["staleness/max"] <= 1
