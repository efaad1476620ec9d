"""OpenVLA-OFT: one bidirectional pass over several images, the robot's state, the prompt and empty places."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import raises_code
from safetensors.torch import save_file
from tiny_families import build, generator, observation, tiny_config
from transformers import LlamaForCausalLM

from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.models.common.checkpoint import write_json
from embodrl.models.common.config_file import fields_of
from embodrl.models.openvla.modeling import VisionBackbone
from embodrl.models.openvla_oft.config import ProprioStats, choose_proprio_stats
from embodrl.models.openvla_oft.policy import OpenVLAOFTPolicy
from embodrl.models.openvla_oft.processing import ProprioInput
from embodrl.models.registry import build_policy
from embodrl.types import Observation, SamplingParams

FAMILY = "openvla_oft"
SAMPLING = SamplingParams(0.8)


def seen(batch: int = 3, cameras: int = 2, state_dim: int = 5, texts: tuple[str, ...] | None = None) -> Observation:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (batch, cameras, 16, 16, 3), dtype=np.uint8)
    state = rng.uniform(-1, 1, (batch, state_dim)).astype(np.float32)
    base = observation(FAMILY, batch) if texts is None else observation(FAMILY, batch, texts=texts)
    return Observation(images, state, base.instruction, base.task_id)


def load(**changes: object) -> tuple[OpenVLAOFTPolicy, object]:
    return build_policy(tiny_config(FAMILY, **changes), device="cpu", dtype=torch.float32, seed=9)


@pytest.mark.parametrize("sampling", [SAMPLING, SamplingParams(1.7, 5)])
@pytest.mark.parametrize(("stop", "proprio", "cameras"), [(True, True, 2), (False, False, 1), (True, False, 4)])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_training_reproduces_the_rollout(sampling, stop, proprio, cameras, mode):
    policy = build(FAMILY, keep_stop_token=stop, use_proprio=proprio)
    rollout = policy.predict_action_batch(seen(cameras=cameras), mode, sampling, generator())
    again = policy.evaluate_actions(rollout.forward_inputs, sampling)
    torch.testing.assert_close(again.logprobs, rollout.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(again.values, rollout.values, rtol=0, atol=1e-5)
    assert rollout.forward_inputs["images"].shape == (3, cameras, 16, 16, 3)


@pytest.mark.parametrize("stop", [True, False])
def test_log_probs_match_the_definition(stop):
    """The sequence put together by hand, through transformers' own attention without a causal mask."""
    policy = build(FAMILY, use_proprio=True, keep_stop_token=stop)
    rollout = policy.predict_action_batch(seen(1), "train", SAMPLING, generator())
    inputs, model = rollout.forward_inputs, policy.model
    pixels = inputs["images"][0].permute(0, 3, 1, 2).double() / 255.0
    normalized = [
        torch.cat([(image - dino_mean) / dino_std, (image - 0.5) / 0.5]).float()
        for image in pixels
        for dino_mean in [torch.tensor([0.484375, 0.455078125, 0.40625])[:, None, None]]
        for dino_std in [torch.tensor([0.228515625, 0.2236328125, 0.224609375])[:, None, None]]
    ]
    llama = LlamaForCausalLM(model.language_model.spec.public(causal=False))
    llama.load_state_dict(model.language_model.state_dict())
    llama.config._attn_implementation = "eager"
    with torch.no_grad():
        patches = [model.projector(model.vision_backbone(image[None])) for image in normalized]
        state = policy.proprio_projector(torch.tensor(np.pad(seen(1).state, ((0, 0), (0, 27)))))[:, None]
        ids = inputs["input_ids"][:, inputs["attention_mask"][0].bool()]
        text = llama.model.embed_tokens(ids)
        tail = [torch.zeros(1, 14, 32)] + ([llama.model.embed_tokens(torch.tensor([[2]]))] if stop else [])
        sequence = torch.cat([text[:, :1], *patches, state, text[:, 1:], *tail], dim=1)
        everything = torch.zeros(1, 1, sequence.shape[1], sequence.shape[1])
        logits = llama(inputs_embeds=sequence, attention_mask=everything).logits
    places = 1 + 2 * 4 + 1 + (ids.shape[1] - 1) - 1 + torch.arange(14)
    first = policy.bins.first_id
    want = (logits[0, places, first : first + 256].double() / 0.8).log_softmax(-1)
    tokens = inputs["action_tokens"].flatten() - first
    torch.testing.assert_close(rollout.logprobs.flatten(), want[range(14), tokens].float(), rtol=0, atol=1e-5)


