"""GAE against hand-computed numbers, an independent loop, and its algebra."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from expect import raises_code
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodrl.algorithms.advantages import Advantages, compute_advantages, explained_variance, gae, normalize
from embodrl.config.schema import AlgorithmConfig
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import EmbodrlError


@dataclass
class Rollout:
    rewards: Tensor
    values: Tensor
    valid: Tensor
    terminated: Tensor
    truncated: Tensor
    bootstrap_values: Tensor


def run(
    rollout: Rollout, gamma: float, gae_lambda: float, reward_type: str, bootstrap_type: str = "truncation"
) -> Advantages:
    return gae(
        **vars(rollout), gamma=gamma, gae_lambda=gae_lambda, reward_type=reward_type, bootstrap_type=bootstrap_type
    )


def plain(num_steps: int, num_envs: int, chunk: int, num_values: int) -> Rollout:
    off = torch.zeros(num_steps, num_envs, chunk, dtype=torch.bool)
    return Rollout(
        rewards=torch.zeros(num_steps, num_envs, chunk),
        values=torch.zeros(num_steps + 1, num_envs, num_values),
        valid=~off,
        terminated=off.clone(),
        truncated=off.clone(),
        bootstrap_values=torch.zeros(num_steps, num_envs, num_values),
    )


def random_rollout(seed: int, num_steps: int, num_envs: int, chunk: int, num_values: int) -> Rollout:
    """Episodes that end inside chunks by either cause, and holes of invalid actions anywhere."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def flags(probability: float) -> Tensor:
        return torch.rand(num_steps, num_envs, chunk, generator=generator) < probability

    rollout = Rollout(
        rewards=draw(num_steps, num_envs, chunk),
        values=draw(num_steps + 1, num_envs, num_values),
        valid=~flags(0.25),
        terminated=flags(0.1),
        truncated=flags(0.1),
        bootstrap_values=draw(num_steps, num_envs, num_values),
    )
    # A chunk without a valid action that ends an episode means something else, and has a test of its own.
    live = rollout.valid.any(-1, keepdim=True)
    rollout.terminated &= live
    rollout.truncated &= live
    return rollout


def reference(rollout: Rollout, gamma: float, gae_lambda: float, reward_type: str) -> Tensor:
    """For every step, the sum of eq. 16 spelled out forwards over a list from which invalid steps have been deleted."""
    num_steps, num_envs, chunk = rollout.rewards.shape
    width = rollout.values.shape[2]
    result = torch.zeros(num_steps, num_envs, width, dtype=torch.float64)
    for b in range(num_envs):
        steps = []
        for t in range(num_steps):
            groups = [range(chunk)] if reward_type == "chunk_level" else [[c] for c in range(chunk)]
            for k, group in enumerate(groups):
                live = [c for c in group if rollout.valid[t, b, c]]
                if not live:
                    continue
                steps.append(
                    {
                        "at": (t, k),
                        "reward": sum(float(rollout.rewards[t, b, c]) for c in live),
                        "value": float(rollout.values[t, b, k]),
                        "terminated": any(bool(rollout.terminated[t, b, c]) for c in live),
                        "truncated": any(bool(rollout.truncated[t, b, c]) for c in live),
                        "bootstrap": float(rollout.bootstrap_values[t, b, 0]),
                    }
                )
        last_value = float(rollout.values[-1, b, 0])
        for start, first in enumerate(steps):
            total, weight = 0.0, 1.0
            for index in range(start, len(steps)):
                step = steps[index]
                if step["terminated"]:
                    after = 0.0
                elif step["truncated"]:
                    after = step["bootstrap"]
                else:
                    after = steps[index + 1]["value"] if index + 1 < len(steps) else last_value
                total += weight * (step["reward"] + gamma * after - step["value"])
                weight *= gamma * gae_lambda
                if step["terminated"] or step["truncated"]:
                    break
            t, k = first["at"]
            result[t, b, k] = total
    return result


def test_chunk_level_by_hand() -> None:
    rollout = plain(3, 1, 2, 1)
    rollout.rewards[:, 0] = torch.tensor([[1.0, 2.0], [0.0, 1.0], [2.0, 9.0]])
    rollout.values[:, 0, 0] = torch.tensor([0.5, 1.0, 2.0, 4.0])
    rollout.terminated[2, 0, 0] = True
    rollout.valid[2, 0, 1] = False
    # deltas: 3 + .5*1 - .5 = 3; 1 + .5*2 - 1 = 1; 2 + 0 - 2 = 0. gamma * lambda = .25.
    output = run(rollout, 0.5, 0.5, "chunk_level")
    assert output.advantages[:, 0, 0].tolist() == pytest.approx([3.25, 1.0, 0.0])
    assert output.returns[:, 0, 0].tolist() == pytest.approx([3.75, 2.0, 2.0])


