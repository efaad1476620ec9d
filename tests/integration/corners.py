"""An environment that a policy learns in seconds: the colour of the whole picture tells which corner to go to."""

from __future__ import annotations

from typing import Any

import numpy as np

from embodrl.envs.toy import ToyVectorEnv
from embodrl.registry import ENVS
from embodrl.types import Observation

CORNERS = 0.6 * np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]], np.float32)
COLOURS = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]], np.uint8)


class Corners(ToyVectorEnv):
    """The toy environment with its goal in one of four corners, and the dot in the middle of a coloured picture."""

    def __init__(self, cameras: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(image_size=cameras[0]["height"], **options)

    def _begin(self, index: int, seed: int, task_id: int) -> None:
        super()._begin(index, seed, task_id)
        self.position[index] = 0.0
        self.goals[index] = CORNERS[np.random.default_rng(seed).integers(4)]

    def _observe(self) -> Observation:
        observation = super()._observe()
        corner = np.abs(CORNERS[None] - self._goal()[:, None]).sum(axis=2).argmin(axis=1)
        observation.images[:] = COLOURS[corner][:, None, None, None]
        return observation


ENVS.register("corners", Corners, "four corners, told apart by colour", tasks=("reach-red",), action_dim=7)
