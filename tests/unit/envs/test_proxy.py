"""Requests to simulators as methods of a manager, on processes and in this one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
from expect import raises_code

from embodrl.envs.pool.local import LocalPool
from embodrl.envs.pool.pool import EnvPool
from embodrl.envs.pool.proxy import SimulatorManager
from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.errors import EnvError

KWARGS = {"image_size": 8, "max_episode_steps": 6, "max_chunk": 2, "include_state": True}
SEEDS = np.arange(10, 14)
TASKS = np.array([0, 1, 0, 1], np.int32)
Make = Callable[[], SimulatorManager]


class ToyWithFriction(ToyVectorEnv):
    """Has a request of its own."""

    REQUESTS = (*ToyVectorEnv.REQUESTS, "friction")

    def friction(self, scale: float) -> float:
        return scale * self.spec.num_envs


@pytest.fixture(params=["processes", "local"])
def make(request: pytest.FixtureRequest) -> Make:
    """Return what makes a manager of two simulators with two environments each."""
    if request.param == "processes":
        return lambda: SimulatorManager(EnvPool.create("toy", KWARGS, total_num_envs=4, num_processes=2))
    return lambda: SimulatorManager(LocalPool(ToyVectorEnv, KWARGS | {"num_envs": 2}, 2))


def actions(number: int) -> np.ndarray:
    return np.random.default_rng(number).uniform(-1, 1, (4, 2, 7)).astype(np.float32)


def test_a_request_is_a_method_that_asks_every_simulator(make: Make) -> None:
    with make() as manager:
        manager.reset(SEEDS, TASKS)
        described = manager.describe()
        assert described == manager.pool.call("describe") and len(described) == 2
        # By position and by name: row 1 of each process is row 1 and row 3 of the pool.
        rows = manager.pool.get_row_states([1, 3])
        for states in (manager.get_row_state(1), manager.get_row_state(row=1)):
            assert [str(state) for state in states] == [str(rows[1]), str(rows[3])]
        assert manager.spec.num_envs == 4


def test_a_state_is_loaded_again(make: Make) -> None:
    with make() as manager:
        manager.reset(SEEDS, TASKS)
        manager.step(actions(0))
        state = manager.get_state()
        assert [type(part) for part in state] == [bytes, bytes]
        first = manager.step(actions(1), copy=True)
        manager.load_state(state)
        again = manager.step(actions(1), copy=True)
        np.testing.assert_array_equal(again.observation.images, first.observation.images)
        np.testing.assert_array_equal(again.reward, first.reward)


def test_a_stopped_simulator_continues_where_it_was() -> None:
    def played(stops: bool) -> list[np.ndarray]:
        manager = SimulatorManager(EnvPool.create("toy", KWARGS, total_num_envs=4, num_processes=2))
        with manager:
            manager.reset(SEEDS, TASKS)
            manager.step(actions(0))
            if stops:
                before = [one.pid for one in manager.pool.managers]
                manager.stop_simulator()
                assert [one.pid for one in manager.pool.managers] == [None, None]
                manager.start_simulator()
                assert not set(before) & {one.pid for one in manager.pool.managers}
            step = manager.step(actions(1), copy=True)
            return [step.observation.images, step.observation.state, step.reward]

    for stopped, reference in zip(played(stops=True), played(stops=False), strict=True):
        np.testing.assert_array_equal(stopped, reference)


def test_an_unknown_request_is_named_with_the_nearest(make: Make) -> None:
    with make() as manager:
        with raises_code("env-method") as caught:
            manager.descrbe()
        assert "nearest: describe" in str(caught.value.hint)
        assert len(manager.describe()) == 2, "the simulators go on"


def test_requests_of_a_class_take_arguments_by_name() -> None:
    with SimulatorManager(LocalPool(ToyWithFriction, KWARGS | {"num_envs": 2}, 2)) as manager:
        assert manager.friction(scale=1.5) == [3.0, 3.0]
        with raises_code("env-arguments", EnvError):
            manager.friction(1.5)
        with raises_code("env-arguments", EnvError):
            manager.describe(1)


def test_names_of_python_are_no_requests(make: Make) -> None:
    manager = make()
    assert copy.copy(manager).pool is manager.pool and not hasattr(manager, "_repr_html_")
