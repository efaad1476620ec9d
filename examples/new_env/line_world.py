"""An environment from outside the package: a bright bar on a line, to be pushed to the right end.

PYTHONPATH=examples/new_env embodrl train --config examples/new_env/config.yaml
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from embodrl import EnvConfig, EpisodeRules, SimStep, Simulator, SimulatorVectorEnv, register_env

ACTION_DIM = 7
STEP = 0.2
GOAL = 0.9


class LineWorldConfig(EnvConfig):
    """The section ``env`` with a setting of this environment, which is validated like all others."""

    friction: float = Field(default=0.0, ge=0.0, lt=1.0, description="fraction of each motion that is lost")


class Line(Simulator):
    """A line [0, 1] with a bar that the first number of an action moves by up to 0.2.

    Args:
        cameras: ``[{name, height, width, ...}]`` as configured in ``env.cameras``.
        friction: fraction of each motion that is lost.
    """

    action_low = (-1.0,) * ACTION_DIM
    action_high = (1.0,) * ACTION_DIM
    state_dim = 1
    instruction = "push the bar to the right"

    def __init__(self, cameras: list[dict[str, Any]], friction: float = 0.0) -> None:
        self.step_size = np.float32(STEP * (1.0 - friction))
        self.shape = (len(cameras), cameras[0]["height"], cameras[0]["width"], 3)
        self.position = np.float32(0)

    def reset(self, seed: int) -> None:
        """See Simulator: the same seed always gives the same start."""
        self.position = np.float32(np.random.default_rng(seed).uniform(0, 0.5))

    def step(self, action: NDArray[np.float32]) -> SimStep:
        """See Simulator: the dense reward is how far the bar is, and its change is what an action earns."""
        self.position = np.clip(self.position + self.step_size * np.clip(action[0], -1, 1), 0, 1)
        return SimStep(reward=float(self.position), success=bool(self.position >= GOAL))

    def first_reward(self) -> float:
        """See Simulator."""
        return float(self.position)

    def images(self) -> NDArray[np.uint8]:
        """See Simulator."""
        bar = np.abs(np.linspace(0, 1, self.shape[2]) - self.position) < 0.1
        return np.broadcast_to(np.where(bar, 255, 0).astype(np.uint8)[:, None], self.shape)

    def proprioception(self) -> NDArray[np.float32]:
        """See Simulator."""
        return np.array([self.position], np.float32)

    def get_state(self) -> float:
        """See Simulator: all that a resumed run needs."""
        return float(self.position)

    def set_state(self, state: float) -> None:
        """See Simulator."""
        self.position = np.float32(state)


class LineWorld(SimulatorVectorEnv):
    """B lines. ``task`` is one of ``env.tasks``; this world knows one."""

    def __init__(
        self,
        num_envs: int,
        tasks: list[str],
        cameras: list[dict[str, Any]],
        max_chunk: int = 8,
        include_state: bool = False,
        friction: float = 0.0,
        **rules: Any,
    ) -> None:
        self._cameras, self._friction = cameras, friction
        super().__init__(num_envs, tasks, cameras, EpisodeRules(**rules), include_state, max_chunk)

    def make_simulator(self, task: str) -> Simulator:
        """See SimulatorVectorEnv."""
        return Line(self._cameras, self._friction)


# What the rules want to know without building the environment: its tasks and the size of an action. With the example
# `embodrl doctor extensions=[line_world]` makes one environment.
register_env(
    "line_world",
    LineWorld,
    "a bar to be pushed to the right",
    tasks=("push-right",),
    action_dim=ACTION_DIM,
    settings=LineWorldConfig,
    example={"tasks": ["push-right"], "cameras": [{"name": "line", "height": 16, "width": 16}]},
)
