"""Simulators that send invalid answers: each is named and restarted, and the run continues."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from expect import raises_code
from garbage import GARBAGE

from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EnvProtocolError

ACTIONS = np.full((4, 3, 7), 0.1, np.float32)
TASK = "reach-red"


def make_pool(folder: Path, max_restarts: int = 100) -> EnvPool:
    return EnvPool.create(
        "broken",
        {
            "env_type": "toy",
            "image_size": 8,
            "slow_start": str(folder / "slow"),
            "tasks": [TASK],
            "include_state": True,
        },
        total_num_envs=4,
        num_processes=2,
        max_restarts=max_restarts,
        extensions=["broken_simulators"],
        name="train",
    )


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvPool]:
    with make_pool(tmp_path_factory.mktemp("garbage")) as made:
        yield made


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("name", GARBAGE)
def test_a_simulator_that_sends_garbage_is_named_and_restarted(
    pool: EnvPool, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool.reset(np.arange(30, 34), np.zeros(4, np.int32))
    assert pool.step(ACTIONS).valid.all()
    restarts, lost, open_before = pool.faults.restarts, pool.faults.lost_episodes, descriptors()
    first = pool.managers[0].pid
    pool.call_one(1, "break_next", {"fault": f"sends {name}"})
    step = pool.step(ACTIONS, copy=True)
    assert step.valid.any(axis=1).tolist() == [True, True, False, False]
    assert np.isfinite(step.reward).all() and np.isfinite(step.observation.state).all()
    assert pool.faults.restarts == restarts + 1 and pool.faults.lost_episodes == lost + 2
    assert pool.managers[0].pid == first
    warning = caplog.messages[-1]
    assert GARBAGE[name][1] in warning
    assert "env manager 'train/1' (broken), envs 2-3" in warning.replace(" (broken,", " (broken),") and TASK in warning
    assert pool.step(ACTIONS).valid.all() and pool.faults.restarts == restarts + 1
    assert descriptors() <= open_before  # what an earlier test left may be closed meanwhile


def test_an_answer_that_comes_twice_is_not_taken_for_the_next_one(
    pool: EnvPool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.reset(np.arange(4), np.zeros(4, np.int32))
    restarts = pool.faults.restarts
    pool.call_one(1, "break_next", {"fault": "answers twice"})
    assert pool.step(ACTIONS).valid.all()
    assert pool.step(ACTIONS).valid.any(axis=1).tolist() == [True, True, False, False]
    assert pool.faults.restarts == restarts + 1 and "instead of OK" in caplog.messages[-1]


def test_a_simulator_that_sends_garbage_again_and_again_stops_the_run(tmp_path: Path) -> None:
    with make_pool(tmp_path, max_restarts=2) as pool:
        pool.reset(np.arange(4), np.zeros(4, np.int32))
        with raises_code("env-protocol", EnvProtocolError) as raised:
            for _ in range(3):
                pool.call_one(0, "break_next", {"fault": "sends noise"})
                pool.step(ACTIONS)
        assert "stopped after 2 restarts" in raised.value.message and "envs 0-1" in raised.value.message
