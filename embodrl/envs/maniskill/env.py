"""ManiSkill as a VectorEnv: its scenes under the stepping shared by all simulators.

Shapes: B environments, A action dimensions, V cameras, H x W image, S state dimensions.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.maniskill.fleet import Fleet, FleetState, JournalArrays
from embodrl.envs.maniskill.tasks import TASKS
from embodrl.envs.stepping import CameraSettings, EpisodeRules, SteppingEnv, StepResult, make_spec


class ManiSkillVectorEnv(SteppingEnv):
    """B ManiSkill environments in this process.

    The arguments are the settings of ``ManiSkillConfig`` with the fields of ``EpisodeRules``; the dense reward is
    ManiSkill's normalised one. Tasks are keys of ``TASKS``, with ``physx_cuda`` exactly one. Cameras ``[{name, height,
    width, fov_rad, eye, target}]`` are all of one size; None keeps the task's own. ``include_state`` adds joint
    positions and velocities to the observation, ``full_state`` the task's part of ManiSkill's own state observation,
    such as object poses.
    """

    def __init__(
        self,
        num_envs: int,
        tasks: list[str],
        cameras: Sequence[CameraSettings],
        max_episode_steps: int = 50,
        reward_mode: str = "dense_delta",
        success_bonus: float = 1.0,
        include_state: bool = False,
        full_state: bool = False,
        include_images: bool = True,
        auto_reset: bool = True,
        ignore_terminations: bool = False,
        max_chunk: int = 8,
        sim_backend: str = "auto",
        render_backend: str = "auto",
        render_detail: str = "auto",
        mesh_decimation: float | str | None = "auto",
        video_size: tuple[int, int] = (256, 256),
        video_fps: float | None = None,
        shaping_gamma: float = 1.0,
        discounts_actions: bool = False,
    ) -> None:
        import mani_skill.envs  # noqa: F401

        # Imports live as long as the process, and ManiSkill collects garbage whenever it builds a scene.
        gc.freeze()
        self._fleet = Fleet(
            num_envs,
            tuple(tasks),
            {
                "cameras": {camera["name"]: camera for camera in cameras},
                "sim_backend": "physx_cuda" if sim_backend == "physx_cuda" else "physx_cpu",
                "render_backend": render_backend,
                "render_detail": render_detail,
                "mesh_decimation": mesh_decimation,
                "human_size": (video_size[0], video_size[1]),
                "full_state": full_state,
                "axis": None,
            },
        )
        gc.freeze()  # also the scenes
        first = self._fleet.any_sim()
        self._include_images = include_images
        if include_images:
            # The first image compiles shaders, which takes seconds: part of the start, not of a reset.
            first.images()
        bounds = (first.action_low, first.action_high)
        state_dim = first.state_dim if include_state else 0
        spec = make_spec(num_envs, tasks, cameras, bounds, state_dim, max_chunk, first.control_hz)
        ends = (auto_reset, ignore_terminations)
        shaping = (shaping_gamma, discounts_actions)
        rules = EpisodeRules(max_episode_steps, reward_mode, success_bonus, *ends, *shaping)
        super().__init__(spec, rules, video_fps)

    def assign(self, rows: NDArray[np.int64], task_ids: NDArray[np.int32]) -> None:
        self._fleet.assign(rows, task_ids)

    def begin(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> None:
        self._fleet.reset(rows, seeds)

    def step_rows(self, actions: NDArray[np.float32], running: NDArray[np.bool_]) -> StepResult:
        return StepResult(*self._fleet.step(actions, running))

    def draw(self, rows: NDArray[np.int64], images: NDArray[np.uint8], state: NDArray[np.float32]) -> None:
        if self._include_images:
            self._fleet.render(rows, images)
        if self.spec.state_dim:
            state[rows] = self._fleet.state(rows)

    def instruction(self, task_id: int) -> str:
        return TASKS[self.spec.tasks[task_id]].instruction

    def perturb(self, axis: str) -> None:
        self._fleet.perturb(axis)

    def first_reward(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._fleet.dense_reward(rows)

    def film(self, row: int) -> NDArray[np.uint8]:
        return self._fleet.render_human(row)

    def get_sim_state(self) -> FleetState:
        """On a CPU the journals since the scenes were built, on a GPU the physical state."""
        return self._fleet.get_state()

    def set_sim_state(self, state: FleetState) -> None:
        """Bit-exact on a CPU, approximate on a GPU."""
        self._fleet.set_state(state)

    def get_sim_row(self, row: int) -> JournalArrays:
        """CPU only."""
        return self._fleet.get_scene(row)

    def set_sim_row(self, row: int, state: JournalArrays) -> None:
        """CPU only."""
        self._fleet.set_scene(row, state)

    def rebuild(self) -> None:
        """Build new scenes, on a CPU."""
        self._fleet.rebuild()

    def mark(self) -> None:
        self._fleet.mark()

    def rewind(self) -> None:
        self._fleet.rewind()

    def expert_reset(self, rows: list[int]) -> None:
        self._fleet.expert_reset(np.asarray(rows, np.int64))

    def expert_actions(self) -> NDArray[np.float32]:
        return self._fleet.expert_actions()

    def close(self) -> None:
        super().close()
        self._fleet.close()
