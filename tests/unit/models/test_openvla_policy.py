"""OpenVLA as a policy, beyond what every policy promises: frozen vision, log-probs by hand, prompts, files."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from expect import raises_code

from embodrl.config.schema import ValueHeadConfig
from embodrl.errors import CheckpointError
from embodrl.models.common.checkpoint import save_weights, write_json
from embodrl.models.openvla.decode import ActionDecoder
from embodrl.models.openvla.modeling import VisionBackbone
from embodrl.models.openvla.policy import OpenVLAPolicy
from embodrl.models.openvla.spec import ArchitectureConfig, OpenVlaConfig, VitConfig
from embodrl.models.registry import build_policy
from embodrl.types import Observation, SamplingParams

VIT = VitConfig(width=16, depth=3, num_heads=2, mlp_dim=24)
ARCHITECTURE = ArchitectureConfig(
    image_size=16,
    patch_size=8,
    dino=VIT,
    siglip=VIT,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
)
TEXTS = ("push the cube to the goal", "pick up the small red cube and lift it over the box", "pull")


def build(**changes) -> OpenVLAPolicy:
    options = {"warm_start": None, "architecture": ARCHITECTURE, "num_action_chunks": 2, **changes}
    return build_policy(OpenVlaConfig(**options), device="cpu", dtype=torch.float32, seed=3)[0]


def observation(batch: int = 3, seed: int = 0, size: int = 16) -> Observation:
    images = np.random.default_rng(seed).integers(0, 256, (batch, 1, size, size, 3), dtype=np.uint8)
    texts = [TEXTS[i % len(TEXTS)] for i in range(batch)]
    return Observation(images, np.zeros((batch, 0), np.float32), texts, np.zeros(batch, np.int32))


@pytest.fixture(scope="module")
def policy() -> OpenVLAPolicy:
    return build()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("sampling", [SamplingParams(1.0), SamplingParams(0.3), SamplingParams(1.7, 5)])
@pytest.mark.parametrize(("chunk", "output"), [(1, "chunk"), (5, "action")])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_training_reproduces_the_rollout(sampling, chunk, output, mode):
    policy = build(num_action_chunks=chunk, value_head=ValueHeadConfig(output=output))
    rollout = policy.predict_action_batch(observation(), mode, sampling, generator())
    again = policy.evaluate_actions(rollout.forward_inputs, sampling)
    torch.testing.assert_close(again.logprobs, rollout.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(again.values, rollout.values, rtol=0, atol=1e-5)
    assert rollout.actions.shape == rollout.logprobs.shape == again.entropy.shape == (3, chunk, 7)
    assert rollout.values.shape == (3, chunk if output == "action" else 1)
    assert rollout.logprobs.dtype == rollout.values.dtype == torch.float32
    assert rollout.actions.dtype == np.float32 and np.abs(rollout.actions).max() <= 1


def test_frozen_vision_is_computed_in_the_rollout_alone(monkeypatch):
    frozen, whole = build(freeze_vision=True), build()
    sampling = SamplingParams(1.0)
    rollout = frozen.predict_action_batch(observation(), "train", sampling, generator())
    want = whole.predict_action_batch(observation(), "train", sampling, generator())
    torch.testing.assert_close(rollout.logprobs, want.logprobs, rtol=0, atol=0)
    assert "images" not in rollout.forward_inputs and rollout.forward_inputs["patches"].shape == (3, 4, 32)
    monkeypatch.setattr(VisionBackbone, "forward", None)
    again = frozen.evaluate_actions(rollout.forward_inputs, sampling)
    monkeypatch.undo()
    expected = whole.evaluate_actions(want.forward_inputs, sampling)
    (again.logprobs.mean() + again.values.mean()).backward()
    (expected.logprobs.mean() + expected.values.mean()).backward()
    gradients = dict(whole.named_parameters())
    for name, parameter in frozen.named_parameters():
        if "vision_backbone" in name:
            assert parameter.grad is None
        elif gradients[name].grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-6)


def test_features_of_frozen_vision_can_be_sent_whatever_they_were_computed_in():
    policy = build_policy(
        OpenVlaConfig(warm_start=None, architecture=ARCHITECTURE, freeze_vision=True),
        device="cpu",
        dtype=torch.bfloat16,
        seed=3,
    )[0]
    rollout = policy.predict_action_batch(observation(), "train", SamplingParams(1.0), generator())
    assert rollout.forward_inputs["patches"].dtype == torch.float32
    again = policy.evaluate_actions(rollout.forward_inputs, SamplingParams(1.0))
    assert again.logprobs.isfinite().all()


def test_training_is_sensitive_to_the_temperature(policy):
    rollout = policy.predict_action_batch(observation(), "train", SamplingParams(1.0), generator())
    other = policy.evaluate_actions(rollout.forward_inputs, SamplingParams(0.5))
    assert (other.logprobs - rollout.logprobs).abs().max() > 1e-3


def test_log_probs_match_the_definition(policy):
    """Log-softmax over the logits of all action ids."""
    rollout = policy.predict_action_batch(observation(1), "train", SamplingParams(0.8), generator())
    inputs, model = rollout.forward_inputs, policy.model
    keep = inputs["attention_mask"][0].bool()
    tokens = inputs["action_tokens"].flatten(1)
    prefix = model.embed_prefix(policy._pixels(inputs["images"]), inputs["input_ids"][:, keep])
    known = model.language_model.model.embed_tokens(tokens[:, :-1])
    logits = model.language_model.lm_head(model.language_model.model(torch.cat([prefix, known], dim=1)))
    first = policy.bins.first_id
    scaled = logits[0, prefix.shape[1] - 1 :, first : first + 256].double() / 0.8
    want = torch.stack([row[t - first] - row.exp().sum().log() for row, t in zip(scaled, tokens[0], strict=True)])
    torch.testing.assert_close(rollout.logprobs.flatten(), want.float(), rtol=0, atol=1e-5)


def test_decoder_equals_the_full_forward_pass(policy):
    inputs = policy.preprocess(observation())
    with torch.no_grad():
        prefix, mask = policy.prompt_embeddings(inputs)
        assert mask is not None
        tokens = torch.randint(policy.bins.first_id, policy.bins.first_id + 256, (3, 14), generator=generator())
        decoder = ActionDecoder(policy.model, 3, prefix.shape[1] + 14)
        _, logits, hidden = decoder.run(prefix, mask, 14, lambda _, place: tokens[:, place])
        want, want_hidden = policy.action_logits({**inputs, "action_tokens": tokens.view(3, 2, 7)})
    torch.testing.assert_close(logits, want, rtol=0, atol=1e-5)
    torch.testing.assert_close(hidden[:, -1], want_hidden, rtol=0, atol=1e-5)


def test_greedy_takes_the_most_probable(policy):
    rollout = policy.predict_action_batch(observation(), "eval", SamplingParams(1.0))
    with torch.no_grad():
        logits, _ = policy.action_logits(rollout.forward_inputs)
    assert torch.equal(logits.argmax(-1), policy.bins.index(rollout.forward_inputs["action_tokens"].flatten(1)))


def test_forward_inputs_do_not_alias_the_observation(policy):
    seen = observation()
    inputs = policy.preprocess(seen)
    before = inputs["images"].clone()
    seen.images[:] = 0
    assert torch.equal(inputs["images"], before)


def test_bfloat16_autocast(policy):
    with torch.autocast("cpu", torch.bfloat16):
        rollout = policy.predict_action_batch(observation(), "train", SamplingParams(1.0), generator())
        again = policy.evaluate_actions(rollout.forward_inputs, SamplingParams(1.0))
    assert rollout.logprobs.dtype == again.logprobs.dtype == again.values.dtype == torch.float32
    assert (again.logprobs - rollout.logprobs).abs().max() < 0.05


def test_imitation_learns_and_counts(policy):
    policy = build(num_action_chunks=1)
    actions = torch.tensor([[-0.5, 0.0, 0.5, 1.0, -1.0, 0.25, 0.75]]).repeat(3, 1)[:, None]
    batch = policy.sft_inputs(observation(), actions)
    np.testing.assert_allclose(policy.bins.decode(batch["action_tokens"].numpy()), actions.numpy(), atol=1 / 255 + 1e-6)
    optimizer = torch.optim.Adam([p for group in policy.trainable_groups().values() for p in group], 3e-3)
    first = policy.sft_loss(batch)[0].item()
    for _ in range(80):
        optimizer.zero_grad()
        loss, scalars = policy.sft_loss(batch)
        loss.backward()
        optimizer.step()
    assert first > 4 and loss.item() < 0.5
    assert scalars["token_accuracy"] == 1 and scalars["l1"] == 0
    smoothed = policy.sft_loss(batch, label_smoothing_bins=4.0)[0].item()
    assert smoothed > loss.item()
    half = {**batch, "action_mask": torch.tensor([[True], [False], [False]])}
    alone = {name: value[:1] for name, value in batch.items()}
    torch.testing.assert_close(policy.sft_loss(half)[0], policy.sft_loss(alone)[0], rtol=1e-4, atol=1e-6)


def test_sharded_weights_load(tmp_path):
    policy = build()
    policy.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "model.safetensors").unlink()
    save_weights(policy.model.state_dict(), tmp_path / "saved", max_shard_bytes=20_000)
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 3
    again = build(warm_start=str(tmp_path / "saved"))
    assert all(
        torch.equal(a, b) for a, b in zip(policy.state_dict().values(), again.state_dict().values(), strict=True)
    )
    next((tmp_path / "saved").glob("model-00002*")).unlink()
    with raises_code("weights-missing", CheckpointError, "model-00002"):
        build(warm_start=str(tmp_path / "saved"))


def test_unfit_checkpoints_are_refused(tmp_path):
    with raises_code("policy-not-found", CheckpointError):
        build(warm_start=str(tmp_path))
    saved = tmp_path / "saved"
    build().save_pretrained(saved)
    bigger = ARCHITECTURE.model_copy(update={"hidden_size": 64})
    with raises_code("warm-start-size", CheckpointError, "llama.hidden_size", "32", "64"):
        build(warm_start=str(saved), architecture=bigger)
    data = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(data[: len(data) // 2])
    with raises_code("policy-file", CheckpointError):
        build(warm_start=str(saved))
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    with raises_code("weights-pickled", CheckpointError):
        build(warm_start=str(saved))


def test_without_a_value_head():
    policy = build(add_value_head=False)
    rollout = policy.predict_action_batch(observation(), "train", SamplingParams(), generator(), compute_values=False)
    assert rollout.values is None and "value_head" not in policy.trainable_groups()
    with raises_code("value-head-missing"):
        policy.predict_action_batch(observation(), "train", SamplingParams(), generator())


def test_prompts_and_cameras_are_checked(policy):
    seen = observation()
    with raises_code("prompt-too-long"):
        policy.preprocess(replace(seen, instruction=["word " * 60] * 3))
    with raises_code("num-cameras"):
        policy.preprocess(replace(seen, images=np.concatenate([seen.images, seen.images], axis=1)))


def test_prompt_row(policy):
    ids, mask = policy.processor.prompt_row("Push The Cube")
    assert (ids, mask) == policy.processor.prompt_row("push the cube")
    assert len(ids) == len(mask) == ARCHITECTURE.max_prompt_tokens
    kept = [token for token, keep in zip(ids, mask, strict=True) if keep]
    assert kept[0] == 1 and kept[-1] == policy.model.config.prompt_end_id == ids[-1]
    text = policy.processor.tokenizer.decode(kept[:-1])
    assert text == "In: What action should the robot take to push the cube?\nOut:"


@pytest.mark.parametrize("source", ["prompt_end", "prompt_mean"])
def test_values_are_read_from_the_prompt(source):
    """The last hidden state, or the mean over BOS, patches and prompt, of each row alone and so without padding."""
    policy = build(value_head=ValueHeadConfig(input=source))
    values = policy.predict_values(observation())
    rollout = policy.predict_action_batch(observation(), "train", SamplingParams(), generator())
    torch.testing.assert_close(rollout.values, values, rtol=0, atol=1e-5)
    again = policy.evaluate_actions(rollout.forward_inputs, SamplingParams())
    torch.testing.assert_close(again.values, values, rtol=0, atol=1e-5)
    for row in range(3):
        inputs = {name: value[row : row + 1] for name, value in rollout.forward_inputs.items()}
        ids = inputs["input_ids"][:, inputs["attention_mask"][0].bool()]
        with torch.no_grad():
            prefix = policy.model.embed_prefix(policy._pixels(inputs["images"]), ids)
            hidden = policy.model.language_model.model(prefix)[0]
            want = policy.value_head(hidden[-1:] if source == "prompt_end" else hidden.mean(dim=0, keepdim=True))
        torch.testing.assert_close(values[row : row + 1], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("detach", [False, True])
def test_a_detached_value_trains_the_value_head_only(detach):
    policy = build(value_head=ValueHeadConfig(detach=detach))
    inputs = policy.predict_action_batch(observation(), "train", SamplingParams(), generator()).forward_inputs
    policy.evaluate_actions(inputs, SamplingParams()).values.sum().backward()
    reached = {name.partition(".")[0] for name, p in policy.named_parameters() if p.grad is not None}
    assert reached == ({"value_head"} if detach else {"value_head", "model"})


def test_gripper_convention():
    """LIBERO: the model's 0 (closed) to 1 (open) becomes +1 (closed) or -1 (open), and back for imitation."""
    plain, libero = build(), build(gripper="libero")
    acted = [
        p.predict_action_batch(observation(), "train", SamplingParams(), generator()).actions for p in (plain, libero)
    ]
    np.testing.assert_array_equal(acted[0][..., :6], acted[1][..., :6])
    np.testing.assert_array_equal(acted[1][..., 6], np.where(acted[0][..., 6] > 0.5, -1.0, 1.0))
    actions = torch.zeros(3, 2, 7)
    actions[:, 0, 6], actions[:, 1, 6] = -1.0, 1.0
    tokens = libero.sft_inputs(observation(), actions)["action_tokens"].numpy()
    np.testing.assert_allclose(libero.bins.decode(tokens)[:, :, 6], [[1.0, 0.0]] * 3, atol=1 / 255 + 1e-6)