def test_the_critic_has_a_lambda_of_its_own_and_the_policy_that_of_its_length() -> None:
    """VAPO: an episode of two steps and one of a single step, which is cut off."""
    rollout = plain(3, 1, 1, 1)
    rollout.rewards[:, 0, 0] = torch.tensor([1.0, 2.0, 4.0])
    rollout.values[:, 0, 0] = torch.tensor([0.5, 1.0, 2.0, 3.0])
    rollout.terminated[1, 0, 0] = True
    output = gae(**vars(rollout), gamma=1.0, gae_lambda=0.5, critic_lambda=1.0, lambda_length_alpha=2.0)
    # deltas: 1 + 1 - .5 = 1.5; 2 - 1 = 1; 4 + 3 - 2 = 5. lambda of the policy: 1 - 1/4 = .75, then 1 - 1/2 = .5.
    assert output.advantages[:, 0, 0].tolist() == pytest.approx([1.5 + 0.75, 1.0, 5.0])
    # lambda of the critic is 1: the sums of rewards, with the last value.
    assert output.returns[:, 0, 0].tolist() == pytest.approx([3.0, 2.0, 7.0])
    short = gae(**vars(rollout), gamma=1.0, gae_lambda=0.5, lambda_length_alpha=0.1)
    assert short.advantages[:, 0, 0].tolist() == pytest.approx([1.5, 1.0, 5.0]), "lambda is at least 0"
    assert short.returns[:, 0, 0].tolist() == pytest.approx([2.0 + 0.5, 2.0, 7.0]), "gae_lambda for the critic"


def test_action_level_by_hand() -> None:
    rollout = plain(2, 1, 2, 2)
    rollout.rewards[:, 0] = torch.tensor([[1.0, 0.0], [1.0, 7.0]])
    rollout.values[:, 0] = torch.tensor([[0.0, 1.0], [2.0, 3.0], [8.0, 8.0]])
    rollout.truncated[1, 0, 0] = True
    rollout.valid[1, 0, 1] = False
    rollout.bootstrap_values[1, 0] = torch.tensor([4.0, -5.0])
    # deltas: 1 + .5*1 - 0 = 1.5; 0 + .5*2 - 1 = 0; 1 + .5*4 - 2 = 1; the fourth action never happened.
    output = run(rollout, 0.5, 1.0, "action_level")
    assert output.advantages[:, 0].flatten().tolist() == pytest.approx([1.5 + 0.25, 0.5, 1.0, 0.0])
    assert output.returns[1, 0].tolist() == pytest.approx([3.0, 0.0])
    assert output.valid[1, 0].tolist() == [True, False]


def test_truncation_bootstraps_and_termination_does_not() -> None:
    rollout = plain(1, 3, 1, 1)
    rollout.values[:] = 1.0
    rollout.bootstrap_values[:] = 10.0
    rollout.truncated[0, 0] = True
    rollout.terminated[0, 1] = True
    rollout.truncated[0, 2] = rollout.terminated[0, 2] = True
    assert run(rollout, 0.9, 0.95, "chunk_level").returns[0, :, 0].tolist() == pytest.approx([9.0, 0.0, 0.0])
    assert run(rollout, 0.9, 0.95, "chunk_level", "none").returns[0, :, 0].tolist() == pytest.approx([0.0, 0.0, 0.0])


def test_an_episode_boundary_stops_what_flows_back() -> None:
    rollout = random_rollout(3, 6, 2, 2, 1)
    rollout.truncated[2, :, 1] = True
    rollout.valid[2] = True
    before = run(rollout, 0.99, 0.95, "chunk_level").advantages[:3].clone()
    rollout.rewards[3:] += 100.0
    rollout.values[3:] -= 50.0
    assert torch.equal(run(rollout, 0.99, 0.95, "chunk_level").advantages[:3], before)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_steps=st.integers(1, 6),
    chunk=st.integers(1, 4),
    gamma=st.floats(0, 1),
    gae_lambda=st.floats(0, 1),
    reward_type=st.sampled_from(["chunk_level", "action_level"]),
)
def test_equals_the_spelled_out_sum_over_a_list_without_the_invalid_steps(
    seed: int, num_steps: int, chunk: int, gamma: float, gae_lambda: float, reward_type: str
) -> None:
    rollout = random_rollout(seed, num_steps, 3, chunk, 1 if reward_type == "chunk_level" else chunk)
    output = run(rollout, gamma, gae_lambda, reward_type)
    expected = reference(rollout, gamma, gae_lambda, reward_type)
    torch.testing.assert_close(output.advantages.double(), expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), reward_type=st.sampled_from(["chunk_level", "action_level"]))
