"""A dot to be moved to a coloured goal: a language-conditioned environment without a simulator.

Deterministic, fast and complete (auto-reset, truncation, several tasks, state transfer): for tests and first steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.axes import colour_shift, generator
from embodrl.envs.stepping import CameraSettings, EpisodeRules, SteppingEnv, StepResult, make_spec
from embodrl.envs.toy.tasks import AXES, INSTRUCTIONS

_COLOURS = {"reach-red": (255, 0, 0), "reach-green": (0, 255, 0)}
_SPEED = 0.15
_NEAR = 0.2
_DISTRACTORS = ((0, 0, 255), (255, 255, 0), (255, 0, 255))
_GOAL_SPEED = 0.02


class ToyVectorEnv(SteppingEnv):
    """B boards [-1, 1]^2 with a white dot, a red and a green square; the task names the square to go to.

    The first two of ``action_dim`` numbers move the dot by up to 0.15 per step, the others do nothing. ``image_size``
    is in pixels, square. ``include_state`` adds the dot's position to the observation, ``full_state`` that of the goal
    square. Other arguments are fields of ``EpisodeRules``.
    """

    def __init__(
        self,
        num_envs: int = 4,
        tasks: list[str] | tuple[str, ...] = ("reach-red", "reach-green"),
        image_size: int = 32,
        max_episode_steps: int = 20,
        max_chunk: int = 8,
        action_dim: int = 7,
        include_state: bool = False,
        full_state: bool = False,
        auto_reset: bool = True,
        ignore_terminations: bool = False,
    ) -> None:
        camera = CameraSettings(
            name="base_camera", height=image_size, width=image_size, fov_rad=None, eye=None, target=None
        )
        bounds = ((-1.0,) * action_dim, (1.0,) * action_dim)
        spec = make_spec(num_envs, tasks, [camera], bounds, (2 + 2 * full_state) * include_state, max_chunk)
        rules = EpisodeRules(max_episode_steps, auto_reset=auto_reset, ignore_terminations=ignore_terminations)
        super().__init__(spec, rules)
        self.position = np.zeros((num_envs, 2), np.float32)
        self.goals = np.zeros((num_envs, 2, 2), np.float32)

    def assign(self, rows: NDArray[np.int64], task_ids: NDArray[np.int32]) -> None:
        """Nothing to prepare: a board takes its task from ``task_id``."""

    def perturb(self, axis: str) -> None:
        if axis not in AXES:
            super().perturb(axis)

    def begin(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> None:
        for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
            random = np.random.default_rng(seed)
            self.position[row] = random.uniform(-0.9, 0.9, 2)
            self.goals[row] = random.uniform(-0.8, 0.8, (2, 2))
            if self.axis == "objects":  # outside its usual initial range
                self.position[row, 0] = np.copysign(1.0, self.position[row, 0])

    def step_rows(self, actions: NDArray[np.float32], running: NDArray[np.bool_]) -> StepResult:
        """The dense reward is the negative distance to the goal."""
        if self.axis == "goal":
            for row in np.flatnonzero(running).tolist():
                way = generator("goal", int(self.episode_seed[row])).uniform(-1, 1, 2)
                self.goals[row] = np.clip(self.goals[row] + _GOAL_SPEED * way, -0.9, 0.9)
        move = np.clip(actions[:, :2], -1, 1) * np.float32(_SPEED)
        self.position = np.where(running[:, None], np.clip(self.position + move, -1, 1), self.position)
        distance = self._distance()
        return StepResult(-distance, distance < _NEAR)

    def first_reward(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return -self._distance()[rows]

    def draw(self, rows: NDArray[np.int64], images: NDArray[np.uint8], state: NDArray[np.float32]) -> None:
        seeds = self.episode_seed[rows].tolist()
        images[rows, 0] = self._background(seeds)
        colours = np.array(list(_COLOURS.values()), np.uint8)[:, None].repeat(len(rows), axis=1)  # [2,N,3]
        if self.axis == "colours":
            colours = np.stack([np.roll(colours[:, i], colour_shift(seed), axis=-1) for i, seed in enumerate(seeds)], 1)
        if self.axis == "distractors":
            places = np.array([generator("distractors", seed).uniform(-0.9, 0.9, (3, 2)) for seed in seeds])
            for index, colour in enumerate(_DISTRACTORS):
                self._square(images, rows, places[:, index].astype(np.float32), np.array(colour, np.uint8), 0.1)
        for index in range(len(_COLOURS)):
            self._square(images, rows, self.goals[rows, index], colours[index], 0.2)
        self._square(images, rows, self.position[rows], np.full(3, 255, np.uint8), 0.1)
        if self.axis == "light":
            levels = np.array([generator("light", seed).uniform(0.3, 0.7) for seed in seeds])
            images[rows, 0] = (images[rows, 0] * levels[:, None, None, None]).astype(np.uint8)
        if self.spec.state_dim:
            known = (self.position, self._goal())[: self.spec.state_dim // 2]
            state[rows] = np.concatenate([part[rows] for part in known], axis=1)

    def _background(self, seeds: list[int]) -> NDArray[np.uint8]:
        side = self.spec.cameras[0].height
        boards = np.zeros((len(seeds), side, side, 3), np.uint8)
        if self.axis == "texture":
            checks = (np.indices((side, side)).sum(axis=0) // 4 % 2).astype(np.uint8)[..., None]
            for index, seed in enumerate(seeds):
                boards[index] = checks * generator("texture", seed).integers(0, 120, 3).astype(np.uint8)
        return boards

    def _square(
        self,
        images: NDArray[np.uint8],
        rows: NDArray[np.int64],
        centre: NDArray[np.float32],
        colour: NDArray[np.uint8],
        radius: float,
    ) -> None:
        """Draw squares with centres ``[N,2]`` and ``colour [3]`` or ``[N,3]`` into ``images[rows]``."""
        axis = np.linspace(-1, 1, self.spec.cameras[0].height, dtype=np.float32)
        near_x = np.abs(axis[None, None, :] - centre[:, 0, None, None]) < radius
        near_y = np.abs(axis[None, :, None] - centre[:, 1, None, None]) < radius
        inside = (near_x & near_y)[..., None]
        images[rows, 0] = np.where(inside, np.broadcast_to(colour, (len(rows), 3))[:, None, None], images[rows, 0])

    def instruction(self, task_id: int) -> str:
        return INSTRUCTIONS[self.spec.tasks[task_id]]

    def get_sim_state(self) -> dict[str, NDArray[np.float32]]:
        return {"position": self.position, "goals": self.goals}

    def set_sim_state(self, state: dict[str, NDArray[np.float32]]) -> None:
        self.position = state["position"]
        self.goals = state["goals"]

    def get_sim_row(self, row: int) -> dict[str, NDArray[np.float32]]:
        return {"position": self.position[row].copy(), "goals": self.goals[row].copy()}

    def set_sim_row(self, row: int, state: dict[str, NDArray[np.float32]]) -> None:
        self.position[row] = state["position"]
        self.goals[row] = state["goals"]

    def expert_actions(self) -> NDArray[np.float32]:
        """Move straight to the goal."""
        actions = np.zeros((self.spec.num_envs, self.spec.action_dim), np.float32)
        actions[:, :2] = np.clip((self._goal() - self.position) / _SPEED, -1, 1)
        return actions

    def _goal(self) -> NDArray[np.float32]:
        which = np.array([list(_COLOURS).index(task) for task in self.spec.tasks])[self.task_id]
        return self.goals[np.arange(len(which)), which]

    def _distance(self) -> NDArray[np.float32]:
        return np.linalg.norm(self._goal() - self.position, axis=1).astype(np.float32)
