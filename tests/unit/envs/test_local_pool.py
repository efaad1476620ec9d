"""One contract for the pool with processes and for the one in this process, and what only the latter shows."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from expect import raises_code

from embodrl.envs.pool.local import LocalPool
from embodrl.envs.pool.pool import EnvPool
from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.errors import EnvRaised, EnvWorkerDied
from embodrl.processes.frames import PeerGoneError

KWARGS = {"image_size": 8, "max_episode_steps": 6, "max_chunk": 2, "include_state": True}
SEEDS = np.arange(10, 14)
TASKS = np.array([0, 1, 0, 1], np.int32)
Make = Callable[..., EnvPool]


@pytest.fixture(params=["processes", "local"])
def make(request: pytest.FixtureRequest) -> Make:
    """Return what makes a pool of two simulators with two environments each."""
    if request.param == "processes":
        return lambda **kwargs: EnvPool.create("toy", KWARGS | kwargs, total_num_envs=4, num_processes=2)
    return lambda **kwargs: LocalPool(ToyVectorEnv, KWARGS | {"num_envs": 2} | kwargs, 2)


def actions(number: int) -> np.ndarray:
    return np.random.default_rng(number).uniform(-1, 1, (4, 2, 7)).astype(np.float32)


def played(pool: EnvPool, steps: range) -> Iterator[np.ndarray]:
    for number in steps:
        step = pool.step(actions(number), copy=True)
        yield from (step.observation.images, step.observation.state, step.reward, step.valid, step.truncated)
        yield from (step.episode_seed, step.final_mask)


def test_both_play_the_same(make: Make) -> None:
    reference = ToyVectorEnv(4, **KWARGS)
    reference.reset(SEEDS, TASKS, np.arange(4))
    with make() as pool:
        first = pool.reset(SEEDS, TASKS, copy=True)
        assert first.task_id.tolist() == TASKS.tolist() and pool.spec.num_envs == 4
        for number in range(8):
            expected, found = reference.chunk_step(actions(number), np.ones(4, np.bool_)), pool.step(actions(number))
            np.testing.assert_array_equal(found.reward, expected.reward)
            np.testing.assert_array_equal(found.observation.images, expected.observation.images)
            np.testing.assert_array_equal(found.episode_seed, expected.episode_seed)
            if expected.final_observation is not None:
                assert found.final_observation is not None
                rows = expected.final_mask
                np.testing.assert_array_equal(
                    found.final_observation.state[rows], expected.final_observation.state[rows]
                )


def test_rows_are_reset_and_left_alone(make: Make) -> None:
    with make(auto_reset=False) as pool:
        before = pool.reset(SEEDS, TASKS, copy=True)
        active = np.array([True, False, False, True])
        pool.step_async(actions(0), active)
        step = pool.wait()
        assert step.valid.any(axis=1).tolist() == active.tolist()
        np.testing.assert_array_equal(step.observation.state[~active], before.state[~active])
        again = pool.reset(SEEDS[[3]], TASKS[[3]], np.array([3]))
        np.testing.assert_array_equal(again.state[3], before.state[3])
        np.testing.assert_array_equal(again.state[0], step.observation.state[0])


def test_states_continue_bit_exactly(make: Make) -> None:
    with make() as pool:
        pool.reset(SEEDS, TASKS)
        list(played(pool, range(2)))
        states, rows = pool.get_state(), pool.get_row_states([2])
        expected = list(played(pool, range(2, 6)))
        pool.set_state(states)
        np.testing.assert_equal(list(played(pool, range(2, 6))), expected)
        pool.set_row_states({0: rows[2]})
        assert pool.offload() is not None
        pool.onload()
        np.testing.assert_array_equal(pool.step(actions(2)).episode_seed[[0]], expected[5][[2]])


def test_requests_are_answered_and_refused(make: Make) -> None:
    with make() as pool, raises_code("env-method"):
        pool.reset(SEEDS, TASKS)
        pool.call("set_auto_reset", {"value": False})
        assert [answer.shape for answer in pool.call("solved_now")] == [(2,), (2,)]  # type: ignore[attr-defined]
        assert pool.expert_actions().shape == (4, 7)
        pool.call("fly")


class Broken(ToyVectorEnv):
    """Fails as its class attribute says at chunk number three of this process."""

    fault: BaseException | float = 0.0
    chunks = 0

    def chunk_step(self, actions: np.ndarray, active: np.ndarray):
        Broken.chunks += 1
        step = super().chunk_step(actions, active)
        if Broken.chunks == 3:
            if isinstance(self.fault, BaseException):
                raise self.fault
            step.reward[1] = self.fault
        return step


def broken(monkeypatch: pytest.MonkeyPatch, fault: BaseException | float, **options: int) -> LocalPool:
    monkeypatch.setattr(Broken, "fault", fault)
    monkeypatch.setattr(Broken, "chunks", 0)
    return LocalPool(Broken, KWARGS | {"num_envs": 4}, **options)


@pytest.mark.parametrize(("fault", "lost"), [(ValueError("no"), 4), (PeerGoneError(), 4), (np.nan, 1)])
def test_a_fault_ends_episodes_that_begin_again(
    fault: BaseException | float, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with broken(monkeypatch, fault) as pool:
        pool.reset(SEEDS, TASKS)
        pool.step(actions(0))
        seen = pool.step(actions(1)).observation
        kept = seen.state.copy()
        step = pool.step(actions(2))
        gone = ~step.valid.any(axis=1)
        assert gone.sum() == lost and (step.truncated[gone, 0]).all() and step.final_mask[gone].all()
        assert step.final_observation is not None
        np.testing.assert_array_equal(step.final_observation.state[gone], kept[gone])
        np.testing.assert_array_equal(seen.state, kept, "valid until the next but one result")
        assert step.episode_seed[gone].tolist() == SEEDS[gone].tolist()
        counted = pool.faults
        assert (counted.restarts, counted.lost_episodes, counted.quarantined) == (lost == 4, lost, lost == 1)
        assert pool.step(actions(3)).valid.any(axis=1).all()


def test_faults_beyond_the_limit_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    for fault, error in ((ValueError("no"), EnvRaised), (PeerGoneError(), EnvWorkerDied)):
        with broken(monkeypatch, fault, max_restarts=0) as pool:
            pool.reset(SEEDS, TASKS)
            for number in range(2):
                pool.step(actions(number))
            with pytest.raises(error):
                pool.step(actions(2))


def test_an_interruption_is_none_of_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    with broken(monkeypatch, KeyboardInterrupt()) as pool:
        pool.reset(SEEDS, TASKS)
        for number in range(2):
            pool.step(actions(number))
        with pytest.raises(KeyboardInterrupt):
            pool.step(actions(2))


def test_a_process_whose_restart_was_interrupted_is_restarted() -> None:
    with LocalPool(ToyVectorEnv, KWARGS | {"num_envs": 2}, 2) as pool:
        pool.reset(np.arange(4), np.zeros(4, np.int32))
        pool.managers[1].process.drop()
        pool.requests.drain()
        assert len(pool.get_state(restart=True)) == 2 and pool.faults.restarts == 1