def test_chosen_tokens_are_not_seen():
    """Neither logits nor values depend on them, so they are the same before and after the choice."""
    policy = build(FAMILY)
    inputs = policy.predict_action_batch(seen(), "train", SAMPLING, generator()).forward_inputs
    others = {**inputs, "action_tokens": inputs["action_tokens"].flip(0, 1, 2)}
    with torch.no_grad():
        logits, features = policy.action_logits(inputs)
        for changed in (others, {name: value for name, value in inputs.items() if name != "action_tokens"}):
            again = policy.action_logits(changed)
            assert torch.equal(logits, again[0]) and torch.equal(features, again[1])
        rows = slice(policy.bins.first_id, policy.bins.first_id + 256)
        policy.model.language_model.model.embed_tokens.weight[rows] += 1.0
        assert torch.equal(logits, policy.action_logits(inputs)[0])


@pytest.mark.parametrize("change", ["places", "stop"])
def test_what_comes_later_is_seen(change):
    """The first action depends on the length of the chunk and on the stop token; with causal attention it does not."""
    changes = {"num_action_chunks": 3} if change == "places" else {"keep_stop_token": False}
    policies = [build(FAMILY, add_value_head=False), build(FAMILY, add_value_head=False, **changes)]
    inputs = policies[0].preprocess(seen())
    found = {}
    for causal in (False, True):
        logits = []
        for policy in policies:
            policy.model.causal = causal
            policy.model.language_model.model.causal = not causal
            logits.append(policy.action_logits(inputs)[0][:, 0])
        found[causal] = (logits[0] - logits[1]).abs().max().item()
    assert found[False] > 1e-4 and found[True] < 1e-6


@pytest.mark.parametrize("texts", [("push",), ("push", "pull the red cube")])
def test_what_the_prompt_predicts_is_skipped_without_a_difference(monkeypatch, texts):
    """The last layer computes only what is read; values and gradients are those of the whole computation."""
    policy = build(FAMILY)
    inputs = policy.predict_action_batch(seen(2, texts=texts), "train", SAMPLING, generator()).forward_inputs
    computed = []
    policy.model.language_model.model.norm.register_forward_pre_hook(
        lambda _, given: computed.append(given[0].shape[1])
    )

    def learned() -> list[torch.Tensor]:
        policy.zero_grad()
        output = policy.evaluate_actions(inputs, SAMPLING)
        (output.logprobs.sum() + output.entropy.sum() + output.values.sum()).backward()
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        return [output.logprobs.detach(), output.entropy.detach(), output.values.detach(), *gradients]

    found = [part.clone() for part in learned()]
    monkeypatch.setattr(policy, "first_read", lambda length: 0)
    for part, whole in zip(found, learned(), strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-5)
    assert computed[0] == 14 + 2 < computed[1]  # the last prompt token, the actions and the stop token


def test_frozen_vision_is_computed_in_the_rollout_alone(monkeypatch):
    frozen, whole = build(FAMILY, freeze_vision=True), build(FAMILY)
    rollout = frozen.predict_action_batch(seen(), "train", SAMPLING, generator())
    want = whole.predict_action_batch(seen(), "train", SAMPLING, generator())
    assert torch.equal(rollout.logprobs, want.logprobs)
    assert "images" not in rollout.forward_inputs and rollout.forward_inputs["patches"].shape == (3, 8, 32)
    monkeypatch.setattr(VisionBackbone, "forward", None)
    again = frozen.evaluate_actions(rollout.forward_inputs, SAMPLING)
    torch.testing.assert_close(again.logprobs, rollout.logprobs, rtol=0, atol=1e-5)
    assert not build(FAMILY, freeze_vision=True, use_film=True).vision_is_frozen


