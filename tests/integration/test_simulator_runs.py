"""A few iterations of a tiny policy in Gymnasium and Meta-World, and their demonstrations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import TINY_POLICY, embodrl, metrics
from test_env_contract import CASES, interpreter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SMALL = """
env:
  max_episode_steps: 6
  pin_cpus: false
  python: PYTHON
  train: {total_num_envs: 4, max_steps_per_rollout_epoch: 12}
  eval: {total_num_envs: 4, num_episodes: 4, decoding: greedy}
  video: {enabled: false}
  cameras: [{name: CAMERA, height: 16, width: 16}]
collect: {num_episodes: 2, format: raw}
""" + TINY_POLICY.replace("max_iterations: 4", "max_iterations: 2").replace("extensions: [stop_at]", "")


def config_of(tmp_path: Path, name: str, camera: str) -> Path:
    config = tmp_path / "config.yaml"
    python = interpreter(CASES[name]) or "null"
    config.write_text(SMALL.replace("PYTHON", python).replace("CAMERA", camera))
    return config


@pytest.mark.parametrize(
    ("preset", "case", "camera", "dims"),
    [("gymnasium_reacher", "Reacher-v5", "render", 2), ("metaworld_mt1", "metaworld", "corner2", 4)],
)
def test_a_run_trains_and_resumes(preset: str, case: str, camera: str, dims: int, tmp_path: Path) -> None:
    config = config_of(tmp_path, case, camera)
    arguments = ("--config", config, f"env={preset}", f"runner.output_dir={tmp_path / 'run'}")
    outcome = embodrl("train", *arguments)
    if outcome.code and "can't draw" in outcome.stderr:
        pytest.skip(outcome.stderr)
    assert outcome.code == 0, outcome.stderr
    rows = metrics(tmp_path / "run")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert rows[2]["train/num_updates"] and rows[2]["rollout/lost_episodes"] == 0
    assert rows[2]["rollout/episodes"] and rows[2]["rollout/return"] != 0
    assert f"action_dim: {dims}" in (tmp_path / "run" / "config.yaml").read_text()
    outcome = embodrl("resume", tmp_path / "run", "runner.max_iterations=3")
    assert outcome.code == 0, outcome.stderr
    assert metrics(tmp_path / "run")[-1]["iteration"] == 3


def test_a_run_steers_a_car(tmp_path: Path) -> None:
    pytest.importorskip("highway_env", reason="needs embodrl[driving]")
    config = tmp_path / "config.yaml"
    config.write_text(SMALL.replace("PYTHON", "null").replace("CAMERA", "render"))
    settings = ("env=gymnasium_racetrack", "env.success_threshold=4", f"runner.output_dir={tmp_path / 'run'}")
    outcome = embodrl("train", "--config", config, *settings)
    assert outcome.code == 0, outcome.stderr
    last = metrics(tmp_path / "run")[-1]
    assert last["iteration"] == 2 and last["train/num_updates"] and last["rollout/lost_episodes"] == 0
    assert 0 < last["rollout/return"] <= 6  # six steps of at most 1
    assert "action_dim: 1" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.long
@pytest.mark.parametrize(("preset", "num_tasks"), [("metaworld_mt10", 10), ("metaworld_mt50", 50)])
def test_many_tasks_train_and_are_all_evaluated(preset: str, num_tasks: int, tmp_path: Path) -> None:
    config = config_of(tmp_path, "metaworld", "corner2")
    envs = (f"env.train.total_num_envs={num_tasks}",)
    short = ("runner.max_iterations=1", "env.train.max_steps_per_rollout_epoch=6")
    updates = ("actor.global_batch_size=10", "actor.micro_batch_size=5", "actor.optim.critic_warmup_iterations=0")
    episodes = (f"env.eval.num_episodes={num_tasks}",)
    patience = ("env.start_timeout_s=600", "env.reset_timeout_s=600", "env.step_timeout_s=600")
    outcome = embodrl(
        *("train", "--config", config, f"env={preset}", f"runner.output_dir={tmp_path / 'run'}"),
        *(*envs, *short, *updates, *episodes, *patience),
    )
    if outcome.code and "can't draw" in outcome.stderr:
        pytest.skip(outcome.stderr)
    assert outcome.code == 0, outcome.stderr
    start, end = metrics(tmp_path / "run")
    assert end["train/num_updates"] and end["rollout/lost_episodes"] == 0 and end["rollout/episodes"] == num_tasks
    assert sum(name.startswith("eval/") and name.endswith("-v3/success_rate") for name in start) == num_tasks


def test_metaworld_collects_with_its_own_policies(tmp_path: Path) -> None:
    config = config_of(tmp_path, "metaworld", "corner2")
    arguments = ("env=metaworld", "env.tasks=[drawer-close-v3]", "env.max_episode_steps=90")
    outcome = embodrl(
        "collect", "--config", config, *arguments, f"collect.output_dir={tmp_path / 'demos'}", "collect.noise_std=0"
    )
    if outcome.code and "can't draw" in outcome.stderr:
        pytest.skip(outcome.stderr)
    assert outcome.code == 0, outcome.stderr
    meta = tmp_path / "demos" / "index.json"
    assert json.loads(meta.read_text())["meta"]["expert_success_rate"] == {"drawer-close-v3": 1.0}
