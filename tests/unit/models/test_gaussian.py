"""The small Gaussian policy: its distribution against torch's, its inputs, and its files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import raises_code
from safetensors.torch import load_file
from tiny_families import build, generator, observation, tiny_config
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from embodrl.data.statistics import RobotStatistics
from embodrl.errors import CheckpointError, PolicyFileError
from embodrl.models.base import OffPolicyActor
from embodrl.models.gaussian.modeling import Categorical, TanhGaussian
from embodrl.models.gaussian.policy import build_gaussian, read_spec
from embodrl.types import SamplingParams

MLP = {"use_images": False, "max_state_dim": 8, "hidden_sizes": (16,)}


def test_log_probs_are_those_of_torch() -> None:
    mean, std = torch.randn(50, 2, 3, generator=generator(1)), torch.rand(50, 2, 3, generator=generator(2)) + 0.1
    ours = TanhGaussian(mean.double(), std.double())
    tanh = TanhTransform(cache_size=1)  # which remembers what its last result was made of
    theirs = TransformedDistribution(Normal(ours.mean, ours.std), [tanh])
    u = ours.sample(torch.randn(50, 2, 3, generator=generator(3)).double())
    torch.testing.assert_close(ours.log_prob(u), theirs.log_prob(tanh(u)), rtol=1e-5, atol=1e-5)
    assert torch.isfinite(ours.log_prob(torch.full_like(u, 40.0))).all()


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.5), (1.0, 0.3), (-0.5, 1.0), (0.0, 0.05)])
def test_entropy_is_the_mean_of_minus_log_prob(mean: float, std: float) -> None:
    chunk = TanhGaussian(torch.full((1, 1, 1), mean), torch.full((1, 1, 1), std))
    u = chunk.sample(torch.randn(200_000, 1, 1, generator=generator()))
    drawn = -chunk.log_prob(u)
    error = float(drawn.std()) / len(drawn) ** 0.5
    assert float(chunk.entropy()) == pytest.approx(float(drawn.mean()), abs=5 * error)


@pytest.mark.parametrize(
    ("mean", "std", "expected"),  # by summing 400,001 points over 24 standard deviations in float64
    [(0.0, 2.0, -0.001233), (0.3, 5.0, -3.708085), (0.0, 7.389, -7.074263), (5.0, 1.0, -7.195432)],
)
def test_entropy_of_wide_and_shifted_distributions(mean: float, std: float, expected: float) -> None:
    chunk = TanhGaussian(torch.full((1, 1, 1), mean), torch.full((1, 1, 1), std))
    assert float(chunk.entropy()) == pytest.approx(expected, abs=1e-4)


def test_discrete_actions_are_those_of_torch() -> None:
    ours = Categorical(torch.randn(6, 2, 3, generator=generator(1)))
    theirs = TorchCategorical(logits=ours.logits)
    drawn = ours.sample(torch.randn(6, 2, 3, generator=generator(2)))
    assert drawn.sum(-1).eq(1).all()
    torch.testing.assert_close(ours.log_prob(drawn)[..., 0], theirs.log_prob(drawn.argmax(-1)))
    torch.testing.assert_close(ours.entropy()[..., 0], theirs.entropy())
    assert torch.equal(ours.mean.argmax(-1), ours.logits.argmax(-1))


def test_discrete_actions_are_drawn_with_their_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    noise = torch.randn(200_000, 1, 4, generator=generator())
    found = Categorical(logits.expand(200_000, 1, 4)).sample(noise).mean((0, 1))
    torch.testing.assert_close(found, logits.softmax(-1), atol=0.005, rtol=0)


def test_discrete_policy_acts_one_hot_and_is_loaded_again(tmp_path: Path) -> None:
    config = tiny_config("gaussian", gaussian={**MLP, "categorical": True})
    policy, _ = build_gaussian(config, device="cpu", dtype=torch.float32, seed=0)
    seen = observation("gaussian")
    output = policy.predict_action_batch(seen, "train", SamplingParams(), generator(4), compute_values=False)
    assert set(np.unique(output.actions)) == {-1.0, 1.0}
    assert (output.actions == 1).sum(-1).tolist() == [[1, 1]] * 3
    again = policy.evaluate_actions(output.forward_inputs, SamplingParams(), compute_values=False)
    torch.testing.assert_close(again.logprobs, output.logprobs)
    loss, _ = policy.sft_loss(policy.sft_inputs(seen, torch.from_numpy(output.actions)))
    torch.testing.assert_close(loss, -output.logprobs.mean())
    policy.save_pretrained(tmp_path / "policy")
    loaded = config.model_copy(update={"model_path": str(tmp_path / "policy")})
    other, _ = build_gaussian(loaded, device="cpu", dtype=torch.float32, seed=1)
    assert other.model.spec == policy.model.spec


def test_re_parameterised_samples_are_those_of_a_rollout() -> None:
    policy = build("gaussian")
    assert isinstance(policy, OffPolicyActor)
    seen = observation("gaussian")
    output = policy.predict_action_batch(seen, "train", SamplingParams(), generator(4))
    noise = torch.randn(3, 2, 7, generator=generator(4))
    features = policy.features(policy.preprocess(seen))
    assert features.shape == (3, policy.feature_dim)
    actions, logprobs = policy.sample_chunk(features, noise)
    np.testing.assert_allclose(actions.detach().numpy(), output.actions, atol=1e-6)
    torch.testing.assert_close(logprobs, output.logprobs.sum((1, 2)), rtol=1e-5, atol=1e-5)
    actions.sum().backward()
    assert all(p.grad is not None for p in policy.encoder_parameters()) and policy.encoder_parameters()


def test_a_new_policy_acts_around_zero_with_the_given_deviation() -> None:
    policy = build("gaussian", gaussian={**MLP, "initial_std": 0.25})
    chunk = policy.model.distribution(policy.features(policy.preprocess(observation("gaussian"))))
    assert float(chunk.mean.detach().abs().max()) < 0.1
    torch.testing.assert_close(chunk.std, torch.full_like(chunk.std, 0.25), rtol=0.05, atol=0)


def test_a_state_is_padded_and_a_longer_one_refused() -> None:
    policy = build("gaussian", gaussian=MLP)
    seen = observation("gaussian")
    inputs = policy.preprocess(seen)
    assert list(inputs) == ["state"] and inputs["state"].shape == (3, 8)
    np.testing.assert_array_equal(inputs["state"][:, :6].numpy(), seen.state)
    assert not inputs["state"][:, 6:].any()
    seen.state = np.zeros((3, 9), np.float32)
    with raises_code("state-size"):
        policy.preprocess(seen)
    two = observation("gaussian")
    two.images = np.repeat(two.images, 2, axis=1)
    with raises_code("policy-cameras"):
        build("gaussian").preprocess(two)


def test_a_checkpoint_of_another_size_is_refused(tmp_path: Path) -> None:
    build("gaussian", gaussian=MLP).save_pretrained(tmp_path / "saved")
    tmp_path = tmp_path / "saved"
    config = tiny_config("gaussian", warm_start=str(tmp_path))
    with raises_code("warm-start-size", CheckpointError, "use_images"):
        build_gaussian(config, device="cpu", dtype=torch.float32, seed=0)
    longer = tiny_config("gaussian", model_path=str(tmp_path), num_action_chunks=3)
    with raises_code("warm-start-size", CheckpointError, "num_action_chunks"):
        build_gaussian(longer, device="cpu", dtype=torch.float32, seed=0)
    path = tmp_path / "config.json"
    for name, value in (("hidden_sizes", [0]), ("channels", "many"), ("use_images", 1)):
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, name: value}))
        with pytest.raises(PolicyFileError):
            read_spec(path)
        path.write_text(json.dumps(content))


def test_the_state_is_normalised_by_statistics_which_are_saved_with_the_weights(tmp_path: Path) -> None:
    stats = {"mean": [1.0, 2.0], "std": [0.5, 0.0], "min": [0.0, 2.0], "max": [2.0, 2.0], "q01": [0, 2], "q99": [2, 2]}
    RobotStatistics("toy", {**stats}, stats, "as_is", 1, 1).write(tmp_path / "stats.json")
    policy = build("gaussian", gaussian=MLP, stats_path=str(tmp_path / "stats.json"))
    seen = policy.features({"state": torch.tensor([[2.0, 2.01, 3.0, 0, 0, 0, 0, 0], [9.0, 2.0, 0, 0, 0, 0, 0, 0]])})
    expected = [
        [2.0, 1.0, 3.0, 0, 0, 0, 0, 0],
        [10.0, 0.0, 0, 0, 0, 0, 0, 0],
    ]
    torch.testing.assert_close(seen, torch.tensor(expected), rtol=0, atol=1e-4)
    policy.save_pretrained(tmp_path / "saved")
    again = build("gaussian", gaussian=MLP, model_path=str(tmp_path / "saved"))
    assert torch.equal(again.model.state_mean, policy.model.state_mean)
    assert torch.equal(again.model.state_std, policy.model.state_std)
    assert again.model.state_mean.dtype == torch.float32
    with raises_code("state-size", CheckpointError):
        build("gaussian", gaussian={**MLP, "max_state_dim": 1}, stats_path=str(tmp_path / "stats.json"))


def test_weights_without_statistics_take_the_state_as_it_is(tmp_path: Path) -> None:
    config = tiny_config("gaussian", gaussian=MLP)
    saved = tmp_path / "saved"
    build_gaussian(config, device="cpu", dtype=torch.float32, seed=0)[0].save_pretrained(saved)
    assert not any(name.startswith("state_") for name in load_file(saved / "model.safetensors"))
    old = config.model_copy(update={"model_path": str(saved)})
    policy, report = build_gaussian(old, device="cpu", dtype=torch.float32, seed=0)
    state = torch.linspace(-100, 100, 8)[None]
    assert torch.equal(policy.features({"state": state}), state)
    assert "no statistics" in report.conventions["state"]
