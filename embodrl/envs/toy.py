"""A dot that has to be moved to a coloured goal: a language-conditioned environment without a simulator.

Deterministic, quick, and complete (auto-reset, truncation, several tasks, state transfer): for tests and first steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.base import VectorEnv
from embodrl.envs.codec import decode, encode
from embodrl.types import CameraSpec, EnvSpec, EnvStep, Observation

_COLOURS = {"reach-red": (255, 0, 0), "reach-green": (0, 255, 0)}
_INSTRUCTIONS = {
    "reach-red": "move the white dot to the red square",
    "reach-green": "move the white dot to the green square",
}
_SPEED = 0.15
_NEAR = 0.2
_COUNTERS = ("position", "goals", "task_id", "episode_seed", "elapsed", "returned", "solved")


class ToyVectorEnv(VectorEnv):
    """B boards [-1, 1]^2 with a white dot, a red and a green square; the task names the square to go to.

    Args:
        num_envs: B.
        tasks: any of ``reach-red`` and ``reach-green``.
        image_size: pixels, square.
        max_episode_steps: steps after which an episode is truncated.
        max_chunk: largest number of actions in a chunk.
        action_dim: at least 2; the first two move the dot by up to 0.15 a step, the others do nothing.
        include_state: put the dot's position into the observation.
        auto_reset: start the next episode at the end of the chunk in which one has ended.
        ignore_terminations: only the step limit ends an episode.
        seed: from which the seeds of auto-reset episodes follow, together with that of the episode before.
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
        auto_reset: bool = True,
        ignore_terminations: bool = False,
        seed: int = 0,
    ) -> None:
        self.spec = EnvSpec(
            num_envs=num_envs,
            cameras=(CameraSpec("base_camera", image_size, image_size),),
            state_dim=2 if include_state else 0,
            action_dim=action_dim,
            action_low=(-1.0,) * action_dim,
            action_high=(1.0,) * action_dim,
            max_chunk=max_chunk,
            tasks=tuple(tasks),
        )
        self._max_episode_steps = max_episode_steps
        self._auto_reset = auto_reset
        self._ignore_terminations = ignore_terminations
        self._seed = seed
        self.position = np.zeros((num_envs, 2), np.float32)
        self.goals = np.zeros((num_envs, 2, 2), np.float32)
        self.task_id = np.zeros(num_envs, np.int32)
        self.episode_seed = np.full(num_envs, -1, np.int64)
        self.elapsed = np.zeros(num_envs, np.int32)
        self.returned = np.zeros(num_envs, np.float32)
        self.solved = np.zeros(num_envs, np.bool_)

    def reset(self, seeds: NDArray[np.int64], task_ids: NDArray[np.int32], indices: NDArray[np.int64]) -> Observation:
        """See VectorEnv."""
        for seed, task_id, index in zip(seeds.tolist(), task_ids.tolist(), indices.tolist(), strict=True):
            self._begin(index, seed, task_id)
        return self._observe()

    def chunk_step(self, actions: NDArray[np.float32], active: NDArray[np.bool_]) -> EnvStep:
        """See VectorEnv; the reward is the way gained towards the goal, plus 1 at the first success."""
        batch, chunk, _ = actions.shape
        reward = np.zeros((batch, chunk), np.float32)
        valid, terminated, truncated = (np.zeros((batch, chunk), np.bool_) for _ in range(3))
        for column in range(chunk):
            running = active & ~(terminated | truncated).any(axis=1)
            before = self._distance()
            move = np.clip(actions[:, column, :2], -1, 1) * np.float32(_SPEED)
            self.position = np.where(running[:, None], np.clip(self.position + move, -1, 1), self.position)
            after = self._distance()
            first_success = running & (after < _NEAR) & ~self.solved
            self.solved |= first_success
            reward[:, column] = np.where(running, before - after + first_success, 0)
            self.returned += reward[:, column]
            self.elapsed += running
            valid[:, column] = running
            terminated[:, column] = first_success & (not self._ignore_terminations)
            truncated[:, column] = running & ~terminated[:, column] & (self.elapsed >= self._max_episode_steps)
        final_mask = np.asarray(truncated.any(axis=1))
        outcome: dict[str, Any] = {  # of the episode that ends here, before an auto-reset clears it
            "success": self.solved.copy(),
            "episode_return": self.returned.copy(),
            "episode_length": self.elapsed.copy(),
            "episode_seed": self.episode_seed.copy(),
        }
        final_observation = self._observe() if final_mask.any() else None
        if self._auto_reset:
            for index in np.flatnonzero((terminated | truncated).any(axis=1)).tolist():
                # No counter: what follows a reset depends on nothing before it.
                sequence = np.random.SeedSequence([self._seed, int(self.episode_seed[index]), 0x5EED])
                self._begin(index, int(sequence.generate_state(1)[0]), int(self.task_id[index]))
        return EnvStep(
            observation=self._observe(),
            reward=reward,
            valid=valid,
            terminated=terminated,
            truncated=truncated,
            final_mask=final_mask,
            final_observation=final_observation,
            **outcome,
        )

    def get_state(self) -> bytes:
        """See VectorEnv."""
        return encode({name: getattr(self, name) for name in _COUNTERS})

    def set_state(self, state: bytes) -> None:
        """See VectorEnv."""
        for name, value in decode(state).items():
            setattr(self, name, value)

    def get_row_state(self, row: int) -> dict[str, Any]:
        """See VectorEnv."""
        return {name: getattr(self, name)[row].copy() for name in _COUNTERS}

    def set_row_state(self, row: int, state: dict[str, Any]) -> None:
        """See VectorEnv."""
        for name in _COUNTERS:
            getattr(self, name)[row] = state[name]

    def set_auto_reset(self, value: bool) -> None:
        """See VectorEnv."""
        self._auto_reset = value

    def expert_actions(self) -> NDArray[np.float32]:
        """See VectorEnv; the straight way to the goal."""
        actions = np.zeros((self.spec.num_envs, self.spec.action_dim), np.float32)
        actions[:, :2] = np.clip((self._goal() - self.position) / _SPEED, -1, 1)
        return actions

    def close(self) -> None:
        """See VectorEnv."""

    def _begin(self, index: int, seed: int, task_id: int) -> None:
        random = np.random.default_rng(seed)
        self.position[index] = random.uniform(-0.9, 0.9, 2)
        self.goals[index] = random.uniform(-0.8, 0.8, (2, 2))
        self.task_id[index] = task_id
        self.episode_seed[index] = seed
        self.elapsed[index], self.returned[index], self.solved[index] = 0, 0.0, False

    def _goal(self) -> NDArray[np.float32]:
        which = np.array([list(_COLOURS).index(task) for task in self.spec.tasks])[self.task_id]
        return self.goals[np.arange(len(which)), which]

    def _distance(self) -> NDArray[np.float32]:
        return np.linalg.norm(self._goal() - self.position, axis=1).astype(np.float32)

    def _observe(self) -> Observation:
        size = self.spec.cameras[0].height
        axis = np.linspace(-1, 1, size, dtype=np.float32)
        images = np.zeros((self.spec.num_envs, 1, size, size, 3), np.uint8)
        things = [*((self.goals[:, i], colour, 0.2) for i, colour in enumerate(_COLOURS.values()))]
        for centre, colour, radius in [*things, (self.position, (255, 255, 255), 0.1)]:
            near_x = np.abs(axis[None, None, :] - centre[:, 0, None, None]) < radius
            near_y = np.abs(axis[None, :, None] - centre[:, 1, None, None]) < radius
            images[:, 0][near_x & near_y] = colour
        state = self.position.copy() if self.spec.state_dim else np.zeros((self.spec.num_envs, 0), np.float32)
        instructions = [_INSTRUCTIONS[self.spec.tasks[task]] for task in self.task_id.tolist()]
        return Observation(images, state, instructions, self.task_id.copy())