def test_what_stands_in_invalid_places_does_not_matter(seed: int, reward_type: str) -> None:
    rollout = random_rollout(seed, 4, 3, 3, 1 if reward_type == "chunk_level" else 3)
    expected = run(rollout, 0.97, 0.9, reward_type)
    poisoned = random_rollout(seed, 4, 3, 3, 1 if reward_type == "chunk_level" else 3)
    poisoned.rewards[~rollout.valid] = torch.nan
    poisoned.terminated |= ~rollout.valid & rollout.valid.any(-1, keepdim=True)
    if reward_type == "action_level":
        poisoned.values[:-1][~rollout.valid] = torch.nan
    ended = (rollout.truncated & ~rollout.terminated & rollout.valid).any(-1, keepdim=True)
    poisoned.bootstrap_values[~ended.expand_as(poisoned.bootstrap_values)] = torch.nan
    output = run(poisoned, 0.97, 0.9, reward_type)
    assert torch.equal(output.advantages, expected.advantages)
    assert torch.equal(output.returns, expected.returns)


@pytest.mark.parametrize(("reward_type", "num_values"), [("chunk_level", 3), ("action_level", 1)])
def test_values_that_do_not_fit_are_refused_with_a_remedy(reward_type: str, num_values: int) -> None:
    with raises_code("values-shape", EmbodrlError, "value_head"):
        run(plain(2, 2, 3, num_values), 0.9, 0.9, reward_type)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.01, 100))
def test_normalisation_sees_valid_entries_only(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 4, 2, generator=generator) * scale + 3.0
    valid = torch.rand(5, 4, 2, generator=generator) < 0.7
    valid[0, 0] = True
    result = normalize(torch.where(valid, x, torch.nan), valid)
    assert (result[~valid] == 0).all()
    assert abs(float(result[valid].mean())) < 1e-3
    assert abs(float(result[valid].std(correction=0)) - 1.0) < 1e-2


@pytest.mark.parametrize("size", [1e-6, 0.1, 101.0, 1e6])
def test_equal_advantages_normalise_to_zero(size: float) -> None:
    x = torch.full((7, 3, 1), size)
    rounded = torch.nextafter(x, torch.full_like(x, torch.inf))
    everywhere = torch.ones_like(x, dtype=torch.bool)
    assert (normalize(x, everywhere) == 0).all()
    x[::2] = rounded[::2]
    assert (normalize(x, everywhere) == 0).all()
    assert explained_variance(torch.zeros_like(x), x, everywhere) == 0.0
    x[0] *= 1.001
    assert normalize(x, everywhere)[0].min() > 1


def test_the_rounding_of_returns_is_no_advantage() -> None:
    returns = torch.full((6, 4, 1), 102.0)
    values = torch.nextafter(returns, torch.tensor(torch.inf))
    values[::2] = returns[::2]
    everywhere = torch.ones_like(returns, dtype=torch.bool)
    assert (normalize(returns - values, everywhere, returns=returns) == 0).all()
    assert (normalize(returns - values, everywhere) != 0).all(), "of numbers near 0 the same differences count"


def test_rewards_of_a_chunk_are_summed_in_float64() -> None:
    rollout = plain(1, 1, 3, 1)
    rollout.rewards[0, 0] = torch.tensor([1e8, 1.0, -1e8])
    rollout.terminated[0, 0, -1] = True
    assert gae(**vars(rollout), gamma=1.0, gae_lambda=1.0).advantages.tolist() == [[[1.0]]]


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 99.0])
    valid = torch.tensor([True, True, True, False])
    assert explained_variance(returns, returns, valid) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(4), returns, valid) == pytest.approx(0.0)
    assert explained_variance(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.ones(4), valid) == 0.0
    # residuals 1, 0, -1 have variance 1 and the returns 1
    assert explained_variance(torch.tensor([0.0, 2.0, 4.0, 0.0]), returns, valid) == pytest.approx(0.0)


def batch_of(rollout: Rollout) -> TrajectoryBatch:
    return TrajectoryBatch.from_rollout(
        forward_inputs={},
        logprobs=torch.zeros(*rollout.rewards.shape, 1),
        policy_version=torch.zeros(rollout.rewards.shape[:2], dtype=torch.int64),
        task_id=torch.zeros(rollout.rewards.shape[:2], dtype=torch.int64),
        **vars(rollout),
    )


