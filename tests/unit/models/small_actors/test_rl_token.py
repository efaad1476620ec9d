"""RLT: the token and its files, the actor beside the frozen policy, the weights of its loss, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import raises_code
from tiny_families import build, generator, observation, tiny_config
from torch.nn import functional as F

from embodrl.algorithms.rlt import ramp, rlt
from embodrl.config.schema import Config, ModelConfig
from embodrl.data.batch import Batch
from embodrl.errors import CheckpointError, FileDamagedError, PolicyFileError
from embodrl.hybrid_engines.base import OptimizerStep
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.learners.rlt import RltUpdate
from embodrl.models.common.value_head import keep_prefix
from embodrl.models.registry import build_policy
from embodrl.models.small_actors.on_frozen import ReferencePolicy
from embodrl.models.small_actors.rl_token import RLToken, RLTokenSpec
from embodrl.runs.model_token import TokenTraining, fit_token, held_out, judge
from embodrl.storage.atomic import atomic_directory
from embodrl.storage.integrity import write_checksums
from embodrl.types import SamplingParams

FAMILIES = ("openvla", "pi0", "smolvla", "pi0_fast", "gr00t")
ACTOR = {"hidden_sizes": (8,), "max_state_dim": 8, "initial_std": 0.1}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Policies with a token of random weights."""
    directory = tmp_path_factory.mktemp("bases")
    for family in ("openvla", "pi0"):
        build(family, add_value_head=False).save_pretrained(directory / family)
        torch.manual_seed(0)
        RLToken(RLTokenSpec(32, 8, 16)).save(directory / family)
    return {family: directory / family for family in ("openvla", "pi0")}


def settings_of(family: str, directory: Path, **actor: object) -> ModelConfig:
    small = {"small_actor": {**ACTOR, **actor}} if actor else {}
    return tiny_config(family, model_path=str(directory), add_value_head=False, **small)


def load(config: ModelConfig) -> ReferencePolicy:
    policy = build_policy(config, device="cpu", dtype=torch.float32, seed=0)[0].eval()
    assert isinstance(policy, ReferencePolicy)
    return policy


def test_a_token_reads_what_is_there_and_not_padding() -> None:
    torch.manual_seed(0)
    token = RLToken(RLTokenSpec(width=6, places=5, size=8, layers=1, heads=2)).eval()
    hidden = torch.randn(2, 5, 6)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    z = token.encode(hidden, mask)
    assert z.shape == (2, 8)
    other = hidden.clone()
    other[0, 3:] = 9.0
    torch.testing.assert_close(token.encode(other, mask), z)
    torch.testing.assert_close(token.encode(hidden[:1, :3], None), z[:1])
    assert not torch.allclose(token.encode(hidden * torch.arange(1.0, 7.0), mask), z)


def test_the_reconstruction_is_autoregressive_from_the_token() -> None:
    torch.manual_seed(0)
    token = RLToken(RLTokenSpec(width=6, places=4, size=8, layers=1, heads=2)).eval()
    hidden, kept = torch.randn(3, 4, 6), torch.ones(3, 4, dtype=torch.bool)
    # Without a decoder's output the error is the variance of the states at each place, which is 1 of all they are of.
    token.standardize(hidden, kept)
    torch.nn.init.zeros_(token.out.weight)
    torch.nn.init.zeros_(token.out.bias)
    assert token.reconstruction_loss(hidden, None, kept).item() == pytest.approx(1.0, abs=1e-5)
    torch.nn.init.normal_(token.out.weight)
    # A state that comes later is no help: the error of the first two does not see the last two.
    mask = torch.tensor([[1, 1, 0, 0]]).expand(3, -1)
    other = hidden.clone()
    other[:, 2:] = torch.randn(3, 2, 6)
    z = token.encode(hidden, mask)
    left, right = (token.decoding_loss(z, states, mask, kept) for states in (hidden, other))
    torch.testing.assert_close(left, right)
    seen = token.decoding_loss(z, hidden, mask, kept)
    assert not torch.allclose(token.decoding_loss(z, hidden, mask, torch.zeros_like(kept)), seen), "dropout hides"
    assert not torch.allclose(token.decoding_loss(z.roll(1, 0), hidden, mask, kept), seen)
    # The targets have no gradient, the encoder has.
    states = hidden.clone().requires_grad_()
    token.reconstruction_loss(states, None, kept).backward()
    assert states.grad is None and token.query.grad is not None and float(token.query.grad.abs().sum()) > 0


