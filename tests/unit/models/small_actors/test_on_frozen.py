"""A small actor on a frozen policy: what it does with its draws, what it reads, what is saved, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import raises_code
from tiny_families import build, generator, observation, tiny_config
from torch.nn import functional as F

from embodrl.config.schema import ModelConfig, SmallActorConfig
from embodrl.errors import CheckpointError, EmbodrlError, PolicyFileError
from embodrl.models.base import VLAPolicy
from embodrl.models.flow.flow_policy import FlowPolicy
from embodrl.models.registry import build_policy
from embodrl.models.small_actors.on_frozen import ACTOR_CONFIG, NoisePolicy, OnFrozenPolicy, ResidualPolicy
from embodrl.types import CHOSEN, SamplingParams

ACTOR = {"hidden_sizes": (8,), "max_state_dim": 8, "scale": 0.5}


def settings_of(family: str, directory: Path, **actor: object) -> ModelConfig:
    small = {"small_actor": {**ACTOR, **actor}} if actor else {}
    return tiny_config(family, model_path=str(directory), add_value_head=False, **small)


def load(config: ModelConfig) -> OnFrozenPolicy:
    policy = build_policy(config, device="cpu", dtype=torch.float32, seed=0)[0].eval()
    assert isinstance(policy, OnFrozenPolicy)
    return policy


def actions(policy: VLAPolicy, family: str) -> np.ndarray:
    return policy.predict_action_batch(observation(family), "eval", SamplingParams(), compute_values=False).actions


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("bases")
    for family in ("openvla", "pi0"):
        build(family, add_value_head=False).save_pretrained(directory / family)
    return {family: directory / family for family in ("openvla", "pi0")}


def test_a_residual_is_added_and_the_sum_is_an_action(bases: dict[str, Path]) -> None:
    policy = load(settings_of("openvla", bases["openvla"], kind="residual"))
    base = torch.tensor([[[0.1, -0.9, 0.0, 0.9, 0.5, -0.5, 1.0], [0.0] * 7]])
    features = torch.cat([torch.ones(1, policy.feature_dim - 14), base.flatten(1)], 1)
    u = torch.full((1, 2, 7), float(np.arctanh(0.4)))  # scale 0.5 makes 0.2 of it
    expected = torch.tensor([[[0.3, -0.7, 0.2, 1.0, 0.7, -0.3, 1.0], [0.2] * 7]])
    torch.testing.assert_close(policy.chosen(features, u), expected)
    drawn, logprobs = policy.sample_chunk(features, torch.zeros(1, 2, 7))
    mean = policy.model.distribution(features).mean
    torch.testing.assert_close(drawn, (base + 0.5 * torch.tanh(mean)).clamp(-1, 1))
    torch.testing.assert_close(logprobs, policy.model.distribution(features).log_prob(mean).sum((1, 2)))


def test_a_residual_reads_what_the_frozen_policy_makes_of_an_observation(bases: dict[str, Path]) -> None:
    policy, seen = load(settings_of("openvla", bases["openvla"], kind="residual")), observation("openvla")
    head = build("openvla", model_path=str(bases["openvla"]), value_head={"hidden_sizes": ()})
    inputs = policy.preprocess(seen)
    assert "images" not in inputs and isinstance(policy, ResidualPolicy)
    base = head.predict_action_batch(seen, "eval", SamplingParams())
    torch.testing.assert_close(inputs["base"], torch.from_numpy(base.actions))
    torch.testing.assert_close(inputs["seen"] @ head.value_head.out.weight.T, base.values)  # of a linear critic
    features = policy.features(inputs)
    torch.testing.assert_close(features[:, :32], F.layer_norm(inputs["seen"], (32,)))
    assert torch.equal(features[:, 32:40], inputs["state"]) and torch.equal(features[:, 40:], inputs["base"].flatten(1))
    assert np.abs(actions(policy, "openvla") - base.actions.clip(-1, 1)).max() < 0.02, "a new actor hardly changes it"


def test_noise_is_denoised_by_the_frozen_policy(bases: dict[str, Path]) -> None:
    policy, seen = load(settings_of("pi0", bases["pi0"], kind="dsrl")), observation("pi0")
    assert isinstance(policy, NoisePolicy) and policy.chunk_shape == (1, 32)
    output = policy.predict_action_batch(seen, "train", SamplingParams(), generator(), compute_values=False)
    w = output.forward_inputs[CHOSEN]
    assert w.shape == (3, 1, 32) and w.abs().max() <= 0.5 and w.std() > 0.1
    base = build("pi0", model_path=str(bases["pi0"]), add_value_head=False)
    assert isinstance(base, FlowPolicy)
    base._evaluation_noise = w[:1].expand(1, base.horizon, 32)
    alone = base.predict_action_batch(seen.select(np.array([0])), "eval", SamplingParams(), compute_values=False)
    np.testing.assert_allclose(output.actions[:1], alone.actions, rtol=1e-4, atol=1e-5)
    kept = policy.preprocess(seen)
    assert kept.keys() == {"seen", "state"}
    assert all(torch.equal(kept[name], output.forward_inputs[name]) for name in kept)


@pytest.mark.parametrize(("family", "kind"), [("openvla", "residual"), ("pi0", "dsrl")])
def test_a_saved_policy_acts_as_both(family: str, kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    policy = load(settings_of(family, bases[family], kind=kind))
    assert {name.partition(".")[0] for name, p in policy.named_parameters() if p.requires_grad} == {"model"}
    with torch.no_grad():
        policy.model.policy[-1].bias.add_(0.3)
    policy.save_pretrained(tmp_path / "saved")
    again = load(settings_of(family, tmp_path / "saved"))  # the directory says it
    assert again.settings == SmallActorConfig.model_validate({"kind": kind, **ACTOR})
    np.testing.assert_array_equal(actions(again, family), actions(policy, family))
    assert not np.array_equal(actions(policy, family), actions(build(family, model_path=str(bases[family])), family))
    with raises_code("small-actor-differs", CheckpointError):
        load(settings_of(family, tmp_path / "saved", kind=kind, scale=0.3))
    path = tmp_path / "saved" / ACTOR_CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), "scale": -1.0}))
    with pytest.raises(PolicyFileError):
        load(settings_of(family, tmp_path / "saved"))


def test_it_has_neither_values_nor_ratios(bases: dict[str, Path]) -> None:
    policy = load(settings_of("pi0", bases["pi0"], kind="dsrl"))
    for call in (
        lambda: policy.predict_values(observation("pi0")),
        lambda: policy.evaluate_actions({}, SamplingParams()),
        lambda: policy.sft_loss({}),
    ):
        with raises_code("small-actor-loss", EmbodrlError):
            call()