def test_estimates_that_are_not_finite_are_refused_where_they_count() -> None:
    rollout = random_rollout(5, 4, 3, 2, 1)
    rollout.valid[1, 1] = False
    rollout.rewards[1, 1] = float("nan")
    compute_advantages(batch_of(rollout), AlgorithmConfig())
    rollout.rewards[2, 0] = float("inf")
    rollout.valid[2, 0] = True
    with raises_code("advantage-result", EmbodrlError, "adv_type", "'gae'"):
        compute_advantages(batch_of(rollout), AlgorithmConfig())


def test_compute_advantages_reads_the_configuration() -> None:
    rollout = random_rollout(5, 4, 3, 2, 1)
    batch = batch_of(rollout)
    raw = compute_advantages(batch, AlgorithmConfig(gamma=0.8, gae_lambda=0.7, normalize_advantages=False))
    expected = run(rollout, 0.8, 0.7, "chunk_level")
    assert torch.equal(raw.advantages, expected.advantages)
    config = AlgorithmConfig(gamma=0.8, gae_lambda=0.7, logprob_type="chunk_level")
    normalised = compute_advantages(batch, config)
    torch.testing.assert_close(normalised.advantages, normalize(expected.advantages, expected.valid))
    assert torch.equal(normalised.returns, expected.returns)


@pytest.mark.parametrize(
    ("logprob_type", "loss_agg", "expected"),
    # Advantages 3, 3 and -2, of 1, 1 and 2 valid actions: mean 4/3 over chunks and 1/2 over actions.
    [
        ("chunk_level", "token_mean", [0.7071, 0.7071, -1.4142]),
        ("action_level", "token_mean", [1.0, 1.0, -1.0]),
        ("token_level", "token_mean", [1.0, 1.0, -1.0]),
        ("token_level", "episode_mean", [0.7071, 0.7071, -1.4142]),
    ],
)
def test_advantages_are_normalised_as_the_loss_averages_them(
    logprob_type: Any, loss_agg: Any, expected: list[float]
) -> None:
    rollout = random_rollout(0, 1, 3, 2, 1)
    rollout.values[:] = 0.0
    rollout.valid[:] = torch.tensor([[[True, False], [True, False], [True, True]]])
    rollout.terminated[:] = rollout.truncated[:] = False
    rollout.terminated[:, :, 0] = True
    rollout.rewards[:] = torch.tensor([[[3.0, 0.0], [3.0, 0.0], [-1.0, -1.0]]])
    config = AlgorithmConfig(logprob_type=logprob_type, loss_agg=loss_agg, gamma=1.0)
    found = compute_advantages(batch_of(rollout), config).advantages
    torch.testing.assert_close(found.flatten(), torch.tensor(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize("reward_type", ["chunk_level", "action_level"])
def test_an_episode_lost_to_a_fault_does_not_flow_into_the_next(reward_type: Any) -> None:
    """Chunk 1 is lost: chunk 0 bootstraps from its value, and nothing that follows matters to chunk 0."""
    chunk, num_values = 2, 1 if reward_type == "chunk_level" else 2
    rewards = torch.tensor([[[1.0, 2.0]], [[50.0, 50.0]], [[7.0, 9.0]]])
    values = torch.tensor([0.5, 4.0, 3.0, 2.0])[:, None, None].expand(4, 1, num_values).clone()
    valid = torch.ones(3, 1, chunk, dtype=torch.bool)
    valid[1] = False
    truncated = torch.zeros_like(valid)
    truncated[1, 0, 0] = True

    def first(following: Tensor, later_values: Tensor) -> Tensor:
        return gae(
            rewards=torch.cat([rewards[:2], following]),
            values=torch.cat([values[:2], later_values]),
            valid=valid,
            terminated=torch.zeros_like(valid),
            truncated=truncated,
            bootstrap_values=torch.zeros(3, 1, num_values),
            gamma=0.9,
            gae_lambda=0.8,
            reward_type=reward_type,
        ).advantages[0, 0]

    found = first(rewards[2:], values[2:])
    assert torch.equal(found, first(rewards[2:] * 100, values[2:] - 30))
    if reward_type == "chunk_level":
        torch.testing.assert_close(found, torch.tensor([3.0 + 0.9 * 4.0 - 0.5]))
    else:
        last = 2.0 + 0.9 * 4.0 - 0.5
        torch.testing.assert_close(found, torch.tensor([1.0 + 0.9 * 0.5 - 0.5 + 0.9 * 0.8 * last, last]))