def test_training_makes_a_token_that_tells_frames_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    places = torch.randn(64, 1, 8, generator=generator)
    hidden = (places + 0.1 * torch.randn(64, 4, 8, generator=generator)) + 9 * torch.arange(4)[:, None]
    mask, settings = torch.ones(64, 4, dtype=torch.bool), TokenTraining(size=16, layers=1, steps=60, lr=1e-2)
    settings = dataclasses.replace(settings, context_dropout=0.9)
    token = fit_token(hidden, mask, torch.arange(64), settings, "off")
    own, other = judge(token, hidden, mask, torch.arange(64), settings)
    assert own < 0.3 and other > own + 0.5
    again = fit_token(hidden, mask, torch.arange(64), settings, "off")
    assert all(tensor.equal(again.state_dict()[name]) for name, tensor in token.state_dict().items())


def test_episodes_are_held_out_as_a_whole() -> None:
    episode = np.repeat(np.arange(10), 3)
    apart = held_out(episode, TokenTraining(held_out=0.2))
    assert apart.sum() == 6 and all(len(set(apart[episode == number])) == 1 for number in range(10))


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_states_of_every_family(family: str) -> None:
    """Their mean is what a critic reads that has them as its input."""
    own = "prefix" if family in ("pi0", "smolvla", "gr00t") else "prompt_mean"
    policy = build(family, value_head={"input": own, "hidden_sizes": ()})
    with keep_prefix() as kept:
        output = policy.predict_action_batch(observation(family), "eval", SamplingParams(), compute_values=True)
    hidden, mask = kept[-1]
    assert (
        hidden.ndim == 3
        and len(hidden) == 3
        and hidden.shape[1] > 4
        and (mask is None or mask.shape == hidden.shape[:2])
    )
    weight = torch.ones(hidden.shape[:2]) if mask is None else mask.float()
    mean = (hidden.float() * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)
    if family != "gr00t":  # its critic reads the state, too
        torch.testing.assert_close(mean @ policy.value_head.out.weight.T, output.values)
    assert not kept[1:] or family == "openvla_oft"


@pytest.mark.parametrize("family", ["openvla", "pi0"])
def test_a_new_actor_does_what_the_frozen_policy_does(family: str, bases: dict[str, Path], tmp_path: Path) -> None:
    policy, seen = load(settings_of(family, bases[family], kind="rlt")), observation(family)
    inputs = policy.preprocess(seen)
    assert inputs.keys() == {"seen", "state", "base"} and inputs["seen"].shape == (3, 16)
    features = policy.features(inputs)
    torch.testing.assert_close(features[:, :16], F.layer_norm(inputs["seen"], (16,)))
    base = build(family, model_path=str(bases[family]), add_value_head=False)
    expected = base.predict_action_batch(seen, "eval", SamplingParams(), compute_values=False).actions
    output = policy.predict_action_batch(seen, "eval", SamplingParams(), compute_values=False)
    np.testing.assert_allclose(output.actions, expected.clip(-1, 1), atol=0.05)
    drawn = policy.predict_action_batch(seen, "train", SamplingParams(), generator(), compute_values=False).actions
    assert 0.03 < np.abs(drawn - output.actions).mean() < 0.12  # of a deviation of 0.1 the mean is 0.08
    dropped = policy.without_reference(features, torch.tensor([True, False, True]))
    numbers = inputs["base"][0].numel()
    assert not dropped[[0, 2], -numbers:].any() and dropped[1].equal(features[1])
    assert dropped[:, :-numbers].equal(features[:, :-numbers])
    assert {name.partition(".")[0] for name, p in policy.named_parameters() if p.requires_grad} == {"model"}
    with torch.no_grad():
        policy.model.policy[-1].bias.add_(0.2)
    policy.save_pretrained(tmp_path / "saved")
    again = load(settings_of(family, tmp_path / "saved"))  # the directory says it
    changed = policy.predict_action_batch(seen, "eval", SamplingParams(), compute_values=False).actions
    saved = again.predict_action_batch(seen, "eval", SamplingParams(), compute_values=False).actions
    np.testing.assert_array_equal(saved, changed)
    assert not np.array_equal(changed, output.actions)


