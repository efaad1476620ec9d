"""Low-rank adapters: they start without effect, take effect everywhere, and are merged in what is saved."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from expect import raises_code
from safetensors.torch import load_file
from tiny_families import NETWORKS, STATE_DIM, TOKEN_FAMILIES, build, generator, observation, tiny_config

from embodrl.errors import EmbodrlError, MissingDependencyError
from embodrl.models.base import VLAPolicy
from embodrl.models.common import lora, merging
from embodrl.models.openvla import decode
from embodrl.models.registry import build_policy
from embodrl.types import Observation, SamplingParams

pytest.importorskip("peft")
SAMPLING = SamplingParams(0.8)


def adapted(family: str, stirred: bool = True, **changes: object) -> VLAPolicy:
    """Return a policy whose adapters do something."""
    policy = build(family, trainable="lora", **{"lora": {"rank": 2}, **changes})
    if stirred:
        noise = generator(5)
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0.0, 0.2, generator=noise)
    return policy


def seen(family: str) -> Observation:
    observed = observation(family)
    if observed.state.shape[1] == 0:
        observed.state = np.random.default_rng(0).uniform(-1, 1, (3, STATE_DIM)).astype(np.float32)
    return observed


def actions(policy: VLAPolicy, family: str) -> torch.Tensor:
    return torch.from_numpy(policy.predict_action_batch(seen(family), "train", SAMPLING, generator()).actions)


def test_a_layer_computes_what_the_paper_says():
    policy = adapted("openvla", lora={"rank": 4, "alpha": 6})
    layer = policy.model.language_model.model.layers[0].mlp.up_proj
    x = torch.randn(5, 32, generator=generator())
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert down.shape == (4, 32) and up.shape == (48, 4)
    want = x @ layer.base_layer.weight.T + 6 / 4 * (x @ down.T) @ up.T
    torch.testing.assert_close(layer(x), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(x @ merging.linear_weight(layer).T, want, rtol=0, atol=1e-5)
    torch.testing.assert_close(x @ merging.linear_weight(layer, slice(3, 9)).T, want[:, 3:9], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rank", "alpha", "scale"), [(4, None, 1.0), (64, None, 0.25), (8, 24, 3.0)])
def test_scale(rank, alpha, scale):
    policy = adapted("openvla", lora={"rank": rank, "alpha": alpha, "target_modules": ("fc3",)})
    assert policy.model.projector.fc3.scaling["default"] == scale


@pytest.mark.parametrize("family", NETWORKS)
def test_new_adapters_change_nothing(family):
    plain, policy = build(family), adapted(family, stirred=False)
    # Plain layers that read the same share one product, adapted ones do not: rounding differs.
    torch.testing.assert_close(actions(plain, family), actions(policy, family), rtol=0, atol=1e-5)
    again = adapted(family, stirred=False)
    weights = again.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in policy.state_dict().items())
    other = build(family, seed=4, trainable="lora", lora={"rank": 2}).state_dict()
    drawn = [name for name in weights if "lora_A" in name]
    assert drawn and not any(torch.equal(weights[name], other[name]) for name in drawn)
    assert all(float(weights[name].std()) == pytest.approx(0.5, rel=0.6) for name in drawn)  # 1 / rank


@pytest.mark.parametrize("family", NETWORKS)
def test_training_reproduces_the_rollout(family):
    policy = adapted(family)
    assert (actions(policy, family) - actions(build(family), family)).abs().max() > 1e-4
    output = policy.predict_action_batch(seen(family), "train", SAMPLING, generator())
    again = policy.evaluate_actions(output.forward_inputs, SAMPLING)
    torch.testing.assert_close(again.logprobs, output.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(again.values, output.values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", NETWORKS)
def test_every_adapter_takes_effect(family):
    """Each one gets a gradient, so none is on a layer that is passed over."""
    changes = {"use_proprio": True} if family == "openvla_oft" else {}
    policy = adapted(family, **changes)
    output = policy.predict_action_batch(seen(family), "train", SAMPLING, generator())
    result = policy.evaluate_actions(output.forward_inputs, SAMPLING)
    (result.logprobs.sum() + result.values.sum()).backward()
    dead = [
        name
        for name, parameter in policy.named_parameters()
        if ".lora_" in name and (parameter.grad is None or not bool(parameter.grad.abs().max() > 0))
    ]
    assert not dead


@pytest.mark.parametrize("fuse_below", [0, decode.FUSE_BELOW_HIDDEN])
@pytest.mark.parametrize("autocast", [False, True])
def test_decoding_token_by_token(monkeypatch, fuse_below, autocast):
    """Both ways in which the decoder takes the weights of adapted layers: merged, and as two thin products."""
    monkeypatch.setattr(decode, "FUSE_BELOW_HIDDEN", fuse_below)
    policy = adapted("openvla")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = policy.predict_action_batch(seen("openvla"), "train", SAMPLING, generator())
        again = policy.evaluate_actions(output.forward_inputs, SAMPLING)
    assert (again.logprobs - output.logprobs).abs().max() < (0.1 if autocast else 1e-5)


@pytest.mark.parametrize("family", NETWORKS)
def test_saving_merges_and_leaves_the_policy_alone(family, tmp_path):
    policy = adapted(family)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    acted = actions(policy, family)
    policy.save_pretrained(tmp_path / "saved")
    after = policy.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in before.items())
    plain, report = build_policy(
        tiny_config(family, warm_start=str(tmp_path / "saved")), device="cpu", dtype=torch.float32, seed=77
    )
    assert report.ok and not report.initialized
    assert plain.state_dict().keys() == build(family).state_dict().keys()
    observed = seen(family)
    close = {"rtol": 0, "atol": 2e-5}
    inputs = policy.predict_action_batch(observed, "train", SAMPLING, generator()).forward_inputs
    found, wanted = (p.eval().evaluate_actions(inputs, SAMPLING) for p in (plain, policy))
    torch.testing.assert_close(found.logprobs, wanted.logprobs, **close)
    torch.testing.assert_close(found.values, wanted.values, **close)
    assert torch.equal(actions(policy, family), acted)


def test_merged_weights_are_the_sum(tmp_path):
    policy = adapted("openvla", lora={"rank": 2, "target_modules": ("q_proj",)})
    merged, plain = merging.merged_state_dict(policy.model), build("openvla").model.state_dict()
    assert merged.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(merged[name], value) == (not name.endswith("q_proj.weight")), name
    layer = policy.model.language_model.model.layers[1].self_attn.q_proj
    want = layer.base_layer.weight + layer.lora_B["default"].weight @ layer.lora_A["default"].weight  # 2 / 2
    torch.testing.assert_close(merged["language_model.model.layers.1.self_attn.q_proj.weight"], want.detach())


@pytest.mark.parametrize("family", NETWORKS)
def test_weights_are_merged_one_by_one_when_written(family, tmp_path):
    """All at once, in float32, they take twice the memory of a bf16 network."""
    policy = adapted(family)
    adapters = sum(name.endswith("lora_A.default.weight") for name, _ in policy.model.named_parameters())
    state = policy.public_state()
    assert adapters and sum(tensor.is_meta for tensor in state.values()) == adapters
    policy.save_pretrained(tmp_path / "policy")
    written = {}
    for path in (tmp_path / "policy").glob("model*.safetensors"):
        written |= load_file(path)
    assert written.keys() == state.keys()
    layers = {id(part): part for part in policy.model.modules() if merging.adapter_factors(part) is not None}
    merged = [merging.linear_weight(layer).detach() for layer in layers.values()]
    for name, tensor in state.items():
        if tensor.is_meta:
            assert any(torch.equal(written[name], one) for one in merged if one.shape == tensor.shape), name
        else:
            assert torch.equal(written[name], tensor), name


def test_precision_of_weights_and_adapters():
    """Adapters of bfloat16 weights are float32, and so are weights with them in what is saved; others stay."""
    config = tiny_config("openvla", trainable="lora", lora={"rank": 2})
    policy, _ = build_policy(config, device="cpu", dtype=torch.bfloat16, seed=3)
    assert {p.dtype for name, p in policy.named_parameters() if ".lora_" in name} == {torch.float32}
    merged = merging.merged_state_dict(policy.model)
    assert merged["language_model.model.layers.0.mlp.up_proj.weight"].dtype == torch.float32
    assert merged["language_model.model.embed_tokens.weight"].dtype == torch.bfloat16
    output = policy.predict_action_batch(seen("openvla"), "train", SAMPLING, generator())
    again = policy.evaluate_actions(output.forward_inputs, SAMPLING)
    assert (again.logprobs - output.logprobs).abs().max() < 0.1


@pytest.mark.parametrize("family", TOKEN_FAMILIES)
def test_targets(family):
    policy = build(family)
    names = lora.target_names(policy)
    assert "model.language_model.model.layers.0.self_attn.q_proj" in names and "model.projector.fc3" in names
    assert "model.vision_backbone.featurizer.blocks.0.attn.qkv" in names and "model.language_model.lm_head" in names
    assert not any(name.startswith("value_head") or "attn_pool" in name or "blocks.1" in name for name in names)
    assert lora.target_names(policy, ("fc3", "v_proj")) == [
        "model.projector.fc3",
        "model.language_model.model.layers.0.self_attn.v_proj",
        "model.language_model.model.layers.1.self_attn.v_proj",
    ]
    assert not any("vision" in name for name in lora.target_names(policy, freeze_vision=True))
    found = adapted(family, lora={"target_modules": ("proj",)})
    assert all(".attn.proj." in name for name, _ in found.named_parameters() if ".lora_" in name)


def test_unknown_targets_name_the_nearest():
    with raises_code("lora-target", EmbodrlError, "'q_prj'", "q_proj"):
        build("openvla", trainable="lora", lora={"target_modules": ("q_prj",)})
    with raises_code("lora-target", EmbodrlError, "'kv'"):  # of the pooling head, which never runs
        build("openvla", trainable="lora", lora={"target_modules": ("kv",)})


def test_without_peft(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with raises_code("missing-dependency", MissingDependencyError, "'embodrl[lora]'"):
        build("openvla", trainable="lora")


def test_training_moves_adapters_and_value_head_only():
    policy = adapted("openvla", stirred=False)
    start = {name: value.clone() for name, value in policy.state_dict().items()}
    batch = policy.sft_inputs(seen("openvla"), torch.zeros(3, 2, 7))
    optimizer = torch.optim.Adam([p for group in policy.trainable_groups().values() for p in group], 1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = policy.sft_loss(batch)[0]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    moved = {name for name, value in policy.state_dict().items() if not torch.equal(value, start[name])}
    assert moved and all(".lora_" in name for name in moved) and losses[-1] < 0.5 * losses[0]
    resumed = adapted("openvla", stirred=False)
    resumed.load_state_dict(policy.state_dict(), strict=True)
    assert torch.equal(actions(resumed, "openvla"), actions(policy, "openvla"))
