"""Exported policies loaded by lerobot's own code: the same observation gives the same actions.

EMBODRL_LEROBOT_PYTHON names an interpreter that has lerobot 0.5 or later with its extra ``pi``.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodrl.config import load_config
from embodrl.models.pi.policy import PiPolicy
from embodrl.models.registry import build_policy
from embodrl.types import Observation, SamplingParams

PYTHON = os.environ.get("EMBODRL_LEROBOT_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="EMBODRL_LEROBOT_PYTHON names no interpreter with lerobot"),
]


def tiny(variant: str, **changes: Any) -> PiPolicy:
    """A tiny policy of the preset with statistics in which every dimension differs."""
    stats = changes.pop("stats_path")
    arguments = [f"model={variant}", f"model.stats_path={stats}", "model.pi.antialias=false", "model.pi.num_images=2"]
    arguments += ["model.pi.discrete_state=true"] if variant == "pi05" else []
    model = load_config(["env=maniskill", *arguments]).config.model
    policy, _ = build_policy(model, device="cpu", dtype=torch.float32, seed=3)
    assert isinstance(policy, PiPolicy)
    return policy


def lerobots_actions(policy: PiPolicy, directory: Path, seen: Observation, output: Path) -> np.ndarray:
    given = output.with_name("given.npz")
    noise = policy.get_buffer("_evaluation_noise").numpy()
    sizes = json.dumps(asdict(policy.model.config))
    np.savez(given, images=seen.images, state=seen.state, instructions=seen.instruction, noise=noise, sizes=sizes)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(output.parent / "hf")}
    program = Path(__file__).with_name("lerobot_policy_check.py")
    command = [str(PYTHON), str(program), str(directory), str(given), str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return np.load(output)["actions"]


@pytest.mark.parametrize("size", ["model's", "other"])
@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_lerobot_acts_as_the_exported_policy(variant: str, size: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    part = {"mean": rng.uniform(-1, 1, 7), "std": rng.uniform(0.5, 2, 7), "q01": rng.uniform(-2, -1, 7)}
    part["q99"] = part["q01"] + rng.uniform(0.5, 2, 7)
    stats = {name: {field: values.tolist() for field, values in part.items()} for name in ("actions", "state")}
    (tmp_path / "stats.json").write_text(json.dumps({"norm_stats": stats}))
    policy = tiny(variant, stats_path=tmp_path / "stats.json")
    policy.save_lerobot(tmp_path / "policy", ["agentview", "wrist"])
    pixels = policy.model.config.siglip.image_size
    height, width = (pixels, pixels) if size == "model's" else (pixels + 13, 2 * pixels)
    images = rng.integers(0, 256, (2, 2, height, width, 3), dtype=np.uint8)
    state = rng.uniform(-1, 1, (2, 7)).astype(np.float32)
    seen = Observation(images, state, ["push the cube", "pull the cube"], np.zeros(2, np.int32))
    ours = policy.predict_action_batch(seen, "eval", SamplingParams(), compute_values=False).actions
    theirs = lerobots_actions(policy, tmp_path / "policy", seen, tmp_path / "found.npz")
    print(f"{variant}, {size}: largest difference {np.abs(ours - theirs).max():.1e} of {np.abs(ours).max():.1f}")
    np.testing.assert_allclose(theirs, ours, atol=2e-5 if size == "model's" else 5e-3)


def test_lerobot_reads_the_settings_of_smolvla(tmp_path: Path) -> None:
    """Its network needs files of the hub's SmolVLM2: only config.json is read here."""
    model = load_config(["env=maniskill", "model=smolvla"]).config.model
    policy, _ = build_policy(model, device="cpu", dtype=torch.float32, seed=3)
    policy.save_lerobot(tmp_path / "policy", ["camera1"])
    program = (
        "from lerobot.configs.policies import PreTrainedConfig\n"
        "from lerobot.policies import factory\n"
        f"print(PreTrainedConfig.from_pretrained({str(tmp_path / 'policy')!r}).type)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(PYTHON), "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.split()[-1:] == ["smolvla"], done.stderr[-3000:]
