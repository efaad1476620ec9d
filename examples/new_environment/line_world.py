"""An environment from outside the package: a bright bar on a line, to be pushed to the right end.

PYTHONPATH=examples/new_environment embodrl train --config examples/new_environment/config.yaml
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.base import VectorEnv
from embodrl.envs.codec import decode, encode
from embodrl.registry import ENVS
from embodrl.types import CameraSpec, EnvSpec, EnvStep, Observation

ACTION_DIM = 7
STEP = 0.2
GOAL = 0.9


class LineWorld(VectorEnv):
    """B lines [0, 1], each with a bar that the first number of an action moves by up to 0.2.

    Args:
        num_envs: B.
        tasks: names of the tasks; this world knows one.
        cameras: ``[{name, height, width, ...}]`` as configured in ``env.cameras``.
        max_episode_steps: steps after which an episode is truncated.
        max_chunk: largest number of actions in a chunk.
        include_state: put the position into the observation.
        auto_reset: start the next episode at the end of the chunk in which one has ended.
        ignore_terminations: only the step limit ends an episode.
    """

    def __init__(
        self,
        num_envs: int,
        tasks: list[str],
        cameras: list[dict[str, Any]],
        max_episode_steps: int,
        max_chunk: int,
        include_state: bool,
        auto_reset: bool,
        ignore_terminations: bool,
    ) -> None:
        self.spec = EnvSpec(
            num_envs=num_envs,
            cameras=tuple(CameraSpec(camera["name"], camera["height"], camera["width"]) for camera in cameras),
            state_dim=1 if include_state else 0,
            action_dim=ACTION_DIM,
            action_low=(-1.0,) * ACTION_DIM,
            action_high=(1.0,) * ACTION_DIM,
            max_chunk=max_chunk,
            tasks=tuple(tasks),
        )
        self.max_episode_steps = max_episode_steps
        self.auto_reset = auto_reset
        self.ignore_terminations = ignore_terminations
        self.position = np.zeros(num_envs, np.float32)
        self.seed = np.zeros(num_envs, np.int64)
        self.elapsed = np.zeros(num_envs, np.int32)
        self.returned = np.zeros(num_envs, np.float32)
        self.solved = np.zeros(num_envs, np.bool_)

    def reset(self, seeds: NDArray[np.int64], task_ids: NDArray[np.int32], indices: NDArray[np.int64]) -> Observation:
        """See VectorEnv: the same seed always gives the same start."""
        for index, seed in zip(indices.tolist(), seeds.tolist(), strict=True):
            self._begin(index, seed)
        return self._observe()

    def chunk_step(self, actions: NDArray[np.float32], active: NDArray[np.bool_]) -> EnvStep:
        """See VectorEnv: rows that have ended, or are not active, stand still and are not valid."""
        batch, chunk, _ = actions.shape
        reward = np.zeros((batch, chunk), np.float32)
        valid, terminated, truncated = (np.zeros((batch, chunk), np.bool_) for _ in range(3))
        running = active.copy()
        for column in range(chunk):
            move = np.where(running, STEP * np.clip(actions[:, column, 0], -1, 1), 0).astype(np.float32)
            before, self.position = self.position, np.clip(self.position + move, 0, 1)
            first_success = running & (self.position >= GOAL) & ~self.solved
            self.solved |= first_success
            reward[:, column] = self.position - before + first_success
            self.returned += reward[:, column]
            self.elapsed += running
            valid[:, column] = running
            terminated[:, column] = first_success & (not self.ignore_terminations)
            truncated[:, column] = running & ~terminated[:, column] & (self.elapsed >= self.max_episode_steps)
            running &= ~(terminated[:, column] | truncated[:, column])
        final_mask = np.asarray(truncated.any(axis=1))
        final_observation = self._observe() if final_mask.any() else None
        outcome = (self.solved.copy(), self.returned.copy(), self.elapsed.copy(), self.seed.copy())
        if self.auto_reset:
            for index in np.flatnonzero((terminated | truncated).any(axis=1)).tolist():
                self._begin(index, int(np.random.SeedSequence(int(self.seed[index])).generate_state(1)[0]))
        observation = self._observe()
        return EnvStep(observation, reward, valid, terminated, truncated, *outcome, final_mask, final_observation)

    def get_state(self) -> bytes:
        """See VectorEnv: all that a resumed run needs."""
        return encode({name: getattr(self, name) for name in ("position", "seed", "elapsed", "returned", "solved")})

    def set_state(self, state: bytes) -> None:
        """See VectorEnv."""
        for name, value in decode(state).items():
            setattr(self, name, value)

    def set_auto_reset(self, value: bool) -> None:
        """See VectorEnv: evaluation plays without auto-reset."""
        self.auto_reset = value

    def close(self) -> None:
        """See VectorEnv."""

    def _begin(self, index: int, seed: int) -> None:
        self.position[index] = np.random.default_rng(seed).uniform(0, 0.5)
        self.seed[index], self.elapsed[index] = seed, 0
        self.returned[index], self.solved[index] = 0, False

    def _observe(self) -> Observation:
        camera = self.spec.cameras[0]
        images = np.zeros((self.spec.num_envs, len(self.spec.cameras), camera.height, camera.width, 3), np.uint8)
        columns = np.abs(np.linspace(0, 1, camera.width)[None] - self.position[:, None]) < 0.1
        images[:] = np.where(columns, 255, 0)[:, None, None, :, None]
        state = self.position[:, None].copy() if self.spec.state_dim else np.zeros((self.spec.num_envs, 0), np.float32)
        return Observation(
            images, state, ["push the bar to the right"] * self.spec.num_envs, np.zeros(self.spec.num_envs, np.int32)
        )


# What the rules want to know without building the environment: its tasks and the size of an action.
ENVS.register("line_world", LineWorld, "a bar to be pushed to the right", tasks=("push-right",), action_dim=ACTION_DIM)
