"""An environment that does nothing but hand out an observation, so that only the transport is measured."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.base import VectorEnv
from embodrl.specs import ENVS
from embodrl.types import CameraSpec, EnvSpec, EnvStep, Observation


class EchoVectorEnv(VectorEnv):
    """Returns one prepared observation; its first pixel and the reward repeat the action, as proof of freshness."""

    def __init__(self, num_envs: int, image_size: int, action_dim: int) -> None:
        self.spec = EnvSpec(
            num_envs=num_envs,
            cameras=(CameraSpec("base_camera", image_size, image_size),),
            state_dim=0,
            action_dim=action_dim,
            action_low=(-1.0,) * action_dim,
            action_high=(1.0,) * action_dim,
            max_chunk=1,
            tasks=("echo",),
        )
        self._observation = Observation(
            np.random.default_rng(0).integers(0, 256, (num_envs, 1, image_size, image_size, 3), np.uint8),
            np.zeros((num_envs, 0), np.float32),
            ["do nothing"] * num_envs,
            np.zeros(num_envs, np.int32),
        )

    def reset(self, seeds: NDArray[np.int64], task_ids: NDArray[np.int32], indices: NDArray[np.int64]) -> Observation:
        return self._observation

    def chunk_step(self, actions: NDArray[np.float32], active: NDArray[np.bool_]) -> EnvStep:
        batch = self.spec.num_envs
        self._observation.images[:, 0, 0, 0, 0] = actions[:, 0, 0].astype(np.uint8)
        no = np.zeros((batch, 1), np.bool_)
        return EnvStep(
            observation=self._observation,
            reward=np.ascontiguousarray(actions[:, :, 0]),
            valid=~no,
            terminated=no,
            truncated=no,
            success=no[:, 0],
            episode_return=np.zeros(batch, np.float32),
            episode_length=np.zeros(batch, np.int32),
            episode_seed=np.zeros(batch, np.int64),
            final_mask=no[:, 0],
            final_observation=None,
        )

    def get_state(self) -> bytes:
        return b""

    def set_state(self, state: bytes) -> None:
        pass

    def close(self) -> None:
        pass


ENVS.add("bench_echo", EchoVectorEnv, "hands out one observation, for the transport benchmark")