def test_bfloat16_weights(tmp_path):
    config = OpenVlaConfig(warm_start=None, architecture=ARCHITECTURE, num_action_chunks=2)
    policy, _ = build_policy(config, device="cpu", dtype=torch.bfloat16, seed=3)
    policy.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float32):
        config = OpenVlaConfig(warm_start=str(tmp_path), architecture=ARCHITECTURE, num_action_chunks=2)
        again, report = build_policy(config, device="cpu", dtype=dtype, seed=4)
        assert report.ok and report.num_loaded == len(policy.state_dict()) and not report.initialized
        assert {value.dtype for value in again.model.state_dict().values()} == {dtype}
        assert {value.dtype for value in again.value_head.state_dict().values()} == {torch.float32}
        weights = again.state_dict()
        assert all(
            torch.equal(value.to(weights[name].dtype), weights[name]) for name, value in policy.state_dict().items()
        )


def test_an_unknown_unnorm_key_lists_the_keys(tmp_path):
    build().save_pretrained(tmp_path)
    statistics = json.loads((tmp_path / "dataset_statistics.json").read_text())["maniskill"]
    write_json(tmp_path / "dataset_statistics.json", {"libero_goal_no_noops": statistics, "bridge_orig": statistics})
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", {**config, "norm_stats": {}})
    with raises_code(
        "statistics-choice", CheckpointError, 2, "bridge_orig", "libero_goal_no_noops", "model.unnorm_key"
    ):
        build(model_path=str(tmp_path))
    with raises_code("statistics-missing", CheckpointError, "'bridge'", "bridge_orig", "model.unnorm_key=bridge_orig"):
        build(model_path=str(tmp_path), unnorm_key="bridge")
    assert build(model_path=str(tmp_path), unnorm_key="libero_goal").stats.key == "libero_goal_no_noops"
