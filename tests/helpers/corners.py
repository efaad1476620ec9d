"""An environment that a policy learns in seconds: the colour of the whole picture tells which corner to go to."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.specs import ENVS

CORNERS = 0.6 * np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]], np.float32)
COLOURS = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]], np.uint8)


class Corners(ToyVectorEnv):
    """The toy environment with its goal in one of four corners, and the dot in the middle of a coloured picture."""

    def __init__(self, cameras: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(image_size=cameras[0]["height"], **options)

    def begin(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> None:
        super().begin(rows, seeds)
        self.position[rows] = 0.0
        for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
            self.goals[row] = CORNERS[np.random.default_rng(seed).integers(4)]

    def draw(self, rows: NDArray[np.int64], images: NDArray[np.uint8], state: NDArray[np.float32]) -> None:
        super().draw(rows, images, state)
        corner = np.abs(CORNERS[None] - self._goal()[rows, None]).sum(axis=2).argmin(axis=1)
        images[rows] = COLOURS[corner][:, None, None, None]


ENVS.add("corners", Corners, "four corners of different colours", tasks=("reach-red",), action_dim=7)
