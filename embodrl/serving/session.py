"""A client that gets one action at a time; the rest of its chunk answers its next observations."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.serving.core import ModelCore
from embodrl.types import Observation


class ChunkSession:
    """The current chunk of a client, of which ``horizon`` actions are executed before the policy is queried again."""

    def __init__(self, core: ModelCore, client: object, protocol: str, horizon: int) -> None:
        self._core = core
        self._client = client
        self._protocol = protocol
        self._horizon = horizon
        self._left: list[NDArray[np.float32]] = []
        self._version = 0

    def reset(self) -> None:
        """Drop the chunk at the start of an episode."""
        self._left = []

    async def next_action(self, observation: Observation) -> tuple[NDArray[Any], int]:
        """Return ``float32[A]`` and the version of its weights; raises as ``ModelCore.act``."""
        if not self._left:
            chunk = await self._core.act(observation, self._client, self._protocol)
            self._left = list(chunk.actions[: self._horizon])
            self._version = chunk.version
        return self._left.pop(0), self._version
