"""What every environment must do alike, each in a process of its own; env_cases.py says which are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
from env_cases import CASES, CHUNK, LIMIT, Case, interpreter, started

from embodrl.envs.pool.manager import EnvManager
from embodrl.envs.stepping import next_seed
from embodrl.specs import ENVS
from embodrl.types import EnvStep, Observation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
EVERYONE = np.ones(3, np.bool_)


def manager(case: Case, **kwargs: Any) -> AbstractContextManager[EnvManager]:
    options = {"num_envs": 3, "max_episode_steps": LIMIT, "include_state": True, **case.kwargs, **kwargs}
    python = interpreter(case)
    return started(EnvManager(case.env_type, options, python=python, extensions=case.extensions, max_chunk=CHUNK))


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def env(case: Case) -> Iterator[EnvManager]:
    """Three environments; a test that switches auto-reset off leaves it on."""
    with manager(case) as made:
        yield made


def seeds_of(*seeds: int) -> np.ndarray:
    return np.array(seeds, np.int64)


def tasks_of(env: EnvManager) -> np.ndarray:
    return np.arange(3, dtype=np.int32) % len(env.spec.tasks)


def noise(env: EnvManager, seed: int, chunk: int = CHUNK, alike: bool = False) -> np.ndarray:
    shape = (1 if alike else 3, chunk, env.spec.action_dim)
    return np.broadcast_to(np.random.default_rng(seed).uniform(-0.4, 0.3, shape), (3, *shape[1:])).astype(np.float32)


def same_observation(left: Observation, right: Observation, rows: Any = slice(None)) -> None:
    np.testing.assert_array_equal(left.images[rows], right.images[rows])
    np.testing.assert_array_equal(left.state[rows], right.state[rows])
    assert np.array(left.instruction)[rows].tolist() == np.array(right.instruction)[rows].tolist()


def same(left: EnvStep, right: EnvStep) -> None:
    same_observation(left.observation, right.observation)
    for name in ("reward", "valid", "terminated", "truncated", "success", "episode_return", "episode_length"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
    np.testing.assert_array_equal(left.episode_seed, right.episode_seed)
    np.testing.assert_array_equal(left.final_mask, right.final_mask)


def test_the_rate_of_control_is_reported(case: Case, env: EnvManager) -> None:
    assert env.spec.control_hz == case.control_hz


def test_a_seed_fixes_the_episode_whatever_came_before(env: EnvManager) -> None:
    def episode() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        env.call("rebuild")
        first = env.reset(seeds_of(5, 6, 5), np.zeros(3, np.int32)).images.copy()
        steps = [env.step(noise(env, number, alike=True), copy=True) for number in range(4)]
        return first, np.stack([s.observation.images for s in steps]), np.stack([s.reward for s in steps])

    images, later, rewards = episode()
    assert (images[0] != images[1]).any() and images[0].std() > 0
    assert env.spec.action_dim == len(env.spec.action_low) and images.shape[1:] == env_shape(env)
    # a group: rows 0 and 2 share a seed, beyond an auto-reset
    np.testing.assert_array_equal(images[0], images[2])
    np.testing.assert_array_equal(later[:, 0], later[:, 2])
    np.testing.assert_array_equal(rewards[:, 0], rewards[:, 2])
    env.reset(seeds_of(1, 2, 3), tasks_of(env))
    env.step(noise(env, 9))
    for left, right in zip((images, later, rewards), episode(), strict=True):
        np.testing.assert_array_equal(left, right)


def env_shape(env: EnvManager) -> tuple[int, ...]:
    camera = env.spec.cameras[0]
    return (len(env.spec.cameras), camera.height, camera.width, 3)


def test_an_episode_ends_at_its_limit_with_its_last_picture_and_the_next_one_begins(env: EnvManager) -> None:
    seeds = seeds_of(11, 12, 13)

    def play() -> list[EnvStep]:
        env.call("rebuild")
        env.reset(seeds, tasks_of(env))
        return [env.step(noise(env, number), copy=True) for number in range(3)]

    env.call("set_auto_reset", {"value": False})
    try:
        stopped = play()
    finally:
        env.call("set_auto_reset", {"value": True})
    steps = play()
    for step in steps[:2]:
        assert step.valid.all() and not step.done.any() and not step.final_mask.any()
    last = steps[2]
    expected = np.arange(12).reshape(3, 4)[2] == LIMIT - 1
    np.testing.assert_array_equal(last.truncated, np.broadcast_to(expected, (3, CHUNK)))
    np.testing.assert_array_equal(last.valid, np.broadcast_to([True, True, False, False], (3, CHUNK)))
    assert not last.terminated.any() and last.final_mask.all()
    assert last.episode_length.tolist() == [LIMIT] * 3 and last.episode_seed.tolist() == seeds.tolist()
    total = sum(step.reward.astype(np.float64).sum(axis=1) for step in steps)
    np.testing.assert_allclose(last.episode_return, total, rtol=1e-5, atol=1e-5)
    assert last.final_observation is not None and stopped[2].final_observation is not None
    same_observation(last.final_observation, stopped[2].observation)
    same_observation(last.final_observation, stopped[2].final_observation)
    fresh = env.reset(np.array([next_seed(int(seed)) for seed in seeds]), tasks_of(env))
    same_observation(last.observation, fresh)


def test_only_active_environments_move(env: EnvManager) -> None:
    env.call("rebuild")
    before = env.reset(seeds_of(1, 2, 3), tasks_of(env))
    images = before.images.copy()
    step = env.step(noise(env, 0), np.array([True, False, True]), copy=True)
    assert not step.valid[1].any() and not step.reward[1].any() and not step.done[1]
    assert step.valid[[0, 2]].all() and step.episode_length.tolist() == [CHUNK, 0, CHUNK]
    np.testing.assert_array_equal(step.observation.images[1], images[1])
    later = env.step(noise(env, 0), np.array([False, True, False]), copy=True)
    env.call("rebuild")
    env.reset(seeds_of(1, 2, 3), tasks_of(env))
    together = env.step(noise(env, 0), copy=True)
    np.testing.assert_array_equal(later.observation.images[1], together.observation.images[1])
    np.testing.assert_array_equal(later.reward[1], together.reward[1])


@pytest.mark.parametrize("ignore", [False, True], ids=["heeded", "ignored"])
def test_what_terminates_an_episode(case: Case, ignore: bool) -> None:
    if not case.ends_early:
        pytest.skip("neither random actions nor an expert end an episode of it")
    limit = case.expert or 60
    options = {"max_episode_steps": limit, "ignore_terminations": ignore, **case.ending}
    limit = options["max_episode_steps"]
    with manager(case, **options) as env:
        env.call("set_auto_reset", {"value": False})
        env.reset(seeds_of(1, 2, 3), tasks_of(env))
        if case.expert:
            env.call("expert_reset", {"rows": [0, 1, 2]})
        active, ends, lengths = EVERYONE.copy(), np.zeros(3, np.int64), np.zeros(3, np.int64)
        terminated, success = np.zeros(3, np.bool_), np.zeros(3, np.bool_)
        for number in range(limit):
            actions = env.call("expert_actions")[:, None] if case.expert else noise(env, number, 1) * 3
            step = env.step(np.asarray(actions, np.float32), active, copy=True)
            assert not (step.terminated & step.truncated).any()
            ends += step.done & active
            lengths = np.where(active, step.episode_length, lengths)
            terminated |= step.terminated.any(axis=1)
            success |= step.success & active
            active &= ~step.done
            if not active.any():
                break
        assert ends.tolist() == [1, 1, 1]
        if ignore:
            assert not terminated.any() and lengths.tolist() == [limit] * 3
        else:
            assert terminated.any() and (lengths[terminated] < limit).all()
        assert success.any() or case.kwargs.get("id") == "Hopper-v5"  # which can only fall


def test_a_state_continues_in_another_process_bit_exactly(case: Case, env: EnvManager) -> None:
    env.call("rebuild")
    env.reset(seeds_of(21, 22, 23), tasks_of(env))
    for number in range(4):  # beyond an auto-reset
        env.step(noise(env, number))
    state = env.get_state()
    ahead = [env.step(noise(env, 100 + number), copy=True) for number in range(13)]  # 52 steps
    with manager(case) as other:
        other.reset(seeds_of(8, 8, 8), tasks_of(other)[::-1].copy())
        other.step(noise(other, 7))
        other.set_state(state)
        assert other.get_state() == state
        for number, step in enumerate(ahead):
            same(other.step(noise(other, 100 + number)), step)


def test_the_state_of_one_row_continues_in_any_row_and_disturbs_no_other(env: EnvManager) -> None:
    def play(row: int) -> list[tuple[np.ndarray, ...]]:
        """Play what row 1 played; return all that came of it."""
        active, actions, seen = np.arange(3) == row, np.zeros((3, CHUNK, env.spec.action_dim), np.float32), []
        for number in range(4):  # beyond an auto-reset
            actions[row] = noise(env, 200 + number)[1]
            step = env.step(actions, active, copy=True)
            assert step.valid[row].any() and not step.valid[~active].any()
            observation = step.observation
            values = (step.reward, step.done, step.success, step.episode_return, step.episode_length, step.episode_seed)
            seen.append(tuple(value[row] for value in (*values, *vars_of(observation))))
        return seen

    env.call("rebuild")
    seeds, tasks = seeds_of(41, 42, 43), tasks_of(env)
    env.reset(seeds, tasks)
    for number in range(4):
        env.step(noise(env, number))
    state = env.call("get_row_state", {"row": 1})
    first = play(1)
    before = env.step(np.zeros((3, CHUNK, env.spec.action_dim), np.float32), ~EVERYONE, copy=True).observation
    for row in (2, 1):
        env.call("set_row_state", {"row": row, "state": state})
        for found, expected in zip(play(row), first, strict=True):
            for left, right in zip(found, expected, strict=True):
                np.testing.assert_array_equal(left, right)
    after = env.step(np.zeros((3, CHUNK, env.spec.action_dim), np.float32), ~EVERYONE, copy=True).observation
    for left, right in zip(vars_of(after), vars_of(before), strict=True):
        np.testing.assert_array_equal(left[:2], right[:2])
        np.testing.assert_array_equal(left[2], left[1])
    moved = env.step(noise(env, 300), np.array([True, False, False]), copy=True)
    env.call("rebuild")
    env.reset(seeds, tasks)
    for number in range(4):
        env.step(noise(env, number))
    undisturbed = env.step(noise(env, 300), copy=True)
    np.testing.assert_array_equal(moved.reward[0], undisturbed.reward[0])
    np.testing.assert_array_equal(moved.observation.images[0], undisturbed.observation.images[0])


def vars_of(observation: Observation) -> tuple[np.ndarray, ...]:
    assert observation.task_id is not None
    return observation.images, observation.state, np.array(observation.instruction), observation.task_id


def test_every_shipped_environment_is_held_to_it() -> None:
    shipped = {name for name in ENVS if str(ENVS.entry(name).target).startswith("embodrl.envs")}
    shipped -= {"dataset", "robot"}  # demonstrations have no simulator; a robot has no states and no seeds
    assert shipped <= {case.env_type for case in CASES.values()}
