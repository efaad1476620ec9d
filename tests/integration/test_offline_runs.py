"""Whole offline runs on the toy environment: nothing is rolled out, and a killed run continues bit-exactly."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from runs import embodrl, metrics
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.long]

TOY = """
presets: {env: toy, model: mlp, algorithm: iql}
env:
  state: full
  pin_cpus: false
  cameras: [{height: 16, width: 16}]
  train: {total_num_envs: 16, max_steps_per_rollout_epoch: 20}
  eval: {num_episodes: 64, decoding: greedy}
model: {gaussian: {max_state_dim: 5, hidden_sizes: [64, 64]}}
algorithm: {offline: {updates: 100}}
cluster: {num_threads: 1}
collect: {num_episodes: 20}
runner:
  max_iterations: 4
  eval_interval: 4
  save_interval: 1
  logger: {tensorboard: false, console: plain}
extensions: [stop_at]
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "offline.yaml"
    path.write_text(TOY)
    return path


@pytest.fixture(scope="module")
def data(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data") / "toy"
    outcome = embodrl("collect", "--config", config, f"collect.output_dir={directory}")
    assert outcome.code == 0, outcome.stderr
    return directory


def settings(config: Path, data: Path, run_dir: Path, *more: str) -> list[object]:
    given = [f"algorithm.off_policy.demos={data}", f"runner.output_dir={run_dir}"]
    return ["train", "--config", config, *given, *more]


@pytest.mark.parametrize(
    ("algorithm", "stop_at"), [("iql", "learn_offline:250:SIGKILL"), ("td3_bc", "learn_td3:125:SIGKILL")]
)
def test_a_killed_run_learns_and_is_resumed_bit_exactly(
    config: Path, data: Path, tmp_path: Path, algorithm: str, stop_at: str
) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    chosen = f"algorithm={algorithm}"
    assert embodrl(*settings(config, data, whole, chosen)).code == 0
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["env_steps"] == 0 and rows[-1]["eval/success_rate"] > rows[0]["eval/success_rate"] + 0.3
    assert embodrl(*settings(config, data, run_dir, chosen), stop_at=stop_at).code == -signal.SIGKILL
    outcome = embodrl("resume", run_dir)
    assert outcome.code == 0 and "starts over" not in outcome.stderr, outcome.stderr
    assert metrics(run_dir) == metrics(whole)
    left, right = (load_file(path / "policy" / "model.safetensors") for path in (run_dir, whole))
    assert all(left[name].equal(right[name]) for name in left) and left.keys() == right.keys()
