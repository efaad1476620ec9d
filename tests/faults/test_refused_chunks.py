"""Chunks with invalid values: what is repeated, and when the run stops."""

import numpy as np
import pytest
from expect import raises_code
from test_env_faults import faulty_pool

from embodrl.envs.pool.faults import Bounds
from embodrl.envs.pool.pool import EnvPool
from embodrl.envs.stepping import next_seed
from embodrl.errors import EnvQuarantined


def test_what_is_refused_at_its_end_is_what_is_played_again(tmp_path, caplog):
    with faulty_pool("nan_reward", tmp_path / "fired", max_episode_steps=6) as pool:
        start = pool.reset(np.arange(4), np.zeros(4, np.int32), copy=True)
        actions = np.zeros((4, 3, 7), np.float32)
        pool.step(actions)
        step = pool.step(actions, copy=True)
        assert step.done.all() and step.valid.any(axis=1).tolist() == [True, False, True, True]
        assert "environment 1 (task reach-red, seed 1): nan in its reward is not finite" in caplog.text
        np.testing.assert_array_equal(step.observation.images[1], start.images[1])
        assert pool.managers[0].episodes.seeds.tolist() == [next_seed(0), 1]
        assert pool.step(actions).episode_seed[:2].tolist() == [next_seed(0), 1]


def refusing_pool(max_episode_steps=1000):
    """Every chunk in which the dot moves is refused."""
    options = {"total_num_envs": 4, "num_processes": 2, "name": "train", "bounds": Bounds(reward=1e-6)}
    return EnvPool.create("toy", {"image_size": 8, "max_episode_steps": max_episode_steps}, max_restarts=3, **options)


@pytest.mark.parametrize("pools_come_and_go", [False, True])
def test_an_environment_that_is_refused_again_and_again_stops_with_the_cause(pools_come_and_go):
    actions = np.zeros((4, 3, 7), np.float32)
    actions[3] = 0.3

    def begin(pool):
        part = pool.split(1)[0]
        assert part.spec.num_envs == 4
        part.reset(np.arange(30, 34), np.zeros(4, np.int32))
        return part

    with refusing_pool() as pool:
        part = begin(pool)
        for _ in range(3):
            np.testing.assert_array_equal(part.step(actions).valid.any(axis=1), [True, True, True, False])
            part = begin(pool) if pools_come_and_go else part
        with raises_code("env-quarantined", EnvQuarantined, "3") as stopped:
            part.step(actions)
        for words in ("env.max_restarts", "rank 1 of 2", "'train/1'", "environment 3", "reach-red", "seed 33"):
            assert words in stopped.value.message
        assert "in its reward is beyond env.max_abs_reward=1e-06" in stopped.value.message
        assert "raise env.max_abs_reward" in stopped.value.hint


STILL, MOVING = np.zeros((4, 3, 7), np.float32), np.full((4, 3, 7), 0.3, np.float32)


def test_episodes_that_break_off_now_and_then_stop_nothing():
    with refusing_pool(max_episode_steps=6) as pool:
        pool.reset(np.arange(30, 34), np.zeros(4, np.int32))
        for _ in range(4):
            for _ in range(3):
                assert not pool.step(MOVING).valid.any()
            assert pool.step(STILL).valid.all()
            assert pool.step(STILL).done.all()
        assert pool.faults.quarantined == 48


def test_no_episode_that_ever_comes_to_its_end_stops_although_each_begins_well():
    with refusing_pool() as pool:
        pool.reset(np.arange(30, 34), np.zeros(4, np.int32))
        for _ in range(3):
            assert pool.step(STILL).valid.all()
            assert not pool.step(MOVING).valid.any()
        assert pool.step(STILL).valid.all()
        with raises_code("env-quarantined", EnvQuarantined, "3"):
            pool.step(MOVING)
