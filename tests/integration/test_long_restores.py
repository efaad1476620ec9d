"""Episodes saved amid contacts, whose process is then killed: another process continues them bit-exactly."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import numpy as np
import pytest
from env_cases import CASES, Case
from test_env_contract import manager, same, seeds_of, tasks_of

from embodrl.envs.pool.manager import EnvManager
from embodrl.types import EnvStep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BEFORE, AFTER = 48, 52
"""Steps before the state is saved, and after."""
OPTIONS = {"max_episode_steps": 200, "ignore_terminations": True}
DOWN = np.array([0.0, 0.0, -0.6, 0.0, 0.0, 0.0, 0.0])
"""Added to an action of LIBERO: a hand's way to the things below it."""
HEIGHT = 2
"""Of the hand, in the state of LIBERO."""


def begin(env: EnvManager) -> None:
    env.reset(seeds_of(31, 32, 33), tasks_of(env))


def contact_seeking(env: EnvManager, case: Case, number: int) -> np.ndarray:
    """Return ``float32[3,1,A]``: what the expert does, or else noise."""
    if case.expert:
        return np.asarray(env.call("expert_actions"), np.float32)[:, None]
    noise = np.random.default_rng(number).uniform(-0.4, 0.4, (3, 1, env.spec.action_dim))
    return (noise + DOWN if case.env_type == "libero" else noise).astype(np.float32)


def uninterrupted(case: Case) -> tuple[list[np.ndarray], list[EnvStep]]:
    """Play in one process without saving anything; return the actions and what came of them."""
    actions, steps = [], []
    with manager(case, **OPTIONS) as env:
        begin(env)
        if case.expert:
            env.call("expert_reset", {"rows": [0, 1, 2]})
        for number in range(BEFORE + AFTER):
            actions.append(contact_seeking(env, case, number))
            steps.append(env.step(actions[-1], copy=True))
    return actions, steps


def check_contact(case: Case, steps: Sequence[EnvStep]) -> None:
    """Things were pushed: the expert has succeeded in all rows, or the hand goes down no further."""
    if case.expert:
        assert steps[-1].success.all()
    elif case.env_type == "libero":
        heights = np.array([step.observation.state[:, HEIGHT] for step in steps])
        assert (heights[0] - heights[BEFORE] > 0.1).all() and (heights[BEFORE - 8] - heights[BEFORE] < 0.01).any()


@pytest.mark.parametrize(
    "name",
    [
        "Reacher-v5",
        pytest.param("metaworld", marks=pytest.mark.long),
        pytest.param("libero", marks=pytest.mark.long),
        pytest.param("maniskill", marks=pytest.mark.long),
    ],
)
def test_a_long_episode_continues_elsewhere_when_its_process_is_killed(name: str) -> None:
    case = CASES[name]
    actions, expected = uninterrupted(case)
    check_contact(case, expected)
    with manager(case, **OPTIONS) as env:
        begin(env)
        for action, step in zip(actions[:BEFORE], expected, strict=False):
            same(env.step(action, copy=True), step)
        state = env.get_state()
        assert env.pid is not None
        os.kill(env.pid, signal.SIGKILL)
    with manager(case, **OPTIONS) as elsewhere:
        elsewhere.set_state(state)
        for action, step in zip(actions[BEFORE:], expected[BEFORE:], strict=True):
            same(elsewhere.step(action, copy=True), step)
    assert (expected[-1].episode_length == BEFORE + AFTER).all()  # one episode, to the end
