"""ManiSkill as a VectorEnv: chunks, auto-reset, grouped resets, success, videos, exact state.

Legend: B environments, C actions in a chunk, A action dimensions, V cameras, H x W image.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.base import VectorEnv
from embodrl.envs.codec import decode, encode
from embodrl.envs.maniskill.fleet import Fleet
from embodrl.envs.maniskill.tasks import TASKS
from embodrl.envs.maniskill.video import VideoWriter
from embodrl.types import CameraSpec, EnvSpec, EnvStep, Observation

_COLUMNS = ("_elapsed", "_returned", "_solved", "_seed", "_potential", "_images", "_state")


def next_seed(seed: int) -> int:
    """Return the seed of the episode after the one of ``seed``; environments of a group thus stay alike."""
    return int(np.random.SeedSequence([seed, 0x5EED]).generate_state(1)[0] >> 1)


class ManiSkillVectorEnv(VectorEnv):
    """B ManiSkill environments in this process.

    Args:
        num_envs: B.
        tasks: keys of ``TASKS``; with ``physx_cuda`` exactly one.
        cameras: ``[{name, height, width, fov_rad, eye, target}]``, all of one size; None keeps the task's own.
        max_episode_steps: environment steps after which an episode is truncated.
        reward_mode: ``dense_delta`` (change of ManiSkill's normalised dense reward, plus the bonus) or ``sparse``.
        success_bonus: reward at the first success of an episode.
        include_state: add joint positions and velocities to the observation.
        auto_reset: begin the next episode at the end of the chunk in which one has ended.
        ignore_terminations: only the step limit ends an episode.
        max_chunk: largest C.
        sim_backend: physx_cpu or physx_cuda.
        render_backend: auto, cpu or gpu.
        mesh_decimation: see ``ManiSkillSim``.
        video_size: height and width in pixels of videos.
        video_fps: frames a second of videos.
    """

    def __init__(
        self,
        num_envs: int,
        tasks: list[str],
        cameras: list[dict[str, Any]],
        max_episode_steps: int = 50,
        reward_mode: str = "dense_delta",
        success_bonus: float = 1.0,
        include_state: bool = False,
        auto_reset: bool = True,
        ignore_terminations: bool = False,
        max_chunk: int = 8,
        sim_backend: str = "physx_cpu",
        render_backend: str = "auto",
        mesh_decimation: float | None = None,
        video_size: tuple[int, int] = (256, 256),
        video_fps: int = 20,
    ) -> None:
        self._max_episode_steps = max_episode_steps
        self._dense = reward_mode == "dense_delta"
        self._bonus = success_bonus
        self._include_state = include_state
        self._auto_reset = auto_reset
        self._ignore_terminations = ignore_terminations
        self._fleet = Fleet(
            num_envs,
            tuple(tasks),
            {
                "cameras": {c["name"]: {k: v for k, v in c.items() if k != "name"} for c in cameras},
                "sim_backend": sim_backend,
                "render_backend": render_backend,
                "mesh_decimation": mesh_decimation,
                "human_size": tuple(video_size),
            },
        )
        # What was built so far lives as long as the process; ManiSkill collects garbage whenever it builds a scene.
        gc.freeze()
        first = self._fleet.any_sim()
        # The first picture compiles shaders, which takes seconds; that belongs to the start, not to a reset.
        first.images()
        self.spec = EnvSpec(
            num_envs=num_envs,
            cameras=tuple(CameraSpec(c["name"], c["height"], c["width"]) for c in cameras),
            state_dim=first.state_dim if include_state else 0,
            action_dim=len(first.action_low),
            action_low=first.action_low,
            action_high=first.action_high,
            max_chunk=max_chunk,
            tasks=tuple(tasks),
        )
        size = self.spec.cameras[0]
        self._images = np.zeros((num_envs, len(cameras), size.height, size.width, 3), np.uint8)
        self._state = np.zeros((num_envs, self.spec.state_dim), np.float32)
        self._elapsed = np.zeros(num_envs, np.int32)
        self._returned = np.zeros(num_envs, np.float32)
        self._solved = np.zeros(num_envs, np.bool_)
        self._seed = np.full(num_envs, -1, np.int64)
        self._potential = np.zeros(num_envs, np.float32)
        self._video = VideoWriter(video_fps)

    # -- stepping -----------------------------------------------------------------------------------------------------

    def reset(self, seeds: NDArray[np.int64], task_ids: NDArray[np.int32], indices: NDArray[np.int64]) -> Observation:
        """See VectorEnv."""
        self._fleet.assign(indices, task_ids)
        self._begin(indices, seeds)
        self._render(indices)
        return self._observation()

    def chunk_step(self, actions: NDArray[np.float32], active: NDArray[np.bool_]) -> EnvStep:
        """See VectorEnv."""
        num_envs, chunk, _ = actions.shape
        reward = np.zeros((num_envs, chunk), np.float32)
        valid, terminated, truncated = (np.zeros((num_envs, chunk), np.bool_) for _ in range(3))
        running = active.copy()
        for column in range(chunk):
            if not running.any():
                break
            valid[:, column] = running
            reward[:, column], first_success = self._substep(actions[:, column], running)
            if not self._ignore_terminations:
                terminated[:, column] = first_success
            truncated[:, column] = running & ~terminated[:, column] & (self._elapsed >= self._max_episode_steps)
            running &= ~(terminated[:, column] | truncated[:, column])
        return self._finish(active, reward, valid, terminated, truncated)

    def _substep(
        self, actions: NDArray[np.float32], running: NDArray[np.bool_]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Play one action in the running rows; return reward ``float32[B]`` and first success ``bool[B]``."""
        potential, success = self._fleet.step(actions, running)
        first_success = running & success & ~self._solved
        self._solved |= first_success
        reward = self._bonus * first_success.astype(np.float32)
        if self._dense:
            reward += np.where(running, potential - self._potential, 0)
            self._potential = np.where(running, potential, self._potential)
        self._elapsed += running
        self._returned += reward
        for row in self._video.rows(running):
            self._video.add(row, self._fleet.render_human(row))
        return reward, first_success

    def _finish(
        self,
        active: NDArray[np.bool_],
        reward: NDArray[np.float32],
        valid: NDArray[np.bool_],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
    ) -> EnvStep:
        """Render what the policy sees next, begin new episodes, and put the result together."""
        final_mask = np.asarray(truncated.any(axis=1))
        done = final_mask | np.asarray(terminated.any(axis=1))
        outcome = {
            "success": self._solved.copy(),
            "episode_return": self._returned.copy(),
            "episode_length": self._elapsed.copy(),
            "episode_seed": self._seed.copy(),
        }
        final_observation = None
        if final_mask.any():
            self._render(np.flatnonzero(final_mask))
            final_observation = self._observation()
        for row in self._video.rows(done):
            self._video.finish(row, bool(self._solved[row]))
        ended = np.flatnonzero(done)
        if self._auto_reset and len(ended):
            self._begin(ended, np.array([next_seed(int(s)) for s in self._seed[ended]], np.int64))
        self._render(np.flatnonzero(active & (~done | self._auto_reset)))
        return EnvStep(
            observation=self._observation(),
            reward=reward,
            valid=valid,
            terminated=terminated,
            truncated=truncated,
            final_mask=final_mask,
            final_observation=final_observation,
            **outcome,
        )

    def _begin(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> None:
        self._fleet.reset(rows, seeds)
        self._elapsed[rows] = 0
        self._returned[rows] = 0
        self._solved[rows] = False
        self._seed[rows] = seeds
        if self._dense:
            self._potential[rows] = self._fleet.dense_reward(rows)

    def _render(self, rows: NDArray[np.int64]) -> None:
        if not len(rows):
            return
        self._fleet.render(rows, self._images)
        if self._include_state:
            self._state[rows] = self._fleet.proprioception(rows)

    def _observation(self) -> Observation:
        task_id = self._fleet.task_id
        return Observation(
            self._images.copy(),
            self._state.copy(),
            [TASKS[self.spec.tasks[i]].instruction for i in task_id],
            task_id.copy(),
        )

    # -- state and requests -------------------------------------------------------------------------------------------

    def get_state(self) -> bytes:
        """See VectorEnv; on a CPU what was done since the scenes were built, on a GPU the physical state."""
        return encode({"fleet": self._fleet.get_state(), **{name: getattr(self, name) for name in _COLUMNS}})

    def set_state(self, state: bytes) -> None:
        """See VectorEnv; to the bit on a CPU, closely on a GPU."""
        content = decode(state)
        self._fleet.set_state(content.pop("fleet"))
        for name, value in content.items():
            setattr(self, name, value.copy())

    def get_row_state(self, row: int) -> dict[str, Any]:
        """See VectorEnv; on a CPU only."""
        return {"scene": self._fleet.get_scene(row), **{name: getattr(self, name)[row].copy() for name in _COLUMNS}}

    def set_row_state(self, row: int, state: dict[str, Any]) -> None:
        """See VectorEnv; on a CPU only."""
        self._fleet.set_scene(row, state["scene"])
        for name in _COLUMNS:
            getattr(self, name)[row] = state[name]

    def set_auto_reset(self, value: bool) -> None:
        """See VectorEnv."""
        self._auto_reset = value

    def rebuild(self) -> None:
        """See VectorEnv; new scenes, on a CPU."""
        self._fleet.rebuild()

    def mark(self) -> None:
        """See VectorEnv."""
        self._fleet.mark()

    def rewind(self) -> None:
        """See VectorEnv."""
        self._fleet.rewind()

    def start_video(self, row: int, path: str) -> None:
        """See VectorEnv."""
        self._video.start(row, path)

    def expert_reset(self, rows: list[int]) -> None:
        """See VectorEnv."""
        self._fleet.expert_reset(np.asarray(rows, np.int64))

    def expert_actions(self) -> NDArray[np.float32]:
        """See VectorEnv."""
        return self._fleet.expert_actions()

    def close(self) -> None:
        """See VectorEnv."""
        self._video.close()
        self._fleet.close()
