"""What every policy promises, whatever its family: rollout and training agree, rows are independent, files round-trip.

Float32 on the CPU, at a very small size, over every family of the registry.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import (
    EVERY_VARIANT,
    FAMILIES,
    FLOW_FAMILIES,
    POLICIES,
    TINY,
    VARIANTS,
    build,
    generator,
    observation,
    tiny_config,
    tiny_sizes,
    with_long,
)
from torch import Tensor

from embodrl.errors import CheckpointError
from embodrl.models.base import VLAPolicy
from embodrl.models.registry import build_policy
from embodrl.specs import MODELS
from embodrl.tools.model_tools import contract
from embodrl.tools.model_tools.contract import Subject, reached_groups, row_problems, stray_gradients
from embodrl.types import TOKEN_MASK, PolicyOutput, SamplingParams

SAMPLING = SamplingParams(0.7)
TRAINABLE = [(name, option) for name in POLICIES for option in MODELS.entry(name).trainable or ()]
VALUES = [
    (name, source, output)
    for name in FAMILIES
    for source in MODELS.entry(name).value_inputs or ()
    for output in ("chunk", "action")
]


def rollout(policy: VLAPolicy, family: str, seed: int = 0, mode: str = "train", batch: int = 3) -> PolicyOutput:
    return policy.predict_action_batch(observation(family, batch), mode, SAMPLING, generator(seed))


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def stir(policy: VLAPolicy) -> VLAPolicy:
    contract.stir(policy)
    return policy


def unused(directory: Path) -> VLAPolicy:
    raise AssertionError(directory)


# Rollout and training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "method"), with_long(EVERY_VARIANT))
def test_training_reproduces_the_rollout(family: str, method: str | None) -> None:
    policy = stir(build(family, method))
    output = rollout(policy, family)
    again = policy.evaluate_actions(output.forward_inputs, SAMPLING)
    assert again.entropy is not None and again.values is not None and output.values is not None
    close(again.logprobs, output.logprobs)
    close(again.values, output.values)
    assert output.actions.shape == (3, 2, 7)
    mask = output.forward_inputs.get(TOKEN_MASK)  # tokens of the whole chunk, or one for each number
    assert output.logprobs.shape == again.entropy.shape == ((3, 2, 7) if mask is None else (*mask.shape, 1))
    if mask is not None:
        assert not output.logprobs[~mask].any() and not again.entropy[~mask].any()
        assert output.logprobs[mask].max() < 0
    assert output.logprobs.dtype == output.values.dtype == again.logprobs.dtype == torch.float32
    assert output.actions.dtype == np.float32 and np.isfinite(output.actions).all()
    assert torch.isfinite(output.logprobs).all() and torch.isfinite(again.entropy).all()
    assert output.forward_inputs["images"].dtype == torch.uint8
    without = policy.evaluate_actions(output.forward_inputs, SAMPLING, compute_entropy=False, compute_values=False)
    assert without.entropy is None and without.values is None


@pytest.mark.parametrize(("family", "method"), with_long(EVERY_VARIANT))
def test_other_weights_give_other_log_probs(family: str, method: str | None) -> None:
    """What makes the comparison above one that can fail."""
    policy = build(family, method)
    output = rollout(policy, family)
    again = stir(policy).evaluate_actions(output.forward_inputs, SAMPLING)
    assert (again.logprobs - output.logprobs).abs().max() > 1e-3
    assert (again.values - output.values).abs().max() > 1e-4


@pytest.mark.parametrize(("family", "source", "output"), VALUES)
def test_values_of_every_source(family: str, source: str, output: str) -> None:
    policy = stir(build(family, value_head={"input": source, "output": output}))
    drawn = rollout(policy, family)
    assert drawn.values is not None and drawn.values.shape == (3, 1 if output == "chunk" else 2)
    close(policy.evaluate_actions(drawn.forward_inputs, SAMPLING).values, drawn.values)
    values = policy.predict_values(observation(family))
    assert values.shape == drawn.values.shape and not values.requires_grad
    if source != "suffix":  # which depends on the noisy actions; the others on the observation alone
        close(values, drawn.values)


@pytest.mark.parametrize("family", POLICIES)
def test_a_detached_value_trains_its_head_only(family: str) -> None:
    policy = stir(build(family, value_head={"detach": True}))
    output = rollout(policy, family)
    policy.evaluate_actions(output.forward_inputs, SAMPLING).values.sum().backward()
    reached = {name for name, group in policy.trainable_groups().items() if any(has_gradient(p) for p in group)}
    assert reached == {"value_head"}


# Rows ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "method"), with_long(EVERY_VARIANT))
def test_rows_do_not_depend_on_their_company(family: str, method: str | None) -> None:
    """Neither the other rows nor their longer or shorter prompts change a row."""
    subject = Subject(stir(build(family, method)), observation(family), SAMPLING, load=unused)
    assert list(row_problems(subject)) == []


def test_an_l1_head_keeps_the_contract_of_what_acts_alone(tmp_path: Path) -> None:
    """It has no log-probs to compare; rows, repetition, shapes and files are as for the others."""
    policy = stir(build("openvla_oft", action_head="l1", add_value_head=False))

    def act(one: VLAPolicy, rows: list[int]) -> np.ndarray:
        seen = observation("openvla_oft").select(np.array(rows))
        return one.predict_action_batch(seen, "eval", SAMPLING, compute_values=False).actions

    together = act(policy, [0, 1, 2])
    assert together.shape == (3, 2, 7) and together.dtype == np.float32 and np.isfinite(together).all()
    assert np.abs(together[0] - together[1]).max() > 1e-3  # it does see its row
    np.testing.assert_array_equal(act(policy, [0, 1, 2]), together)
    for row in range(3):
        np.testing.assert_allclose(act(policy, [row]), together[row : row + 1], rtol=0, atol=1e-5)
    policy.save_pretrained(tmp_path / "saved")
    again = build("openvla_oft", action_head="l1", add_value_head=False, model_path=str(tmp_path / "saved"))
    np.testing.assert_allclose(act(again, [0, 1, 2]), together, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "method"), with_long(VARIANTS))
def test_padding_of_the_prompt(family: str, method: str | None) -> None:
    """The same weights with prompts padded to a greater length."""
    policy = stir(build(family, method))
    longer = {part: {**sizes, "max_prompt_tokens": 80} for part, sizes in tiny_sizes(family).items()}
    padded = build(family, method, **longer)
    padded.load_state_dict(policy.state_dict())
    a, b = rollout(policy, family), rollout(padded, family)
    assert a.forward_inputs.keys() == b.forward_inputs.keys()
    assert any(x.shape != b.forward_inputs[name].shape for name, x in a.forward_inputs.items())
    difference = (policy.predict_values(observation(family)) - padded.predict_values(observation(family))).abs().max()
    assert difference < 1e-5
    np.testing.assert_allclose(a.actions, b.actions, rtol=0, atol=1e-5)
    close(a.logprobs, b.logprobs)


@pytest.mark.parametrize(("family", "method"), with_long(EVERY_VARIANT))
def test_forward_inputs_survive_splitting(family: str, method: str | None) -> None:
    policy = stir(build(family, method))
    output = rollout(policy, family, batch=4)
    assert all(len(value) == 4 for value in output.forward_inputs.values())
    order = [2, 0, 3, 1]
    rows = [{name: value[i : i + 1] for name, value in output.forward_inputs.items()} for i in order]
    joined = {name: torch.cat([row[name] for row in rows]) for name in output.forward_inputs}
    close(policy.evaluate_actions(joined, SAMPLING).logprobs, output.logprobs[order])
    halves = [{name: value[half] for name, value in joined.items()} for half in (slice(0, 1), slice(1, 4))]
    parts = [policy.evaluate_actions(half, SAMPLING) for half in halves]
    close(torch.cat([part.logprobs for part in parts]), output.logprobs[order])
    close(torch.cat([part.values for part in parts]), output.values[order])


@pytest.mark.parametrize(("family", "method"), with_long(EVERY_VARIANT))
def test_seeds_decide(family: str, method: str | None) -> None:
    policy = build(family, method)
    first, again, other = rollout(policy, family, 1), rollout(policy, family, 1), rollout(policy, family, 2)
    assert np.array_equal(first.actions, again.actions) and torch.equal(first.logprobs, again.logprobs)
    assert not np.array_equal(first.actions, other.actions)
    greedy = [rollout(policy, family, seed, "eval").actions for seed in (1, 2)]
    assert np.array_equal(*greedy)
    same, different = build(family, method), build(family, method, seed=4)
    weights, others = policy.state_dict(), different.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in same.state_dict().items())
    assert any(not torch.equal(value, others[name]) for name, value in weights.items())


@pytest.mark.parametrize("family", POLICIES)
def test_picture_instruction_and_state_matter(family: str) -> None:
    policy = stir(build(family))
    seen = observation(family)
    values = policy.predict_values(seen)
    for name in ("images", "instruction", "state"):
        if name == "state" and seen.state.shape[1] == 0:
            continue
        if name == "instruction" and family not in FAMILIES:
            continue
        changed = observation(family)
        value = getattr(changed, name)[::-1]
        setattr(changed, name, value if name == "instruction" else value.copy())
        # Rows 0 and 2 have got what belonged to the other one.
        found = policy.predict_action_batch(changed, "train", SAMPLING, generator())
        base = policy.predict_action_batch(seen, "train", SAMPLING, generator())
        moved = (policy.predict_values(changed) - values)[0].abs().max() > 1e-6
        assert moved or np.abs(found.actions - base.actions)[0].max() > 1e-6, name


# Gradients -----------------------------------------------------------------------------------------------------------


def has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and bool(parameter.grad.abs().max() > 0)


def check_gradients(policy: VLAPolicy) -> set[str]:
    """Check that gradients are finite and only where they may be; return the groups that got one."""
    assert list(stray_gradients(policy)) == []
    return reached_groups(policy)


@pytest.mark.parametrize(("family", "option"), TRAINABLE)
def test_gradients_reach_only_what_trains(family: str, option: str) -> None:
    if option == "lora":
        pytest.importorskip("peft")
    policy = build(family, trainable=option, lora={"rank": 2})
    output = rollout(policy, family)
    result = policy.evaluate_actions(output.forward_inputs, SAMPLING)
    (result.logprobs.sum() + result.entropy.sum() + result.values.sum()).backward()
    reached = check_gradients(policy)
    assert "value_head" in reached and len(reached) > 1
    assert reached == set(policy.trainable_groups())
    if option in ("all", "lora"):
        assert reached == set(policy.parts())
    if option == "action_expert":
        assert reached == {"action_expert", "value_head"}
    if option == "head":
        head = {id(p) for p in policy.head_parameters()}
        trained = {id(p) for name, g in policy.trainable_groups().items() if name != "value_head" for p in g}
        assert head == trained and all(has_gradient(p) for p in policy.head_parameters())


@pytest.mark.parametrize(("family", "option"), TRAINABLE)
def test_imitation_reaches_only_what_trains(family: str, option: str) -> None:
    if option == "lora":
        pytest.importorskip("peft")
    policy = build(family, trainable=option, lora={"rank": 2})
    actions = torch.rand(3, policy.action_horizon, 7, generator=generator()) * 2 - 1
    loss, scalars = policy.sft_loss(policy.sft_inputs(observation(family), actions))
    loss.backward()
    reached = check_gradients(policy)
    assert reached and "value_head" not in reached
    assert loss.ndim == 0 and all(value.ndim == 0 and bool(value.isfinite()) for value in scalars.values())


@pytest.mark.parametrize("family", FLOW_FAMILIES)
def test_learned_noise_gets_gradients(family: str) -> None:
    policy = build(family, "flow_noise")
    output = rollout(policy, family)
    policy.evaluate_actions(output.forward_inputs, SAMPLING).logprobs.sum().backward()
    assert "noise_head" in check_gradients(policy)


@pytest.mark.parametrize("family", POLICIES)
def test_masked_actions_do_not_count(family: str) -> None:
    policy = build(family)
    torch.manual_seed(0)
    actions = torch.rand(2, policy.action_horizon, 7, generator=generator()) * 2 - 1
    batch = policy.sft_inputs(observation(family, 2), actions)
    mask = torch.tensor([[True] * policy.action_horizon, [False] * policy.action_horizon])
    first = {name: value[:1] for name, value in batch.items()}
    close(policy.sft_loss({**batch, "action_mask": mask})[0], policy.sft_loss(first)[0])


@pytest.mark.parametrize("family", POLICIES)
def test_gradient_checkpointing_changes_nothing(family: str) -> None:
    policy = build(family)
    torch.manual_seed(0)
    actions = torch.rand(2, policy.action_horizon, 7, generator=generator()) * 2 - 1
    batch = policy.sft_inputs(observation(family, 2), actions)

    def gradients() -> dict[str, Tensor]:
        policy.zero_grad()
        policy.sft_loss(batch)[0].backward()
        return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}

    plain = gradients()
    policy.enable_gradient_checkpointing()
    again = gradients()
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-4, atol=1e-6)


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["warm_start", "model_path"])
@pytest.mark.parametrize(("family", "method"), with_long(EVERY_VARIANT))
def test_save_and_load_bit_exactly(family: str, method: str | None, source: str, tmp_path: Path) -> None:
    policy = stir(build(family, method))
    policy.save_pretrained(tmp_path / "saved")
    config = tiny_config(family, method, **{source: str(tmp_path / "saved")})
    again, report = build_policy(config, device="cpu", dtype=torch.float32, seed=99)
    assert report.ok and not report.initialized
    before, after = policy.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert any(name.startswith("value_head.") for name in before)
    assert any(name.startswith("noise_head.") for name in before) == (method == "flow_noise")
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    outputs = [rollout(p.eval(), family) for p in (policy, again)]
    assert np.array_equal(outputs[0].actions, outputs[1].actions)
    assert torch.equal(outputs[0].logprobs, outputs[1].logprobs)
    assert torch.equal(outputs[0].values, outputs[1].values)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


@pytest.mark.parametrize("damage", ["missing", "unexpected", "other shape"])
@pytest.mark.parametrize("family", POLICIES)
def test_an_incomplete_checkpoint_is_refused_by_name(family: str, damage: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    [path] = tmp_path.rglob("model*.safetensors")
    tensors = load_file(path)
    plain = [name for name, value in tensors.items() if value.ndim == 2 and "embed" not in name and "head" not in name]
    name = sorted(plain)[len(plain) // 2]
    if damage == "missing":
        del tensors[name]
    elif damage == "unexpected":
        name = "some.surplus.weight"
        tensors[name] = torch.zeros(2)
    else:
        tensors[name] = tensors[name][:, 1:].contiguous()
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as refused:
        build_policy(tiny_config(family, warm_start=str(tmp_path)), device="cpu", dtype=torch.float32, seed=0)
    assert name.rpartition(".")[0].removeprefix("model.") in refused.value.message and refused.value.hint
    assert {"missing": "missing", "unexpected": "unexpected", "other shape": "instead of"}[damage] in str(refused.value)


# Distributions -------------------------------------------------------------------------------------------------------

CHI_SQUARE_7_DF = 24.3  # its 99.9 % quantile


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in FLOW_FAMILIES])
def test_sampled_tokens_have_the_frequencies_of_their_probabilities(family: str) -> None:
    short = {"pi0_fast": {**TINY["pi0_fast"], "max_action_tokens": 1}}  # the first token alone
    policy = stir(build(family, **short if family in short else {}))
    seen = observation(family, 1).select(np.zeros(1000, np.int64))
    sampling, random = SamplingParams(1.3, top_k=8), generator(5)
    outputs = [policy.predict_action_batch(seen, "train", sampling, random, compute_values=False) for _ in range(2)]
    # The first token: what comes later may depend on it.
    tokens = torch.cat([output.forward_inputs["action_tokens"].flatten(1)[:, 0] for output in outputs])
    logprobs = torch.cat([output.logprobs[:, 0, 0] for output in outputs])
    found, counts = tokens.unique(return_counts=True)
    assert len(found) == 8
    probability = torch.stack([logprobs[tokens == token].double().exp().mean() for token in found])
    assert probability.sum().item() == pytest.approx(1.0, abs=1e-5)
    expected = probability * len(tokens)
    assert float(((counts - expected).square() / expected).sum()) < CHI_SQUARE_7_DF


@pytest.mark.parametrize("family", FLOW_FAMILIES)
def test_the_stochastic_step_has_the_mean_and_variance_of_the_formula(family: str) -> None:
    """x - [v + sigma^2 / (2 t) (x + (1 - t) v)] / K, deviation sigma / sqrt(K), with sigma = eta sqrt(t / (1 - t))."""
    policy = stir(build(family, "flow_sde"))
    rows, steps, eta = 600, 3, policy.flow.noise_level
    output = policy.predict_action_batch(
        observation(family, 1).select(np.zeros(rows, np.int64)), "train", SAMPLING, generator(5), compute_values=False
    )
    inputs = output.forward_inputs
    x, step = inputs["flow_x"], inputs["flow_step"]
    t = 1.0 - step.double() / steps
    left = torch.where(step == 0, 1.0 / steps, 1.0 - t)
    with torch.no_grad():
        v, _ = policy.velocity(policy.encode(inputs))(x, t.float())
    t, sigma = t[:, None, None], (eta * (t / left).sqrt())[:, None, None]
    v, x = v.double(), x.double()
    mean = x - (v + sigma.square() / (2 * t) * (x + (1 - t) * v)) / steps
    residual = (inputs["flow_next"] - mean[:, :2, :7]) / (sigma / steps**0.5)
    count = residual.numel()
    assert abs(float(residual.mean())) < 4 / count**0.5
    assert abs(float(residual.square().mean()) - 1.0) < 4 * (2 / count) ** 0.5
    assert torch.bincount(step, minlength=steps).min() > rows / steps * 0.7


@pytest.mark.parametrize("family", POLICIES)
def test_the_interface_is_that_of_every_policy(family: str) -> None:
    for name, method in inspect.getmembers(VLAPolicy, inspect.isfunction):
        if name.startswith("_") or name in vars(torch.nn.Module):
            continue
        wanted = inspect.signature(method).parameters
        found = inspect.signature(getattr(type(build(family)), name)).parameters
        assert list(found) == list(wanted), name
