"""GRPO, RLOO and REINFORCE++ against hand-computed numbers, plain loops, and what must not matter to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from expect import raises_code
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodrl.algorithms.advantages import Advantages, compute_advantages
from embodrl.algorithms.episodes import element_weights, split_episodes
from embodrl.algorithms.groups import grpo, reinforce_pp, rloo
from embodrl.config.schema import AlgorithmConfig, KlConfig
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import EmbodrlError

GROUP_SIZE = 3


@dataclass
class Rollout:
    rewards: Tensor
    valid: Tensor
    terminated: Tensor
    truncated: Tensor
    group_id: Tensor


def random_rollout(seed: int, num_steps: int = 5, num_groups: int = 2, chunk: int = 2, again: bool = True) -> Rollout:
    """Episodes of random length; after their end nothing is valid, or (``again``) all begin the next one together."""
    generator = torch.Generator().manual_seed(seed)
    num_envs = num_groups * GROUP_SIZE
    rewards = torch.randn(num_steps, num_envs, chunk, generator=generator)
    valid = torch.ones(num_steps, num_envs, chunk, dtype=torch.bool)
    terminated, truncated = torch.zeros_like(valid), torch.zeros_like(valid)
    border = num_steps // 2 if again else num_steps
    for first, last in ((0, border), (border, num_steps)):
        for env in range(num_envs):
            if first == last:
                continue
            actions = int(torch.randint(1, (last - first) * chunk + 1, (1,), generator=generator))
            step, action = first + (actions - 1) // chunk, (actions - 1) % chunk
            valid[step, env, action + 1 :] = False
            valid[step + 1 : last, env] = False
            terminated[step, env, action] = True
    group_id = torch.arange(num_envs).div(GROUP_SIZE, rounding_mode="floor").expand(num_steps, num_envs)
    return Rollout(rewards, valid, terminated, truncated, group_id)


def batch_of(rollout: Rollout, **changes: Any) -> TrajectoryBatch:
    num_steps, num_envs, chunk = rollout.rewards.shape
    values = torch.zeros(num_steps + 1, num_envs, 1)
    batch = TrajectoryBatch.from_rollout(
        forward_inputs={},
        logprobs=torch.zeros(num_steps, num_envs, chunk, 1),
        values=values,
        bootstrap_values=values[:-1],
        policy_version=torch.zeros(num_steps, num_envs, dtype=torch.int64),
        task_id=torch.zeros(num_steps, num_envs, dtype=torch.int64),
        **vars(rollout),
    )
    return batch.replace(**changes)


def spelled_out(rollout: Rollout, gamma: float, by_action: bool) -> dict[tuple[int, int], tuple[list[int], float]]:
    """Return ``(environment, first chunk) -> (its chunks, its return)`` by walking through the rollout."""
    episodes: dict[tuple[int, int], tuple[list[int], float]] = {}
    num_steps, num_envs, chunk = rollout.rewards.shape
    for env in range(num_envs):
        chunks: list[int] = []
        total, weight = 0.0, 1.0
        for step in range(num_steps):
            live = [c for c in range(chunk) if rollout.valid[step, env, c]]
            if live:
                chunks.append(step)
                earned = [float(rollout.rewards[step, env, c]) for c in live]
                for reward in earned if by_action else [sum(earned)]:
                    total += weight * reward
                    weight *= gamma
            if rollout.terminated[step, env].any() and chunks:
                episodes[env, chunks[0]] = (chunks, total)
                chunks, total, weight = [], 0.0, 1.0
        if chunks:
            episodes[env, chunks[0]] = (chunks, total)
    return episodes


def of_episodes(rollout: Rollout, output: Advantages) -> dict[tuple[int, int], float]:
    """Return the one advantage of each episode, having checked that it is one and that nothing else has any."""
    seen = {}
    for (env, first), (chunks, _) in spelled_out(rollout, 1.0, False).items():
        numbers = torch.cat([output.advantages[t, env][output.valid[t, env]] for t in chunks])
        assert numbers.numel() and (numbers == numbers[0]).all()
        seen[env, first] = float(numbers[0])
    assert (output.advantages[~output.valid] == 0).all()
    return seen


def test_by_hand() -> None:
    # Three episodes of two chunks: returns 1, 2 and 6, of which the second ends early.
    rewards = torch.tensor([[[1.0], [2.0], [2.0]], [[0.0], [9.0], [4.0]]])
    valid = torch.tensor([[[True]] * 3, [[True], [False], [True]]])
    terminated = torch.tensor([[[False], [True], [False]], [[True], [False], [True]]])
    common: dict[str, Any] = {
        "rewards": rewards,
        "valid": valid,
        "terminated": terminated,
        "truncated": torch.zeros_like(valid),
        "gamma": 1.0,
    }
    group_id = torch.zeros(2, 3, dtype=torch.int64)
    assert grpo(**common, group_id=group_id).advantages[..., 0].tolist() == [[-2, -1, 3], [-2, 0, 3]]
    # less the mean of the other two: 1 - 4, 2 - 3.5, 6 - 1.5
    assert rloo(**common, group_id=group_id).advantages[..., 0].tolist() == [[-3, -1.5, 4.5], [-3, 0, 4.5]]
    assert reinforce_pp(**common).advantages[..., 0].tolist() == [[1, 2, 6], [0, 0, 4]]
    halved = common | {"gamma": 0.5}
    assert reinforce_pp(**halved).advantages[..., 0].tolist() == [[1, 2, 4], [0, 0, 4]]
    assert grpo(**halved, group_id=group_id).returns[0, :, 0].tolist() == [1, 2, 4]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
    level=st.sampled_from(["chunk_level", "action_level"]),
    again=st.booleans(),
)
def test_group_estimators_equal_the_formulas_spelled_out(seed: int, gamma: float, level: str, again: bool) -> None:
    rollout = random_rollout(seed, again=again)
    episodes = spelled_out(rollout, gamma, level == "action_level")
    for estimator in (grpo, rloo):
        found = of_episodes(rollout, estimator(**vars(rollout), gamma=gamma, reward_type=level))
        for (env, first), (_, value) in episodes.items():
            members = [r for (e, f), (_, r) in episodes.items() if f == first and e // GROUP_SIZE == env // GROUP_SIZE]
            if estimator is grpo:
                expected = value - sum(members) / len(members)
            else:
                expected = value - (sum(members) - value) / (len(members) - 1) if len(members) > 1 else 0.0
            assert found[env, first] == pytest.approx(expected, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), gamma=st.floats(0, 1), level=st.sampled_from(["chunk_level", "action_level"]))
def test_reinforce_pp_equals_the_sum_of_what_is_to_come(seed: int, gamma: float, level: str) -> None:
    rollout = random_rollout(seed)
    output = reinforce_pp(**{n: t for n, t in vars(rollout).items() if n != "group_id"}, gamma=gamma, reward_type=level)
    for (env, _), (chunks, _) in spelled_out(rollout, gamma, False).items():
        for number, step in enumerate(chunks):
            rest = [rollout.rewards[t, env][rollout.valid[t, env]].tolist() for t in chunks[number:]]
            steps = [x for row in rest for x in row] if level == "action_level" else [sum(row) for row in rest]
            expected = sum(gamma**k * x for k, x in enumerate(steps))
            assert float(output.advantages[step, env, 0]) == pytest.approx(expected, abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), order=st.permutations(range(6)))
def test_the_order_of_environments_does_not_matter(seed: int, order: list[int]) -> None:
    rollout = random_rollout(seed)
    shuffled = Rollout(**{name: tensor[:, list(order)] for name, tensor in vars(rollout).items()})
    for estimator in (grpo, rloo):
        expected = estimator(**vars(rollout), gamma=0.9).advantages[:, list(order)]
        torch.testing.assert_close(estimator(**vars(shuffled), gamma=0.9).advantages, expected)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), env=st.integers(0, 5))
def test_masking_an_environment_equals_deleting_it(seed: int, env: int) -> None:
    rollout = random_rollout(seed)
    others = [e for e in range(6) if e != env]
    deleted = Rollout(**{name: tensor[:, others] for name, tensor in vars(rollout).items()})
    rollout.valid[:, env] = False
    rollout.rewards[:, env] = torch.nan
    for estimator in (grpo, rloo):
        output = estimator(**vars(rollout), gamma=0.9)
        torch.testing.assert_close(output.advantages[:, others], estimator(**vars(deleted), gamma=0.9).advantages)
        assert (output.advantages[:, env] == 0).all() and not output.valid[:, env].any()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 100), shift=st.floats(-5, 5))
def test_group_normalisation_is_free_of_scale_and_shift(seed: int, scale: float, shift: float) -> None:
    rollout = random_rollout(seed, again=False)
    rollout.rewards *= rollout.terminated  # all of the reward comes at the end
    config = AlgorithmConfig(adv_type="grpo", gamma=1.0, normalization_scope="group")
    expected = compute_advantages(batch_of(rollout), config).advantages
    moved = rollout.rewards * scale + shift * rollout.terminated
    found = compute_advantages(batch_of(rollout, rewards=moved), config).advantages
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_group_normalisation_is_the_deviation_over_that_of_the_group_s_returns(seed: int) -> None:
    rollout = random_rollout(seed)
    config = AlgorithmConfig(adv_type="grpo", gamma=1.0, normalization_scope="group")
    found = of_episodes(rollout, compute_advantages(batch_of(rollout), config))
    episodes = spelled_out(rollout, 1.0, False)
    for (env, first), (_, value) in episodes.items():
        members = [r for (e, f), (_, r) in episodes.items() if f == first and e // GROUP_SIZE == env // GROUP_SIZE]
        mean = sum(members) / len(members)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in members) / len(members))
        assert found[env, first] == pytest.approx((value - mean) / (deviation + 1e-6), abs=1e-3)


@pytest.mark.parametrize("scope", ["batch", "group"])
@pytest.mark.parametrize("adv_type", ["grpo", "rloo"])
def test_a_group_of_equal_returns_has_no_advantage(adv_type: str, scope: str) -> None:
    rollout = random_rollout(0, again=False)
    rollout.rewards[:] = 0.1 * rollout.terminated
    config = AlgorithmConfig(adv_type=adv_type, gamma=1.0, normalization_scope=scope)  # pyright: ignore
    assert (compute_advantages(batch_of(rollout), config).advantages == 0).all()


@pytest.mark.parametrize("size", [1e-3, 1.0, 11.0, 101.0, 1e5])
@pytest.mark.parametrize("estimator", [grpo, rloo])
@pytest.mark.parametrize("level", ["chunk_level", "action_level"])
def test_returns_that_are_equal_but_for_rounding_have_no_advantage(size: float, estimator: Any, level: str) -> None:
    generator = torch.Generator().manual_seed(0)
    num_steps, num_envs, chunk = 10, 8, 8
    # The reward is the change of a progress that begins at 0 and ends at the same number: every episode earns it.
    progress = torch.rand(num_steps * chunk, num_envs, dtype=torch.float64, generator=generator) * size
    progress[-1] = 0.373 * size
    change = torch.diff(progress, dim=0, prepend=torch.zeros(1, num_envs, dtype=torch.float64)).float()
    rewards = change.reshape(num_steps, chunk, num_envs).transpose(1, 2).contiguous()
    off = torch.zeros_like(rewards, dtype=torch.bool)
    terminated = off.clone()
    terminated[-1, :, -1] = True
    group_id = torch.zeros(num_steps, num_envs, dtype=torch.int64)
    rollout = Rollout(rewards, ~off, terminated, off, group_id)
    estimate = estimator(**vars(rollout), gamma=1.0, reward_type=level)
    assert (estimate.advantages == 0).all()
    config = AlgorithmConfig(adv_type="grpo", gamma=1.0, normalization_scope="group")
    assert (compute_advantages(batch_of(rollout), config).advantages == 0).all()
    # One that earned a thousandth more is seen.
    better = rewards.clone()
    better[-1, 0, -1] += 1e-3 * size
    found = compute_advantages(batch_of(rollout, rewards=better), config).advantages
    assert (found[0, 0] > 1).all() and (found[0, 1:] < 0).all()


def test_a_lost_episode_is_not_compared() -> None:
    rollout = random_rollout(1, again=False)
    rollout.terminated[:], rollout.valid[:] = False, True
    rollout.truncated[-1] = True
    rollout.valid[2, 0] = False  # as EnvPool marks a loss: not valid, truncated at the first action
    rollout.truncated[2, 0, 0] = True
    rollout.valid[3:, 0] = False
    others = list(range(1, 6))
    deleted = Rollout(**{name: tensor[:, others] for name, tensor in vars(rollout).items()})
    output = grpo(**vars(rollout), gamma=1.0)
    assert (output.advantages[:, 0] == 0).all() and not output.valid[:, 0].any()
    torch.testing.assert_close(output.advantages[:, 1:], grpo(**vars(deleted), gamma=1.0).advantages)
    to_come = reinforce_pp(**{n: t for n, t in vars(rollout).items() if n != "group_id"}, gamma=1.0)
    assert not to_come.valid[:, 0].any()


@pytest.mark.parametrize("adv_type", ["gae", "grpo", "rloo", "reinforce_pp"])
def test_nothing_valid_gives_zeros(adv_type: str) -> None:
    rollout = random_rollout(2)
    rollout.valid[:] = False
    rollout.rewards[:] = torch.nan
    for scope in ("batch", "group"):
        config = AlgorithmConfig(adv_type=adv_type, normalization_scope=scope)  # pyright: ignore[reportArgumentType]
        output = compute_advantages(batch_of(rollout), config)
        assert (output.advantages == 0).all() and not output.valid.any()


def test_the_kl_of_an_action_is_taken_off_its_reward() -> None:
    rollout = random_rollout(3, again=False)
    generator = torch.Generator().manual_seed(0)
    logprobs, reference = (-torch.rand(5, 6, 2, 3, generator=generator) for _ in range(2))
    for estimator in ("k1", "k2", "k3"):
        kl = KlConfig(coef=0.5, estimator=estimator, placement="reward")  # pyright: ignore[reportArgumentType]
        config = AlgorithmConfig(adv_type="reinforce_pp", gamma=0.0, normalize_advantages=False, kl=kl)
        config = config.model_copy(update={"reward_type": "action_level"})
        output = compute_advantages(batch_of(rollout, logprobs=logprobs, ref_logprobs=reference), config)
        x = logprobs - reference
        per_token = {"k1": x, "k2": x**2 / 2, "k3": (-x).exp() - 1 + x}[estimator]
        expected = torch.where(rollout.valid, rollout.rewards - 0.5 * per_token.sum(-1), 0.0)
        torch.testing.assert_close(output.advantages, expected)
        with raises_code("reference-missing"):
            compute_advantages(batch_of(rollout), config)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_weights_make_a_mean_over_ratios_one_over_episodes(seed: int) -> None:
    rollout = random_rollout(seed)
    x = torch.randn(rollout.valid.shape, generator=torch.Generator().manual_seed(seed))
    episodes = split_episodes(rollout.valid, rollout.terminated, rollout.truncated)
    numbers = rollout.valid.sum(-1)
    total = int(numbers.sum())
    means, sums = [], []
    for (env, _), (chunks, _) in spelled_out(rollout, 1.0, False).items():
        of_episode = torch.cat([x[t, env][rollout.valid[t, env]] for t in chunks])
        means.append(float(of_episode.mean()))
        sums.append(float(of_episode.sum()))
    assert len(means) == len(episodes)
    for by_episode, expected in ((True, sum(means) / len(means)), (False, sum(sums) / len(sums) / 10)):
        weights = element_weights(episodes, numbers, rollout_length=10, by_episode=by_episode)
        found = float((weights.unsqueeze(-1) * x * rollout.valid).sum() / total)
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (lambda rewards: rewards, "Tensor"),
        (lambda rewards: Advantages(rewards[0], rewards[0], rewards[0] > 0), [6, 2]),
    ],
)
def test_what_an_estimator_of_the_user_s_returns_is_checked(
    returned: Any, found: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embodrl.algorithms.groups.mine", returned, raising=False)
    config = AlgorithmConfig(adv_type="embodrl.algorithms.groups:mine")
    with raises_code("advantage-result", EmbodrlError, found):
        compute_advantages(batch_of(random_rollout(0)), config)


def test_a_floor_keeps_a_group_that_failed_as_a_whole_small() -> None:
    rollout = random_rollout(0)
    rollout.rewards.mul_(1e-4)
    config = {"adv_type": "grpo", "gamma": 1.0, "normalization_scope": "group"}
    plain = compute_advantages(batch_of(rollout), AlgorithmConfig(**config))
    floored = compute_advantages(batch_of(rollout), AlgorithmConfig(**config, min_group_std=1.0))
    largest = float(plain.advantages.abs().max())
    assert largest > 0.5 and float(floored.advantages.abs().max()) < 0.01 * largest
