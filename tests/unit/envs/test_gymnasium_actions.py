"""Discrete actions of Gymnasium: the largest number of an action is the choice."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gymnasium")

from embodrl.envs.gymnasium.env import GymnasiumVectorEnv
from embodrl.envs.stepping import CameraSettings


def test_a_discrete_action_is_the_largest_number_and_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    import gymnasium

    chosen: list[object] = []

    class Choices(gymnasium.Env[np.ndarray, np.integer]):
        render_mode = "rgb_array"
        observation_space = gymnasium.spaces.Box(-1, 1, (2,))
        action_space = gymnasium.spaces.Discrete(3, start=5)

        def __init__(self) -> None:
            self.metadata = {"render_modes": ["rgb_array"]}

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.zeros(2, np.float32), {}

        def step(self, action):
            chosen.append(action)
            return np.zeros(2, np.float32), 1.0, False, False, {}

        def render(self):
            raise AssertionError("include_images is false")

    spec = type(gymnasium.spec("CartPole-v1"))
    monkeypatch.setitem(gymnasium.registry, "Choices-v0", spec("Choices-v0", lambda **_: Choices()))
    camera: CameraSettings = {"name": "render", "height": 8, "width": 8, "fov_rad": None, "eye": None, "target": None}
    env = GymnasiumVectorEnv(1, ["task"], "Choices-v0", [camera], "choose", 3, include_state=True, include_images=False)
    assert env.spec.action_dim == 3 and not env.check_episodes()
    env.reset(np.zeros(1, np.int64), np.zeros(1, np.int32), np.zeros(1, np.int64))
    for action in ([1, -1, -1], [-1, -0.5, -0.7]):
        env.chunk_step(np.array([[action]], np.float32), np.ones(1, np.bool_))
    assert chosen == [5, 6]
