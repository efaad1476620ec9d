"""A small policy on a frozen DINOv2: its features against transformers', where they are kept, and its files."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from demo_files import outcomes
from expect import raises_code
from replay_frames import config_of
from tiny_families import STATE_DIM, generator, observation, tiny_config
from torch import Tensor
from transformers import Dinov2Config, Dinov2Model

from embodrl.data.demos import Demos
from embodrl.data.replay import ReplayBuffer, ReplayStores
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.hybrid_engines.weight_sync.buckets import trained_names
from embodrl.learners.off_policy import OffPolicyUpdater
from embodrl.learners.replay import demo_frames
from embodrl.models.gaussian.policy import GaussianPolicy, build_gaussian
from embodrl.models.gaussian.spec import GaussianModelConfig
from embodrl.storage.integrity import write_checksums
from embodrl.types import SamplingParams

SIZES = {"use_images": True, "image_size": 56, "feature_dim": 12, "max_state_dim": 8, "hidden_sizes": (16,)}
WIDTH = 16


def dinov2(directory: Path, seed: int = 0, **changes: object) -> Path:
    torch.manual_seed(seed)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28}
    Dinov2Model(Dinov2Config(**{**sizes, **changes})).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dinov2(tmp_path_factory.mktemp("dinov2") / "tiny")


def config_with(encoder: Path | None, layer: int = 1, **changes: object) -> GaussianModelConfig:
    sizes = {**SIZES, "frozen_encoder": None if encoder is None else str(encoder), "encoder_layer": layer}
    sizes |= {name: changes.pop(name) for name in ("image_size",) if name in changes}
    made = tiny_config("gaussian", gaussian=sizes, **changes)
    assert isinstance(made, GaussianModelConfig)
    return made


def build(config: GaussianModelConfig, seed: int = 3) -> GaussianPolicy:
    return build_gaussian(config, device="cpu", dtype=torch.float32, seed=seed)[0]


def theirs(encoder: Path, images: Tensor, layer: int) -> Tensor:
    """Patches ``float32[B,side,side,W]`` of a layer by transformers, of ``uint8[B,H,H,3]``."""
    pixels = images.float() / 255 - torch.tensor([0.485, 0.456, 0.406])
    pixels = (pixels / torch.tensor([0.229, 0.224, 0.225])).permute(0, 3, 1, 2)
    with torch.no_grad():
        seen = Dinov2Model.from_pretrained(encoder).eval()(pixels, output_hidden_states=True).hidden_states[layer]
    side = images.shape[1] // 14
    return seen[:, 1:].unflatten(1, (side, side))


@pytest.mark.parametrize("layer", [1, 2])
def test_features_are_those_of_a_layer_of_transformers(layer: int, encoder: Path) -> None:
    images = torch.randint(0, 256, (3, 2, 112, 112, 3), generator=generator(), dtype=torch.uint8)
    policy = build(config_with(encoder, layer, image_size=112))
    assert policy.encoder is not None
    found = policy.encoder(images)
    assert found.dtype == torch.float16 and found.shape == (3, 2, 16, WIDTH)
    for camera in range(2):
        patches = theirs(encoder, images[:, camera], layer)
        wanted = patches.unflatten(2, (4, 2)).unflatten(1, (4, 2)).mean((2, 4)).flatten(1, 2)
        torch.testing.assert_close(found[:, camera].float(), wanted, atol=2e-3, rtol=2e-3)


def test_what_is_kept_gives_the_same_outputs_as_what_is_seen(encoder: Path) -> None:
    policy = build(config_with(encoder))
    seen = observation("gaussian")
    output = policy.predict_action_batch(seen, "train", SamplingParams(), generator(4))
    assert "images" not in output.forward_inputs and output.forward_inputs["patches"].dtype == torch.float16
    again = policy.evaluate_actions(output.forward_inputs, SamplingParams())
    torch.testing.assert_close(again.logprobs, output.logprobs)
    target = torch.from_numpy(output.actions)
    kept = {"target": target, "state": output.forward_inputs["state"], "patches": output.forward_inputs["patches"]}
    computed, _ = policy.sft_loss(policy.sft_inputs(seen, target))
    assert torch.equal(policy.sft_loss(kept)[0], computed)


def test_a_plan_needs_shapes_alone(encoder: Path) -> None:
    for path, width in ((encoder, WIDTH), (encoder / "gone", 384)):
        policy, _ = build_gaussian(config_with(path), device="meta", dtype=torch.float32, seed=0)
        assert policy.preprocess(observation("gaussian"))["patches"].shape == (3, 1, 16, width)


def test_the_encoder_is_no_weight_of_the_policy(encoder: Path) -> None:
    policy = build(config_with(encoder))
    assert policy.model.vision is not None
    names = {f"model.vision.{name}" for name, _ in policy.model.vision.named_parameters()}
    assert len(names) == 8
    assert {name for name in policy.state_dict() if "vision" in name or "encoder" in name} == {
        *names,
        "model.encoder_identity",
    }
    assert names < trained_names(policy)
    assert set(policy.encoder_parameters()) == set(policy.model.vision.parameters())
    assert copy.deepcopy(policy).encoder is policy.encoder


def test_replay_and_demonstrations_hold_features(encoder: Path) -> None:
    policy = build(config_with(encoder, add_value_head=False)).train()
    assert policy.encoder is not None
    rng = np.random.default_rng(0)
    columns = {
        "images": rng.integers(0, 256, (40, 1, 16, 16, 3), dtype=np.uint8),
        "state": rng.uniform(-1, 1, (40, STATE_DIM)).astype(np.float32),
        "actions": np.zeros((40, 7), np.float32),
    }
    frames = demo_frames(Demos.of_episodes(columns, [40], ["a"], ["t"]), outcomes(40, True), policy)
    assert {name for name in frames if name.startswith("inputs.")} == {"inputs.state", "inputs.patches"}
    assert frames["inputs.patches"].shape == (40, 1, 16, WIDTH)
    buffer = ReplayBuffer(100, 10**9)
    buffer.add_frames(frames)
    config = config_of()
    engine = NativeTrainEngine(policy, EngineOptions.of(config), "cpu")
    updater = OffPolicyUpdater(config, engine, ReplayStores(buffer))
    policy.encoder = None  # an update needs none
    before = [p.detach().clone() for p in policy.encoder_parameters()]
    assert updater.learn(generator())["train/num_updates"] == 10
    assert all(not torch.equal(old, new) for old, new in zip(before, policy.encoder_parameters(), strict=True))


@pytest.mark.parametrize("key", ["model_path", "warm_start"])
def test_a_policy_keeps_its_encoder(key: str, encoder: Path, tmp_path: Path) -> None:
    own = dinov2(tmp_path / "own", seed=1)
    policy = build(config_with(own))
    policy.save_pretrained(tmp_path / "policy")
    write_checksums(tmp_path / "policy")  # which these tests leave out
    saved = {key: str(tmp_path / "policy")}
    shutil.rmtree(own)
    again = build(config_with(own).model_copy(update=saved), seed=9)
    seen = observation("gaussian")
    np.testing.assert_array_equal(
        again.predict_action_batch(seen, "eval", SamplingParams()).actions,
        policy.predict_action_batch(seen, "eval", SamplingParams()).actions,
    )
    # The layers behind the one that is read are left out; transformers reads what is left.
    written = json.loads((tmp_path / "policy/encoder/config.json").read_text())
    assert written["num_hidden_layers"] == 1
    Dinov2Model.from_pretrained(tmp_path / "policy/encoder")
    modes = {path.stat().st_mode for path in (tmp_path / "policy/encoder").iterdir()}
    assert len(modes) == 1
    with raises_code("frozen-encoder-differs"):
        build(config_with(encoder).model_copy(update=saved))
    with (tmp_path / "policy/encoder/model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\1\2\3\4")
    with raises_code("file-damaged"):
        build(config_with(own).model_copy(update=saved))


def test_a_warm_start_has_the_configured_kind_of_vision(encoder: Path, tmp_path: Path) -> None:
    build(config_with(encoder)).save_pretrained(tmp_path / "policy")
    for config in (config_with(None), config_with(encoder, layer=2)):
        with raises_code("warm-start-size"):
            build(config.model_copy(update={"warm_start": str(tmp_path / "policy")}))


def test_weights_of_another_encoder_are_refused(encoder: Path, tmp_path: Path) -> None:
    """As when a run is resumed, and the path of its encoder holds another one."""
    policy = build(config_with(dinov2(tmp_path / "other", seed=1)))
    policy.preprocess(observation("gaussian"))
    policy.load_state_dict(build(config_with(encoder)).state_dict())
    with raises_code("frozen-encoder-differs"):
        policy.preprocess(observation("gaussian"))


def test_an_unfit_encoder_is_refused(encoder: Path, tmp_path: Path) -> None:
    with raises_code("frozen-encoder-layer"):
        build(config_with(encoder, layer=3))
    with raises_code("policy-not-found"):
        build(config_with(tmp_path / "nowhere"))
    for number, (code, changes) in enumerate(
        [("frozen-encoder-kind", {"model_type": "vit"}), ("policy-file", {"patch_size": 16})]
    ):
        broken = tmp_path / str(number)
        shutil.copytree(encoder, broken)
        raw = json.loads((broken / "config.json").read_text())
        (broken / "config.json").write_text(json.dumps({**raw, **changes}))
        with raises_code(code):
            build(config_with(broken))
    broken = dinov2(tmp_path / "wide", hidden_size=2 * WIDTH)
    shutil.copy(encoder / "config.json", broken)
    with raises_code("frozen-encoder-weights"):
        build(config_with(broken))