def test_images_count_in_order():
    policy = build(FAMILY)
    observed = seen()
    base = policy.predict_values(observed)
    observed.images = np.ascontiguousarray(observed.images[:, ::-1])
    assert (policy.predict_values(observed) - base).abs().max() > 1e-5
    assert policy.preprocess(seen(cameras=4))["images"].shape == (3, 4, 16, 16, 3)
    for cameras in (0, 5):
        with raises_code("num-cameras", EmbodrlError, 4, cameras):
            policy.preprocess(seen(cameras=cameras))


def test_it_learns():
    policy = build(FAMILY, use_proprio=True)
    actions = torch.tensor([-0.5, 0.0, 0.5, 1.0, -1.0, 0.25, 0.75]).repeat(3, 2, 1)
    actions[1] *= -1
    actions[:, 1] *= 0.5
    batch = policy.sft_inputs(seen(), actions)
    optimizer = torch.optim.Adam([p for group in policy.trainable_groups().values() for p in group], 3e-3)
    first = policy.sft_loss(batch)[0].item()
    for _ in range(120):
        optimizer.zero_grad()
        loss, scalars = policy.sft_loss(batch)
        loss.backward()
        optimizer.step()
    assert first > 4 and loss.item() < 0.5 and scalars["token_accuracy"] == 1
    greedy = policy.predict_action_batch(seen(), "eval", SAMPLING).actions
    np.testing.assert_allclose(greedy, actions.numpy(), atol=1 / 255 + 1e-6)


# The robot's state ---------------------------------------------------------------------------------------------------


def test_state_is_normalised_by_quantiles():
    stats = ProprioStats(np.array([-1.0, 0.0, 2.0]), np.array([1.0, 4.0, 2.0]), np.array([True, True, False]))
    state = np.array([[0.5, 1.0, 0.3], [-7.0, 9.0, 5.0]])
    np.testing.assert_allclose(stats.normalize(state), [[0.5, -0.5, 0.3], [-1.0, 1.0, 1.0]], atol=1e-7)
    tiny = ProprioInput(4, None)(np.array([[5.0, -2.0]], np.float32))
    assert tiny.tolist() == [[5.0, -2.0, 0.0, 0.0]]
    for size, code, names in ((0, "state-missing", ()), (2, "state-size", (2, 3)), (4, "state-size", (4,))):
        with raises_code(code, EmbodrlError, *names):
            ProprioInput(3, stats)(np.zeros((1, size), np.float32))


def test_state_is_seen_only_if_wanted():
    with_state, without = build(FAMILY, use_proprio=True), build(FAMILY)
    observed, other = seen(), seen()
    other.state = other.state[::-1].copy()
    assert (with_state.predict_values(observed) - with_state.predict_values(other)).abs().max() > 1e-6
    assert torch.equal(without.predict_values(observed), without.predict_values(other))
    assert "proprio" not in without.preprocess(observed)
    assert "proprio_projector" in with_state.trainable_groups() and "proprio_projector" not in without.parts()
    with raises_code("state-missing", EmbodrlError, "env.include_state=true"):
        with_state.preprocess(seen(state_dim=0))


def test_state_survives_saving(tmp_path):
    policy = build(FAMILY, use_proprio=True)
    policy.save_pretrained(tmp_path / "saved")
    again, report = load(use_proprio=True, warm_start=str(tmp_path / "saved"))
    assert report.ok and not report.initialized and not report.ignored
    assert torch.equal(again.predict_values(seen()), policy.predict_values(seen()))
    with raises_code("oft-component-unused", CheckpointError, "model.use_proprio=true"):
        load(warm_start=str(tmp_path / "saved"))


