"""A whole run on the real simulator, killed and interrupted, gives the metrics of the uninterrupted one."""

import importlib.util
import signal
from pathlib import Path

import pytest
from runs import TINY_POLICY, assert_gone, embodrl, metrics
from safetensors.torch import load_file

installed = importlib.util.find_spec("mani_skill") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.sim,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not installed, reason="mani_skill is not installed"),
]

CONFIG = """
presets: {env: maniskill}
env:
  max_episode_steps: 9
  render_backend: cpu
  cameras: [{name: base_camera, height: 16, width: 16}]
  train: {total_num_envs: 4, max_steps_per_rollout_epoch: 12}
  eval: {total_num_envs: 4, num_episodes: 2, decoding: greedy}
  video: {enabled: false}
""" + TINY_POLICY.replace("max_iterations: 4", "max_iterations: 3").replace("num_threads: 1", "num_threads: 2")


@pytest.mark.long
def test_a_killed_and_an_interrupted_run_are_resumed_bit_exactly(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    outcome = embodrl("train", "--config", config, f"runner.output_dir={tmp_path / 'whole'}")
    if outcome.code == 1 and "Vulkan" in outcome.stderr:
        pytest.skip(outcome.stderr)
    assert outcome.code == 0, outcome.stderr
    whole = metrics(tmp_path / "whole")
    assert [row["iteration"] for row in whole] == [0, 1, 2, 3]
    # The rollouts of 4 chunks: killed in that of iteration 3, and interrupted in that of iteration 2, whose scenes
    # have a history since they were built.
    for name, stop_at, code in (("killed", "act:10:SIGKILL", -signal.SIGKILL), ("stopped", "act:7:SIGINT", 130)):
        run_dir, children = tmp_path / name, tmp_path / f"{name}_children"
        outcome = embodrl(
            "train", "--config", config, f"runner.output_dir={run_dir}", stop_at=stop_at, children=children
        )
        assert outcome.code == code, outcome.stderr
        assert_gone(children)
        outcome = embodrl("resume", run_dir)
        assert outcome.code == 0, outcome.stderr
        assert f"step_{2 if name == 'killed' else 1}" in outcome.stdout
        assert metrics(run_dir) == whole


@pytest.mark.long
@pytest.mark.parametrize("level", ["process", "simulator"])
def test_a_run_whose_simulators_leave_is_the_same(tmp_path: Path, level: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    offload = ("actor.enable_offload=true", "env.enable_offload=true", f"env.offload_level={level}")
    for name, settings in (("stays", ()), ("leaves", offload)):
        arguments = (f"runner.output_dir={tmp_path / name}", "runner.max_iterations=2", *settings)
        outcome = embodrl("train", "--config", config, *arguments)
        if outcome.code == 1 and "Vulkan" in outcome.stderr:
            pytest.skip(outcome.stderr)
        assert outcome.code == 0, outcome.stderr
    stays, leaves = ([dict(row) for row in metrics(tmp_path / name)] for name in ("stays", "leaves"))
    told = [{name: row.pop(name) for name in list(row) if name.startswith("memory/")} for row in leaves]
    assert stays == leaves
    assert all(row["memory/env_before_mib"] > row["memory/env_after_mib"] for row in told[1:])
    left, right = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("stays", "leaves"))
    assert all(left[name].equal(right[name]) for name in left | right)
