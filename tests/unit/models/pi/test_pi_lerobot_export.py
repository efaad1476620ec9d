"""pi0 and pi0.5 in lerobot's layout: what is written, and that it acts as before when it is read again.

`tests/integration/test_lerobot_export.py` has lerobot's own code read it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import raises_code
from safetensors import safe_open
from safetensors.numpy import load_file
from test_pi_layouts import build, tiny_is_public

from embodrl.config.schema import model_settings
from embodrl.models.base import VLAPolicy
from embodrl.models.openpi import config as pi_config
from embodrl.models.openpi.stats import LEROBOT_AFTER_FILE, LEROBOT_FILE
from embodrl.models.registry import build_policy
from embodrl.types import Observation, SamplingParams

__all__ = ["tiny_is_public"]
CAMERAS = ("agentview", "wrist")


@pytest.fixture
def small_pictures(monkeypatch: pytest.MonkeyPatch, tiny_is_public: None) -> None:
    monkeypatch.setattr(pi_config, "SO400M_224", pi_config.PUBLIC["pi05"].siglip)


def statistics(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    entry = {"mean": [0.1, 0.2, 0.3], "std": [1.0, 2.0, 0.5], "q01": [-1.0, -2.0, 0.5], "q99": [1.0, 2.0, 0.5]}
    path = tmp_path / "stats.json"
    state = {name: rng.uniform(1, 2, 3).tolist() for name in ("mean", "std")} | {"q01": [-1.0] * 3, "q99": [1.0] * 3}
    path.write_text(json.dumps({"norm_stats": {"actions": entry, "state": state}}))
    return str(path)


def actions(policy, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (2, 1, 20, 24, 3), dtype=np.uint8)
    seen = Observation(images, rng.uniform(-1, 1, (2, 3)).astype(np.float32), ["push", "pull"], np.zeros(2, np.int32))
    return policy.predict_action_batch(seen, "eval", SamplingParams(), compute_values=False).actions


@pytest.mark.usefixtures("small_pictures")
@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_read_again_it_acts_as_before(tmp_path: Path, variant: str) -> None:
    policy, _ = build(variant, stats_path=statistics(tmp_path), pi={"antialias": False, "discrete_state": True})
    notes = policy.save_lerobot(tmp_path / "out", CAMERAS)
    assert "observation.images.agentview, observation.images.wrist" in notes[0]
    assert len(notes) == (2 if variant == "pi0" else 1)  # of pi0 also what becomes of '_' in instructions
    again, report = build(variant, model_path=str(tmp_path / "out"))
    assert report.ok
    if variant == "pi05":
        assert report.conventions["padding of the state in prompt"].startswith("no")
    np.testing.assert_allclose(actions(again), actions(policy), atol=2e-6)
    further = again.save_lerobot(tmp_path / "further", CAMERAS)
    assert len(further) == 1  # it reads instructions as lerobot does


def test_the_files(tmp_path: Path) -> None:
    policy, _ = build("pi05", stats_path=statistics(tmp_path), pi={"discrete_state": True})
    policy.save_lerobot(tmp_path / "out", CAMERAS)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["type"] == "pi05" and list(config["input_features"])[:2] == [
        f"observation.images.{c}" for c in CAMERAS
    ]
    assert config["input_features"]["observation.state"]["shape"] == [3]
    assert config["output_features"] == {"action": {"type": "ACTION", "shape": [3]}}
    before, after = (json.loads((tmp_path / "out" / name).read_text()) for name in (LEROBOT_FILE, LEROBOT_AFTER_FILE))
    assert [step["registry_name"] for step in before["steps"]] == [
        *("rename_observations_processor", "to_batch_processor", "normalizer_processor"),
        *("pi05_prepare_state_tokenizer_processor_step", "tokenizer_processor", "device_processor"),
    ]
    assert [step["registry_name"] for step in after["steps"]] == ["unnormalizer_processor", "device_processor"]
    stored = load_file(tmp_path / "out" / after["steps"][0]["state_file"])
    np.testing.assert_allclose(stored["action.q99"], [1.0, 2.0, 0.5], atol=2e-6)
    assert stored["action.q99"][2] > stored["action.q01"][2]  # openpi's eps: a range that is not empty
    with safe_open(tmp_path / "out" / "model.safetensors", framework="np") as weights:
        names = set(weights.keys())
    assert all(name.startswith("model.") for name in names)
    assert "model.paligemma_with_expert.paligemma.lm_head.weight" in names


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("pi05", {"pi": {"discrete_state": False}}),
        ("pi05", {"pi": {"discrete_state": True, "padded_state_in_prompt": True}}),
        ("pi0", {"gripper": "libero"}),
    ],
)
def test_what_lerobot_can_not_express_is_refused(tmp_path: Path, variant: str, changes: dict[str, object]) -> None:
    policy, _ = build(variant, **changes)
    with raises_code("lerobot-can-not-express"):
        policy.save_lerobot(tmp_path / "out", CAMERAS)
    assert not (tmp_path / "out").exists()


def test_what_is_not_the_same_there_is_said(tmp_path: Path) -> None:
    notes = build("pi0")[0].save_lerobot(tmp_path / "out", CAMERAS)
    assert "antialiasing" in notes[1] and "'_'" in notes[2] and "public sizes" in notes[3]


def test_smolvla_without_a_section_that_lerobot_refuses(tmp_path: Path) -> None:
    def made(name: str, **changes: object) -> VLAPolicy:
        settings = model_settings(name).model_validate({"model_type": name, **changes})
        return build_policy(settings, device="cpu", dtype=torch.float32, seed=0)[0]

    policy = made("smolvla", warm_start=None)
    policy.save_lerobot(tmp_path / "out", CAMERAS)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["type"] == "smolvla" and "embodrl" not in config
    with raises_code("export-layout"):
        made("openvla").save_lerobot(tmp_path / "x", CAMERAS)
