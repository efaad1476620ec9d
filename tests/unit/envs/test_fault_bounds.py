"""Bounds of rewards and states: the quick way and the thorough one agree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from embodrl.envs.pool.faults import Bounds
from embodrl.types import EnvStep, Observation

BOUNDS = Bounds(reward=10.0, state=100.0)


def make_step(state_dim: int = 3, final: bool = True) -> EnvStep:
    def observation() -> Observation:
        state = np.full((2, state_dim), 100.0, np.float32)
        return Observation(np.zeros((2, 1, 2, 2, 3), np.uint8), state, ["a", "b"], np.zeros(2, np.int32))

    flags = [np.zeros((2, 4), np.bool_) for _ in range(3)]
    return EnvStep(
        observation=observation(),
        reward=np.full((2, 4), -10.0, np.float32),
        valid=flags[0],
        terminated=flags[1],
        truncated=flags[2],
        success=np.zeros(2, np.bool_),
        episode_return=np.zeros(2, np.float32),
        episode_length=np.zeros(2, np.int32),
        episode_seed=np.zeros(2, np.int64),
        final_mask=np.ones(2, np.bool_),
        final_observation=observation() if final else None,
    )


@pytest.mark.parametrize(("state_dim", "final"), itertools.product((0, 3), (False, True)))
def test_numbers_on_the_bound_hold(state_dim: int, final: bool) -> None:
    step = make_step(state_dim, final)
    assert BOUNDS.hold(step)
    assert not BOUNDS.broken_rows(step).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 101.0, -101.0])
@pytest.mark.parametrize("where", ["reward", "state", "final"])
def test_one_number_that_cannot_be_true_does_not(value: float, where: str) -> None:
    step = make_step()
    assert step.final_observation is not None
    {"reward": step.reward, "state": step.observation.state, "final": step.final_observation.state}[where][1, 2] = value
    assert not BOUNDS.hold(step)
    assert BOUNDS.broken_rows(step).tolist() == [False, True]


def test_a_final_row_that_says_nothing_is_a_doubt_and_no_fault() -> None:
    step = make_step()
    assert step.final_observation is not None
    step.final_mask[1], step.final_observation.state[1] = False, np.nan
    assert not BOUNDS.hold(step)
    assert not BOUNDS.broken_rows(step).any()
