"""Offloaded simulators are restored bit-exactly, with their process or without it."""

import os
import signal

import numpy as np
import pytest
from expect import raises_code
from test_env_manager import KWARGS, SEEDS, TASKS, actions_of, assert_same_step

from embodrl.envs.pool.manager import EnvManager
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EnvError, EnvWorkerDied
from embodrl.processes.memory import resident_bytes

POOL = {"image_size": 16, "max_episode_steps": 7}
EACH = pytest.mark.parametrize("ends", [True, False], ids=["process", "simulator"])


def kill(pid: int | None) -> None:
    """Kill a process and wait until it is dead, but not reaped."""
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def pools() -> tuple[EnvPool, EnvPool]:
    return tuple(EnvPool.create("toy", POOL, total_num_envs=4, num_processes=2) for _ in range(2))  # type: ignore[return-value]


def begin(pool: EnvPool) -> None:
    pool.reset(np.arange(4), np.zeros(4, np.int32))
    pool.step(actions_of(0, 4))


def test_a_process_that_stays_continues_bit_exactly() -> None:
    with EnvManager("toy", KWARGS) as manager, EnvManager("toy", KWARGS) as twin:
        for each in (manager, twin):
            each.reset(SEEDS, TASKS)
            each.step(actions_of(0))
        pid = manager.pid
        manager.offload(end_process=False)
        assert manager.is_offloaded and manager.pid == pid and resident_bytes(manager.pid) > 0
        for request in (manager.get_state, lambda: manager.step_async(actions_of(1)), lambda: manager.call("mark")):
            with raises_code("env-order", EnvError):
                request()
        manager.start()
        assert not manager.is_offloaded and manager.pid == pid
        for number in range(1, 6):
            assert_same_step(manager.step(actions_of(number)), twin.step(actions_of(number)))
        manager.offload(end_process=False)  # and is closed in this state
    assert manager.pid is None


def test_only_what_is_away_can_come_back() -> None:
    with EnvManager("toy", KWARGS) as manager, raises_code("env-order", EnvError):
        manager.start()


@EACH
def test_a_pool_tells_its_memory_and_comes_back_when_asked(ends: bool) -> None:
    pool, twin = pools()
    with pool, twin:
        begin(pool)
        begin(twin)
        memory = pool.offload(ends)
        assert memory is not None and memory.before > 2 * 2**20
        assert (memory.after == 0) == ends
        assert pool.offload(ends) is None
        for number in range(1, 4):  # the step brings it back
            assert_same_step(pool.step(actions_of(number, 4)), twin.step(actions_of(number, 4)))
        pool.offload(ends)
        assert pool.get_state() == twin.get_state()
        assert pool.faults.restarts == 0


def test_a_process_that_dies_while_its_simulators_are_away_costs_no_state() -> None:
    pool, twin = pools()
    with pool, twin:
        begin(pool)
        begin(twin)
        pool.offload(end_processes=False)
        kill(pool.managers[1].pid)
        pool.onload()
        assert pool.faults.restarts == 1 and pool.faults.lost_episodes == 0
        for number in range(1, 4):
            assert_same_step(pool.step(actions_of(number, 4)), twin.step(actions_of(number, 4)))


def test_without_restarts_left_a_death_is_reported() -> None:
    with EnvPool.create("toy", POOL, total_num_envs=4, num_processes=2, max_restarts=0) as pool:
        begin(pool)
        pool.offload(end_processes=False)
        kill(pool.managers[0].pid)
        with raises_code("env-worker-died", EnvWorkerDied, "SIGKILL"):
            pool.onload()


@EACH
def test_a_process_that_died_between_rollouts_is_replaced_before_it_leaves(ends: bool) -> None:
    with EnvPool.create("toy", POOL, total_num_envs=4, num_processes=2) as pool:
        begin(pool)
        kill(pool.managers[0].pid)
        pool.offload(ends)
        assert pool.faults.restarts == 1
        pool.reset(np.arange(4), np.zeros(4, np.int32))


def test_stages_come_back_each_for_itself() -> None:
    with EnvPool.create("toy", POOL, total_num_envs=4, num_processes=2) as pool:
        begin(pool)
        first, second = pool.split(2)
        pool.offload()
        first.reset(np.array([0, 1]), np.zeros(2, np.int32))
        assert [manager.is_offloaded for manager in pool.managers] == [False, True]
        second.reset(np.array([2, 3]), np.zeros(2, np.int32))
        assert not any(manager.is_offloaded for manager in pool.managers)


@EACH
@pytest.mark.parametrize("asked", [pytest.param("of the pool", marks=pytest.mark.long), "of its parts"])
def test_what_was_asked_for_good_lasts_where_simulators_were_away(ends: bool, asked: str) -> None:
    pool, twin = pools()
    with pool, twin:
        for each in (pool, twin):
            begin(each)
            for part in [each] if asked == "of the pool" else each.split(2):
                part.call("set_auto_reset", {"value": False})
        pool.offload(ends)
        for number in range(1, 4):  # the second chunk reaches the limit
            step = pool.step(actions_of(number, 4))
            assert_same_step(step, twin.step(actions_of(number, 4)))
        assert step.done.all() and step.episode_seed.tolist() == [0, 1, 2, 3], "no episode has begun"
        assert [manager.episodes.seeds.tolist() for manager in pool.managers] == [[0, 1], [2, 3]]


def test_a_process_that_dies_before_the_first_episode_or_a_saved_state_is_replaced() -> None:
    pool, twin = pools()
    with pool, twin:
        begin(twin)
        twin.step(actions_of(0, 4))
        kill(pool.managers[0].pid)
        pool.call("check_state", restart=True)
        kill(pool.managers[1].pid)
        pool.set_state(twin.get_state())
        assert pool.faults.restarts == 2
        for number in range(1, 4):
            assert_same_step(pool.step(actions_of(number, 4)), twin.step(actions_of(number, 4)))