def public(policy: OpenVLAOFTPolicy, directory: Path, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Write a checkpoint as the public ones are: a pickled projector, and statistics of the state."""
    policy.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    [entry] = config["norm_stats"].values()
    write_json(directory / "config.json", {**config, "norm_stats": {}})
    entry["proprio"] = {"q01": [-1.0] * 5, "q99": [1.0] * 5}
    write_json(directory / "dataset_statistics.json", {"libero": entry})
    weights = {
        "module.fc1.weight": torch.randn(32, 5, generator=generator()),
        "module.fc1.bias": torch.zeros(32),
        "module.fc2.weight": torch.eye(32),
        "module.fc2.bias": torch.zeros(32),
        **changes,
    }
    torch.save(weights, directory / "proprio_projector--5_checkpoint.pt")
    return weights


def test_public_projectors_load(tmp_path):
    weights = public(build(FAMILY), tmp_path / "public")
    policy, report = load(use_proprio=True, model_path=str(tmp_path / "public"))
    assert report.ok and policy.stats.key == "libero"
    assert torch.equal(policy.proprio_projector.fc1.weight, weights["module.fc1.weight"])
    assert policy.preprocess(seen())["proprio"].numpy() == pytest.approx(np.clip(seen().state, -1, 1), abs=1e-6)
    assert np.isfinite(policy.predict_action_batch(seen(), "eval", SAMPLING).actions).all()


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ("lost", "oft-component-missing"),
        ("two", "policy-file"),
        ("shape", "weights-mismatch"),
        ("expanded", "policy-file"),
        ("code", "policy-file"),
        ("torn", "policy-file"),
    ],
)
def test_unfit_projectors_are_refused(tmp_path, wrong, code):
    changes = {"module.fc2.bias": torch.zeros(31)} if wrong == "shape" else {}
    public(build(FAMILY), tmp_path / "public", **changes)
    path = tmp_path / "public" / "proprio_projector--5_checkpoint.pt"
    if wrong == "lost":
        path.unlink()
    elif wrong == "two":
        path.with_name("proprio_projector--6_checkpoint.pt").write_bytes(path.read_bytes())
    elif wrong == "code":
        torch.save({"module.fc1.weight": Path}, path)  # anything but a tensor would have to be run
    elif wrong == "expanded":  # of a stride of 0: a few bytes that a copy turns into gigabytes
        torch.save({"module.fc1.weight": torch.zeros(1).expand(2**30, 5)}, path)
    elif wrong == "torn":
        path.write_bytes(path.read_bytes()[:100])
    with raises_code(code, CheckpointError):
        load(use_proprio=True, model_path=str(tmp_path / "public"))


def test_statistics_of_the_state_are_needed():
    with raises_code("statistics-missing", CheckpointError, "'libero'", "'q01'"):
        choose_proprio_stats({"libero": fields_of({"action": {}, "proprio": {"mean": [0.0]}}, "x")}, "libero", "x")


# The L1 head and FiLM -----------------------------------------------------------------------------------------------

EVERYTHING = {"action_head": "l1", "use_film": True, "use_proprio": True}


def test_an_l1_head_has_no_density():
    policy = build(FAMILY, action_head="l1")
    output = policy.predict_action_batch(seen(), "eval", SAMPLING)
    assert output.actions.shape == (3, 2, 7) and output.values.shape == (3, 1) and not output.logprobs.any()
    with pytest.raises(EmbodrlError) as drawn:
        policy.predict_action_batch(seen(), "train", SAMPLING, generator())
    with pytest.raises(EmbodrlError) as evaluated:
        policy.evaluate_actions(output.forward_inputs, SAMPLING)
    assert drawn.value.code == evaluated.value.code == "policy-has-no-density"


@pytest.mark.long
def test_an_l1_head_imitates():
    """The loss by hand, and 60 steps of it."""
    policy = build(FAMILY, **EVERYTHING)
    actions = torch.linspace(-0.9, 0.9, 42).view(3, 2, 7)
    batch = policy.sft_inputs(seen(), actions)
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    chosen = torch.from_numpy(policy.predict_action_batch(seen(), "eval", SAMPLING).actions)
    loss, scalars = policy.sft_loss({**batch, "action_mask": mask})
    torch.testing.assert_close(loss.detach(), (chosen - actions).abs()[mask].mean())
    assert torch.equal(scalars["l1"], loss.detach())
    loss.backward()
    used = {id(p) for group in policy.trainable_groups().values() for p in group}
    assert "action_head" in policy.parts() and not used & {id(p) for p in policy.unused_parameters()}
    assert policy.model.language_model.lm_head.weight.grad is None and not any(
        p.requires_grad for p in policy.model.language_model.lm_head.parameters()
    )
    optimizer = torch.optim.Adam([p for group in policy.trainable_groups().values() for p in group], 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        loss, _ = policy.sft_loss(batch)
        loss.backward()
        optimizer.step()
    assert loss < 0.15
    assert policy.model.vision_backbone.featurizer.blocks[0].scale.weight.abs().max() > 1e-4


def test_film_reads_the_prompt_and_no_padding():
    """Rollout and training agree, alone or among others; another instruction gives other features of the pictures."""
    policy = build(FAMILY, use_film=True)
    with torch.no_grad():
        for block in policy.model.vision_backbone.featurizer.blocks:
            block.scale.weight.normal_(generator=generator())
    output = policy.predict_action_batch(seen(), "train", SAMPLING, generator())
    for row in range(3):
        alone = {name: value[row : row + 1] for name, value in output.forward_inputs.items()}
        again = policy.evaluate_actions(alone, SAMPLING)
        torch.testing.assert_close(again.logprobs[0], output.logprobs[row], rtol=0, atol=1e-5)
    inputs = policy.preprocess(seen())
    picture = inputs["images"][:1].expand(3, -1, -1, -1, -1)
    embeddings, _ = policy.prompt_embeddings({**inputs, "images": picture})
    assert (embeddings[0, 1:5] - embeddings[1, 1:5]).abs().max() > 1e-3  # the patches of the first camera


def test_an_l1_policy_survives_saving(tmp_path):
    policy = build(FAMILY, **EVERYTHING)
    policy.save_pretrained(tmp_path / "saved")
    again, report = load(model_path=str(tmp_path / "saved"), **EVERYTHING)
    assert report.ok and not report.initialized and not report.ignored
    before, after = policy.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in before.items())
    with raises_code("oft-component-unused", CheckpointError, "model.action_head=l1"):
        load(model_path=str(tmp_path / "saved"), use_film=True, use_proprio=True)
    (tmp_path / "saved" / "action_head.safetensors").unlink()
    with pytest.raises(CheckpointError) as error:
        load(model_path=str(tmp_path / "saved"), **EVERYTHING)
    assert error.value.code == "oft-component-missing"
    with raises_code("oft-settings", CheckpointError, "model.use_film=true"):
        load(model_path=str(tmp_path / "saved"), use_proprio=True)


def public_l1(directory: Path, dim: int) -> OpenVLAOFTPolicy:
    """Write a policy as finetune.py does: pickled components, a plain vision backbone beside that with FiLM."""
    policy = build(FAMILY, **EVERYTHING, action_dim=dim)
    policy.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    [entry] = config["norm_stats"].values()
    entry["action"] |= {"min": [-2.0] * dim, "max": [2.0] * dim}
    entry["proprio"] = {"q01": [-1.0] * 32, "q99": [1.0] * 32, "min": [-2.0] * 32, "max": [2.0] * 32}
    write_json(directory / "dataset_statistics.json", config["norm_stats"])
    own = {name: value for name, value in config["embodrl"].items() if name not in ("use_film", "normalization")}
    write_json(directory / "config.json", {**config, "embodrl": own})  # what a tiny network leaves no name for
    for name in ("action_head", "proprio_projector"):
        (directory / f"{name}.safetensors").unlink()
        state = {f"module.{key}": value for key, value in getattr(policy, name).state_dict().items()}
        torch.save(state, directory / f"{name}--7_checkpoint.pt")
    film, weights = {}, {}
    for name, value in policy.model.state_dict().items():
        if name.startswith("vision_backbone."):
            stem, dot, rest = name.partition(".blocks.")
            index, _, tail = rest.partition(".")
            nested = dot and not tail.startswith(("scale.", "shift."))
            film[f"{stem}.blocks.{index}.block.{tail}" if nested else name] = value
            if "scale." in tail or "shift." in tail:
                continue
            value = torch.zeros_like(value)
        weights[name] = value.clone()
    save_file(weights, directory / "model.safetensors")
    torch.save(film, directory / "vision_backbone--7_checkpoint.pt")
    return policy


@pytest.mark.parametrize(("dim", "range_"), [(7, 1.0), (14, 2.0)])
def test_the_public_layout_loads(tmp_path, monkeypatch, dim, range_):
    """LIBERO's 7 dimensions are scaled by quantiles, ALOHA's 14 by minimum and maximum; the setting decides first."""
    policy = public_l1(tmp_path, dim)
    monkeypatch.setattr("embodrl.models.openvla_oft.build.OWN_SECTION", "that of a public file is missing")
    settings = {**EVERYTHING, "model_path": str(tmp_path), "action_dim": dim}
    again, report = load(**settings)
    assert report.ok and "normalization" in report.conventions
    assert all(torch.equal(v, again.model.state_dict()[n]) for n, v in policy.model.state_dict().items())
    np.testing.assert_array_equal(again.stats.q99, [range_] * dim)
    np.testing.assert_array_equal(again.processor.proprio.stats.q99, [range_] * 32)
    assert load(**settings, normalization="min_max")[0].stats.q99[0] == 2.0
    on_meta, report = build_policy(tiny_config(FAMILY, **settings), device="meta", dtype=torch.float32, seed=0)
    assert report.ok and on_meta.device.type == "meta"


# Checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("action_head", "action_head=l1"),
        ("noisy_action_projector", "action_head=diffusion"),
        ("vision_backbone", "use_film=true"),
        ("proprio_projector", "use_proprio"),
    ],
)
def test_components_are_not_left_out(tmp_path, name, setting):
    """Such a policy would act, and act wrongly."""
    build(FAMILY).save_pretrained(tmp_path)
    (tmp_path / f"{name}--latest_checkpoint.pt").touch()
    with raises_code("oft-component-unused", CheckpointError, f"model.{setting}"):
        load(model_path=str(tmp_path))


def test_the_stop_token_is_remembered(tmp_path):
    build(FAMILY, keep_stop_token=False).save_pretrained(tmp_path)
    with raises_code("oft-settings", CheckpointError, "model.keep_stop_token=false"):
        load(warm_start=str(tmp_path))
    assert load(warm_start=str(tmp_path), keep_stop_token=False)[1].ok


def test_an_openvla_is_a_start(tmp_path):
    openvla = build("openvla")
    openvla.save_pretrained(tmp_path)
    policy, report = load(warm_start=str(tmp_path))
    assert report.ok
    weights = policy.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in openvla.model.state_dict().items())


def test_files_are_those_of_the_public_layout(tmp_path):
    build(FAMILY, use_proprio=True).save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "dataset_statistics.json",
        "model.safetensors",
        "preprocessor_config.json",
        "proprio_projector.safetensors",
        "tokenizer.json",
        "value_head.safetensors",
    ]
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "openvla"


def test_a_corrupt_projector_of_ours_is_refused(tmp_path):
    build(FAMILY, use_proprio=True).save_pretrained(tmp_path)
    save_file({"fc1.weight": torch.zeros(32, 32)}, tmp_path / "proprio_projector.safetensors")
    with raises_code("weights-mismatch", CheckpointError, "fc1.bias"):
        load(use_proprio=True, warm_start=str(tmp_path))
