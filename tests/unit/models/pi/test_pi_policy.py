"""pi0 and pi0.5 as policies, beyond what every policy promises: layouts, relative actions, cameras, values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from safetensors.torch import load_file, save_file
from tiny_families import TINY

from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.models.load_report import LoadReport
from embodrl.models.pi.build import build_pi, build_pi0, build_pi05
from embodrl.models.pi.policy import PiPolicy
from embodrl.models.pi.spec import PiModelConfig
from embodrl.types import Observation, SamplingParams

VARIANTS = ("pi0", "pi05")
SIZES: dict[str, Any] = {**TINY["pi"], "max_action_dim": 8, "num_images": 2}
SAMPLING = SamplingParams()
EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"


def config(variant: str = "pi0", **changes: Any) -> PiModelConfig:
    values = {"model_type": variant, "warm_start": None, "num_action_chunks": 2, "action_dim": 3, "pi": SIZES}
    values |= {"value_head": {"hidden_sizes": (16,)}, "flow": {"num_steps": 3}}
    return PiModelConfig.model_validate({**values, **changes})


def build(variant: str = "pi0", seed: int = 0, **changes: Any) -> tuple[PiPolicy, LoadReport]:
    return build_pi(config(variant, **changes), variant, torch.device("cpu"), torch.float32, seed)


def observation(batch: int = 3, cameras: int = 1, state_dim: int = 4, seed: int = 0) -> Observation:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (batch, cameras, 16, 16, 3), dtype=np.uint8)
    texts = ["push the cube", "pick up the red cube and lift it", "pull"]
    state = rng.normal(size=(batch, state_dim)).astype(np.float32)
    return Observation(images, state, [texts[i % 3] for i in range(batch)], np.zeros(batch, np.int32))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Layouts -------------------------------------------------------------------------------------------------------------


def test_the_directory_is_openpis(tmp_path: Path):
    policy, _ = build("pi0")
    policy.save_pretrained(tmp_path / "saved")
    found = sorted(path.relative_to(tmp_path / "saved").as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert found == [
        "assets/maniskill/norm_stats.json",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "value_head.safetensors",
    ]
    names = set(load_file(tmp_path / "saved" / "model.safetensors"))
    head = "paligemma_with_expert.gemma_expert.lm_head.weight"
    assert names == {*policy.model.state_dict(), head}
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (raw["action_dim"], raw["action_horizon"], raw["precision"]) == (8, 4, "float32")
    stats = json.loads((tmp_path / "saved" / "assets" / "maniskill" / "norm_stats.json").read_text())
    assert stats["norm_stats"]["actions"]["q01"] == [-1.0] * 3


def rename(path: Path, change: Any) -> None:
    weights = load_file(path / "model.safetensors")
    save_file({change(name): value for name, value in weights.items()}, path / "model.safetensors")


@pytest.mark.parametrize("variant", VARIANTS)
def test_lerobots_names(variant: str, tmp_path: Path):
    policy, _ = build(variant)
    policy.save_pretrained(tmp_path)

    def lerobot(name: str) -> str:
        name = name.replace("model.language_model.embed_tokens", "lm_head").replace(
            "vision_tower.vision_model.", "vision_tower."
        )
        return f"model.{name}"

    rename(tmp_path, lerobot)
    again, report = build(variant, seed=9, model_path=str(tmp_path))
    assert report.ok and report.num_loaded == len(policy.model.state_dict()) + len(policy.value_head.state_dict())
    assert report.aliased["model.paligemma_with_expert.paligemma.lm_head.weight"] == EMBEDDING
    assert report.ignored == {
        "model.paligemma_with_expert.gemma_expert.lm_head.weight": "the action expert writes no text"
    }
    wanted = policy.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in again.state_dict().items())


def test_an_output_layer_beside_its_embedding_is_left_out(tmp_path: Path):
    policy, _ = build()
    policy.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    tied = "paligemma_with_expert.paligemma.lm_head.weight"
    save_file({**weights, tied: weights[EMBEDDING].clone()}, tmp_path / "model.safetensors")
    _, report = build(model_path=str(tmp_path))
    assert report.ignored[tied] == "tied to embed_tokens"


def test_weights_of_the_other_model_are_refused(tmp_path: Path):
    build("pi05")[0].save_pretrained(tmp_path)
    with raises_code("checkpoint-family", CheckpointError, "'pi05'", "'pi0'") as error:
        build("pi0", model_path=str(tmp_path))
    assert error.value.hint == "set model.model_type=pi05"
    # Of openpi's own file, which does not say which model it is, the names of the weights tell.
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["embodrl"]["variant"] = "pi0"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with raises_code("checkpoint-family", CheckpointError, "'pi05'", "'pi0'"):
        build("pi0", model_path=str(tmp_path))


def test_a_warm_start_of_another_size_is_refused(tmp_path: Path):
    build()[0].save_pretrained(tmp_path)
    with raises_code("warm-start-size", CheckpointError, "action_horizon", "4", "6"):
        build(pi={**SIZES, "action_horizon": 6}, warm_start=str(tmp_path))
    with raises_code("policy-not-found", CheckpointError):
        build(warm_start=str(tmp_path / "nothing"))


def test_heads_are_new_where_the_checkpoint_has_none_or_another(tmp_path: Path):
    build()[0].save_pretrained(tmp_path)
    flow = {"method": "flow_noise", "num_steps": 3}
    _, report = build(model_path=str(tmp_path), flow=flow, value_head={"hidden_sizes": (12,)})
    assert "value_head.safetensors" in report.ignored
    assert {name.split(".")[0] for name in report.initialized} == {"value_head", "noise_head"}
    _, report = build(model_path=str(tmp_path), add_value_head=False)
    assert report.ignored["value_head.safetensors"] == "model.add_value_head is false" and not report.initialized


def test_statistics_of_a_checkpoint_are_used_and_kept(tmp_path: Path):
    build()[0].save_pretrained(tmp_path)
    path = tmp_path / "assets" / "maniskill" / "norm_stats.json"
    stats = {"mean": [1.0, 2.0, 3.0], "std": [0.5, 0.5, 2.0]}
    state = {"mean": [0.0, 0.0, 0.0, 1.0], "std": [1.0, 1.0, 1.0, 2.0]}
    path.write_text(json.dumps({"norm_stats": {"actions": stats, "state": state}}))
    policy, _ = build(model_path=str(tmp_path))
    plain, _ = build(warm_start=None)
    plain.load_state_dict(policy.state_dict())
    plain.processor.state = policy.processor.state
    a, b = (p.predict_action_batch(observation(), "eval", SAMPLING).actions for p in (policy, plain))
    scale = (np.array(stats["std"]) + 1e-6) / (1.0 + 1e-6)  # the other one's are mean 0 and deviation 1
    np.testing.assert_allclose(a, b * scale + stats["mean"], atol=1e-5)
    inputs = policy.preprocess(observation())
    wanted = (observation().state[:, 3] - 1.0) / 2.000001
    np.testing.assert_allclose(inputs["state"][:, 3].numpy(), wanted, atol=1e-6)
    policy.save_pretrained(tmp_path / "again")
    kept = json.loads((tmp_path / "again" / "assets" / "maniskill" / "norm_stats.json").read_text())
    assert kept == {"norm_stats": {"actions": stats, "state": state}}


def test_builders_are_the_registered_ones():
    for builder, variant in ((build_pi0, "pi0"), (build_pi05, "pi05")):
        policy, report = builder(config(variant), device="cpu", dtype=torch.float32, seed=0)
        assert policy.model.config.variant == variant and report.source == "random weights"


# Actions -------------------------------------------------------------------------------------------------------------


def test_actions_relative_to_the_state(tmp_path: Path):
    """With relative_dims 2 the first two dimensions of actions are offsets from the state."""
    policy, _ = build()
    seen = observation()
    plain = policy.predict_action_batch(seen, "eval", SAMPLING).actions
    policy.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["embodrl"]["relative_dims"] = 2
    (tmp_path / "config.json").write_text(json.dumps(raw))
    relative, _ = build(model_path=str(tmp_path))
    found = relative.predict_action_batch(seen, "eval", SAMPLING).actions
    np.testing.assert_allclose(found[..., :2], plain[..., :2] + seen.state[:, None, :2], atol=1e-6)
    np.testing.assert_allclose(found[..., 2], plain[..., 2], atol=1e-6)
    actions = torch.rand(3, 4, 3, generator=generator())
    target = relative.sft_inputs(seen, actions)["target"]
    wanted = actions.numpy().copy()
    wanted[..., :2] -= seen.state[:, None, :2]
    np.testing.assert_allclose(target[..., :3].numpy(), wanted, atol=1e-5)
    assert not target[..., 3:].any()
    with raises_code("state-size", EmbodrlError, "2", "0"):
        relative.predict_action_batch(observation(state_dim=0), "eval", SAMPLING)


def test_training_times_have_the_distribution_of_openpi():
    """.001 + .999 Beta(1.5, 1): mean 3/5, variance 12/175 of the Beta; F(u) = u^1.5."""
    policy, _ = build()
    torch.manual_seed(0)
    times = policy.training_times(20000).double()
    u = (times - 0.001) / 0.999
    assert float(u.min()) >= 0 and float(u.max()) <= 1
    assert abs(float(u.mean()) - 0.6) < 4 * (12 / 175 / 20000) ** 0.5
    for level in (0.1, 0.5, 0.9):
        share = level**1.5
        assert abs(float((u < level).double().mean()) - share) < 4 * (share * (1 - share) / 20000) ** 0.5


# Cameras and values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_masked_camera_is_no_camera(variant: str):
    policy, _ = build(variant)
    one, two = observation(cameras=1), observation(cameras=2, seed=5)
    two.images[:, 0], two.state = one.images[:, 0], one.state
    inputs = policy.predict_action_batch(one, "train", SAMPLING, generator()).forward_inputs
    wanted = policy.evaluate_actions(inputs, SAMPLING)
    both = {**inputs, "images": policy.preprocess(two)["images"]}
    for rows in (torch.tensor([True] * 3), torch.tensor([False] * 3), torch.tensor([False, True, False])):
        masked = {**both, "image_mask": torch.stack([torch.ones(3, dtype=torch.bool), rows], dim=1)}
        found = policy.evaluate_actions(masked, SAMPLING)
        for name in ("logprobs", "values"):
            difference = (getattr(found, name) - getattr(wanted, name)).flatten(1).abs().amax(dim=1)
            assert (difference[~rows] < 1e-5).all(), name
            assert (difference[rows] > 1e-6).all(), name


@pytest.mark.parametrize(("variant", "source"), [("pi0", "suffix"), ("pi05", "prefix")])
def test_where_the_value_is_read_by_default(variant: str, source: str):
    policy, _ = build(variant)
    assert policy.value_input == source
    width = policy.value_head.hidden[0].in_features
    assert width == (32 if source == "prefix" else 24)


def test_prefix_value_is_the_mean_over_what_is_no_padding():
    policy, _ = build("pi05")
    with torch.no_grad():
        context = policy.encode(policy.preprocess(observation()))
        hidden, found = policy.model.prefix_hidden(context), policy.prefix_features(context)
    assert context.prefix_mask is not None and not context.prefix_mask.all()
    for row in range(3):
        wanted = hidden[row][context.prefix_mask[row]].mean(dim=0)
        torch.testing.assert_close(found[row], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_no_output_depends_on(variant: str):
    """Unused parameters are those that get no gradient from anything, and no others."""
    for source in ("prefix", "suffix"):
        policy, _ = build(variant, value_head={"input": source, "hidden_sizes": (16,)})
        policy.requires_grad_(True)
        output = policy.predict_action_batch(observation(), "train", SAMPLING, generator())
        result = policy.evaluate_actions(output.forward_inputs, SAMPLING)
        (result.logprobs.sum() + result.values.sum()).backward()
        without = {name for name, p in policy.named_parameters() if p.grad is None}
        unused = {id(p) for p in policy.unused_parameters()}
        assert without == {name for name, p in policy.named_parameters() if id(p) in unused}
        assert bool(without) == (source == "suffix")


def test_the_prefix_is_computed_once_for_a_chunk(monkeypatch: pytest.MonkeyPatch):
    policy, _ = build(flow={"method": "flow_noise", "num_steps": 5})
    runs: list[str] = []
    for name, module in (("vision", policy.model.paligemma.vision_tower), ("expert", policy.model.action_in_proj)):
        module.register_forward_hook(lambda *_, name=name: runs.append(name))
    output = policy.predict_action_batch(observation(), "train", SAMPLING, generator())
    assert runs == ["vision"] + ["expert"] * 5
    runs.clear()
    policy.evaluate_actions(output.forward_inputs, SAMPLING)
    assert runs == ["vision"] + ["expert"] * 5


def test_without_padding_there_are_no_masks():
    policy, _ = build()
    same = observation()
    same.instruction = ["pull"] * 3
    context = policy.encode(policy.preprocess(same))
    assert context.mask is None and context.prefix_mask is None
    assert policy.encode(policy.preprocess(observation())).mask is not None


# Learning ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [pytest.param("pi0", marks=pytest.mark.long), "pi05"])
def test_imitation_learns_to_see(variant: str):
    """Which of two pictures it sees decides the right action; chance leaves an error of about 1."""
    torch.manual_seed(0)
    policy, _ = build(variant)
    policy.requires_grad_(True)
    seen = observation(2, seed=3)
    seen.instruction = ["push the cube"] * 2
    seen.state[:] = 0
    targets = torch.tensor([1.0, -1.0])[:, None, None].expand(2, 4, 3)
    rows = np.arange(32) % 2
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        batch = policy.sft_inputs(seen.select(rows), targets[torch.from_numpy(rows)])
        loss, _ = policy.sft_loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-5:]) < 0.4 * losses[0]
    actions = policy.predict_action_batch(seen, "eval", SAMPLING, compute_values=False).actions
    assert np.abs(actions - targets[:, :2].numpy()).mean() < 0.4


# Precision -----------------------------------------------------------------------------------------------------------

OPENPIS_FLOAT32 = (  # the parts of names in openpi's to_bfloat16_for_selected_params
    "vision_tower.vision_model.embeddings.patch_embedding.weight",
    "vision_tower.vision_model.embeddings.patch_embedding.bias",
    "vision_tower.vision_model.embeddings.position_embedding.weight",
    "input_layernorm",
    "post_attention_layernorm",
    "model.norm",
)


def in_bfloat16(variant: str, **changes: Any) -> PiPolicy:
    return build_pi(config(variant, **changes), variant, torch.device("cpu"), torch.bfloat16, 0)[0].eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_openpi_keeps_in_float32(variant: str, tmp_path: Path):
    full, _ = build(variant)
    full.save_pretrained(tmp_path)
    wanted = full.model.state_dict()
    for policy in (in_bfloat16(variant), in_bfloat16(variant, warm_start=str(tmp_path))):
        found = policy.model.state_dict()
        for name, value in found.items():
            inside = name.startswith("paligemma_with_expert.")
            exact = not inside or any(part in name for part in OPENPIS_FLOAT32)
            assert value.dtype == (torch.float32 if exact else torch.bfloat16), name
    assert all(torch.equal(value, wanted[name].to(value.dtype)) for name, value in found.items())  # not rounded before


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("autocast", [False, True])
def test_the_velocity_is_computed_in_float32(variant: str, autocast: bool):
    policy = build(variant)[0].eval() if autocast else in_bfloat16(variant)
    inputs = policy.preprocess(observation())
    noise = torch.randn(3, 4, 8, generator=generator())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        velocity, hidden = policy.velocity(policy.encode(inputs))(noise, torch.full((3,), 0.5))
    layer = policy.model.action_out_proj
    assert velocity.dtype == hidden.dtype == torch.float32
    assert torch.equal(velocity, torch.nn.functional.linear(hidden, layer.weight, layer.bias))
    assert not torch.equal(velocity, velocity.bfloat16().float())