def test_a_policy_without_a_token_is_refused(tmp_path: Path) -> None:
    build("pi0", add_value_head=False).save_pretrained(tmp_path / "base")
    with raises_code("rl-token-missing", CheckpointError):
        load(settings_of("pi0", tmp_path / "base", kind="rlt"))
    RLToken(RLTokenSpec(32, 8, 16)).save(tmp_path / "base")
    (tmp_path / "base" / "rl_token.json").write_text('{"width": 32, "places": 8, "size": 24, "layers": 2, "heads": 4}')
    with raises_code("rl-token-weights", CheckpointError):
        load(settings_of("pi0", tmp_path / "base", kind="rlt"))
    # Sizes beyond any memory are compared with the weights before anything is built.
    (tmp_path / "base" / "rl_token.json").write_text(
        '{"width": 16384, "places": 16384, "size": 16384, "layers": 64, "heads": 4}'
    )
    with raises_code("rl-token-weights", CheckpointError):
        RLToken.load(tmp_path / "base")
    (tmp_path / "base" / "rl_token.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(PolicyFileError):
        RLToken.load(tmp_path / "base")


def test_the_loss_and_its_weights_agree_with_hand_computed_values() -> None:
    q = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    distance = torch.tensor([0.5, 2.0])
    torch.testing.assert_close(rlt(q, distance, 2.0, 3.0, minimum=True), torch.tensor([-0.5, 8.0]))
    torch.testing.assert_close(rlt(q, distance, 2.0, 3.0, minimum=False), torch.tensor([-2.5, 5.0]))
    assert [ramp(7.0, 2.8, update, 100) for update in (-5, 0, 50, 100, 900)] == [7.0, 7.0, 4.9, 2.8, 2.8]


def test_the_actor_descends_the_loss_of_rlt(bases: dict[str, Path]) -> None:
    """Gradients of one update, against the formula written out; a demonstration's reference is the expert's action."""
    policy = load(settings_of("openvla", bases["openvla"], kind="rlt"))
    sections = {"algorithm": {"loss_type": "rlt", "adv_type": "none"}, "actor": {"precision": "fp32"}}
    config = Config.model_validate(sections)
    settings = config.algorithm.off_policy.model_copy(update={"critic_hidden_sizes": (8,), "critic_warm_up": 10})
    algorithm = config.algorithm.model_copy(
        update={
            "off_policy": settings,
            "rlt": config.algorithm.rlt.model_copy(update={"q_weight": 0.5, "reference_dropout": 0.5}),
        }
    )
    config = config.model_copy(update={"algorithm": algorithm})
    engine = NativeTrainEngine(policy, EngineOptions.of(config), "cpu")
    update = RltUpdate(engine, config)
    inputs = policy.preprocess(observation("openvla"))
    labels, label_mask = torch.full((3, 2, 7), 0.3), torch.tensor([[False] * 2, [True, False], [True] * 2])
    nothing = torch.zeros(3)
    columns = {"actions": labels, "returns": nothing, "discount": nothing, "is_demo": label_mask.any(1)}
    batch = Batch({"inputs": inputs, "next_inputs": inputs, "labels": labels, "label_mask": label_mask, **columns})
    taken: dict[str, torch.Tensor] = {}

    def step(loss: torch.Tensor, parameters: list[torch.nn.Parameter]) -> OptimizerStep:
        taken.update({name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None})
        return OptimizerStep(False, 0.0)

    engine.optimizer_step = step  # type: ignore[method-assign]
    # Halfway: q_weight from 0.5 to 1, bc_weight from 1 to 0.1.
    metrics = update.update_actor(batch, 1010, torch.Generator().manual_seed(1))
    dropped = torch.rand(3, generator=torch.Generator().manual_seed(1)) < 0.5
    assert dropped.any() and not dropped.all()
    policy.model.zero_grad()
    features = policy.features(inputs)
    seen = features.clone()
    seen[dropped, -14:] = 0
    mean = policy.model.distribution(seen).mean
    reference = torch.where(label_mask[..., None], labels, inputs["base"])
    q = update.critic(features, mean.clamp(-1, 1)).min(0).values
    expected = (0.55 * (mean - reference).square().sum((1, 2)) - 0.75 * q).mean()
    expected.backward()
    assert metrics["policy_loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert metrics["q_weight"] == 0.75 and metrics["bc_weight"] == pytest.approx(0.55)
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(taken[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["rl_token.json", "rl_token.safetensors"])
def test_a_flipped_byte_in_a_token_is_refused_by_name(tmp_path: Path, name: str) -> None:
    whole = tmp_path / "whole"
    with atomic_directory(whole) as staging:
        RLToken(RLTokenSpec(32, 8, 16)).save(staging)
        write_checksums(staging)
    RLToken.load(whole)
    content = (whole / name).read_bytes()
    for at in {0, len(content) // 3, len(content) // 2, len(content) - 3}:
        (whole / name).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with raises_code("file-damaged", FileDamagedError) as raised:
            RLToken.load(whole)
        assert name in raised.value.message
