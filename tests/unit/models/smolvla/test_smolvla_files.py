"""SmolVLA's checkpoints: lerobot's layouts, old and new, statistics, pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from safetensors.torch import load_file, save_file
from tiny_families import build, generator, observation, tiny_config
from torch.nn import functional as F

from embodrl.models.common.checkpoint import load_strict
from embodrl.models.flow.flow import integrate
from embodrl.models.load_report import LoadReport
from embodrl.models.registry import build_policy
from embodrl.models.smolvla.config import SmolVlaConfig, expert_mlp_dim
from embodrl.models.smolvla.files import aliases_and_ignored
from embodrl.models.smolvla.modeling import SmolVlaModel
from embodrl.models.smolvla.policy import SmolVlaPolicy

BASE = {
    "type": "smolvla",
    "chunk_size": 50,
    "n_action_steps": 50,
    "input_features": {
        "observation.state": {"type": "STATE", "shape": [6]},
        "observation.images.camera1": {"type": "VISUAL", "shape": [3, 256, 256]},
        "observation.images.camera2": {"type": "VISUAL", "shape": [3, 256, 256]},
    },
    "output_features": {"action": {"type": "ACTION", "shape": [6]}},
    "max_state_dim": 32,
    "max_action_dim": 32,
    "resize_imgs_with_padding": [512, 512],
    "tokenizer_max_length": 48,
    "num_steps": 10,
    "attention_mode": "cross_attn",
    "num_expert_layers": -1,
    "num_vlm_layers": 16,
    "self_attn_every_n_layers": 2,
    "expert_width_multiplier": 0.75,
    "vlm_model_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
}


def write(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps({**BASE, **changes}))
    return path


def test_the_public_size(tmp_path: Path) -> None:
    config = SmolVlaConfig.read(write(tmp_path / "config.json"))
    assert (config.vlm.width, config.vlm.depth, config.expert.width, config.expert.depth) == (960, 16, 720, 16)
    assert config.expert.mlp_dim == 2048 == expert_mlp_dim(720) and config.tokens_per_image == 64
    assert [config.is_cross(place) for place in range(4)] == [False, True, False, True]
    with torch.device("meta"):
        model = SmolVlaModel(config)
    state = model.state_dict()
    # Shapes of lerobot/smolvla_base's expert: keys of cross-attention come from 5 heads of 64.
    assert state["vlm_with_expert.lm_expert.layers.0.self_attn.k_proj.weight"].shape == (320, 720)
    assert state["vlm_with_expert.lm_expert.layers.1.self_attn.k_proj.weight"].shape == (320, 320)
    output_layer = 49280 * 960  # stored with lerobot's, and not used
    assert sum(p.numel() for p in model.parameters()) + output_layer == pytest.approx(450e6, rel=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"vlm_model_name": "somebody/else"},
        {"adapt_to_pi_aloha": True},
        {"add_image_special_tokens": True},
        {"num_vlm_layers": 10_000_000},
        {"num_expert_layers": 5},
        {"resize_imgs_with_padding": [224, 224]},
        {"chunk_size": "fifty"},
        {"max_action_dim": -1},
        {"expert_width_multiplier": 1e9},
        {"type": None},
    ],
)
def test_what_would_act_wrongly_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with raises_code("policy-file"):
        SmolVlaConfig.read(write(tmp_path / "config.json", **changes))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    build("smolvla").save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def load(directory: Path, **changes: object) -> SmolVlaPolicy:
    config = tiny_config("smolvla", model_path=str(directory), **changes)
    policy, report = build_policy(config, device="cpu", dtype=torch.float32, seed=0)
    assert report.ok and isinstance(policy, SmolVlaPolicy)
    return policy.eval()


def test_statistics_of_the_processor_files(saved: Path) -> None:
    [path] = saved.glob("policy_preprocessor*.safetensors")
    [back] = saved.glob("policy_postprocessor*.safetensors")
    stats = {"mean": torch.arange(7.0), "std": torch.full((7,), 2.0)}
    state = {"mean": torch.ones(6), "std": torch.full((6,), 4.0)}
    names = {f"action.{k}": v for k, v in stats.items()} | {f"observation.state.{k}": v for k, v in state.items()}
    save_file(names, path)
    with raises_code("policy-file"):  # lerobot acts with those of the other file
        load(saved)
    save_file(names, back)
    policy = load(saved)
    np.testing.assert_allclose(policy.stats.unnormalize(np.ones((1, 7))), [np.arange(7) + 2.0], rtol=1e-6)
    given = policy.preprocess(observation("smolvla", 1))["state"][0]
    expected = (torch.from_numpy(observation("smolvla", 1).state[0]) - 1.0) / 4.0
    torch.testing.assert_close(given[:6], expected)
    assert not given[6:].any()


def test_statistics_among_the_weights(saved: Path) -> None:
    """lerobot before 0.4 kept them there, for the base model one set per robot."""
    for path in saved.glob("policy_*"):
        path.unlink()
    weights = load_file(saved / "model.safetensors")
    for robot, mean in (("so100_", 1.0), ("so101-red_", 2.0)):
        for part, name, dims in (("inputs", "observation_state", 6), ("outputs", "action", 7)):
            un = "un" if part == "outputs" else ""
            stem = f"{un}normalize_{part}.{robot}buffer_{name}"
            weights |= {f"{stem}.mean": torch.full((dims,), mean), f"{stem}.std": torch.ones(dims)}
    save_file(weights, saved / "model.safetensors")
    with raises_code("statistics-choice") as caught:
        load(saved)
    assert "so100" in str(caught.value) and "so101-red" in str(caught.value)
    policy = load(saved, unnorm_key="so101-red")
    np.testing.assert_allclose(policy.stats.unnormalize(np.zeros((1, 7))), np.full((1, 7), 2.0), rtol=1e-6)


def test_names_of_a_compiled_model_are_understood(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    compiled = {name.replace("model.", "model._orig_mod.", 1): value for name, value in weights.items()}
    aliases, ignore = aliases_and_ignored(compiled)
    save_file(compiled, saved / "model.safetensors")
    with torch.device("meta"):
        model = SmolVlaModel(SmolVlaConfig.read(saved / "config.json"))
    report = LoadReport("compiled")
    files = [saved / "model.safetensors"]
    load_strict(model, files, report, device="cpu", dtype=torch.float32, aliases=aliases, ignore=ignore)
    assert report.ok and not ignore


def test_the_processor_files_are_those_that_lerobot_writes(saved: Path) -> None:
    before = json.loads((saved / "policy_preprocessor.json").read_text())
    assert [step["registry_name"] for step in before["steps"]] == [
        "rename_observations_processor",
        "to_batch_processor",
        "smolvla_new_line_processor",
        "tokenizer_processor",
        "device_processor",
        "normalizer_processor",
    ]
    after = json.loads((saved / "policy_postprocessor.json").read_text())
    assert [step["registry_name"] for step in after["steps"]] == ["unnormalizer_processor", "device_processor"]
    for step in (before["steps"][-1], after["steps"][0]):
        assert load_file(saved / step["state_file"])["action.std"].shape == (7,)


def test_pictures_are_scaled_as_lerobot_does() -> None:
    policy = build("smolvla")
    assert isinstance(policy, SmolVlaPolicy)
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (2, 1, 24, 48, 3), dtype=np.uint8))
    found = policy.processor.pixels(images)
    wide = F.interpolate(images[:, 0].permute(0, 3, 1, 2).float() / 255, size=(8, 16), mode="bilinear")
    expected = torch.full((2, 3, 16, 16), -1.0)
    expected[:, :, 8:] = wide * 2 - 1  # the bar is at the top
    torch.testing.assert_close(found[:, 0], expected)


def test_a_camera_more_than_trained_with_is_refused(saved: Path) -> None:
    content = json.loads((saved / "config.json").read_text())
    content["embodrl"]["cameras"] = ["observation.images.front"]
    (saved / "config.json").write_text(json.dumps(content))
    policy = load(saved)
    two = observation("smolvla", 1)
    with raises_code("num-cameras"):
        policy.preprocess(replace(two, images=np.repeat(two.images, 2, axis=1)))


def test_the_chunk_is_the_integral_of_the_velocity() -> None:
    policy = build("smolvla", "flow_sde")
    assert isinstance(policy, SmolVlaPolicy)
    inputs = policy.preprocess(observation("smolvla", 2))
    network = policy.velocity(policy.encode(inputs))
    start = torch.randn(2, policy.horizon, policy.padded_action_dim, generator=generator())
    with torch.no_grad():
        x = start.clone()
        for step in range(4):
            x = x - network(x, torch.full((2,), 1.0 - step / 4))[0] / 4
        torch.testing.assert_close(integrate(network, start, 4), x)
