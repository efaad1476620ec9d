"""A client that gets one action at a time: the rest of its chunk is kept for its next observations."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.serving.core import ModelCore
from embodrl.types import Observation


class Session:
    """The chunk that a client is in the midst of.

    Args:
        core: the model.
        client: who asks; see ``ModelCore.act``.
        protocol: for the metrics.
        horizon: actions of a chunk that are handed out before the policy is asked again.
    """

    def __init__(self, core: ModelCore, client: object, protocol: str, horizon: int) -> None:
        self._core = core
        self._client = client
        self._protocol = protocol
        self._horizon = horizon
        self._left: list[NDArray[np.float32]] = []
        self._version = 0

    def reset(self) -> None:
        """Forget the chunk: an episode begins."""
        self._left = []

    async def next_action(self, observation: Observation) -> tuple[NDArray[Any], int]:
        """Return ``float32[A]``, and the version of the weights that chose it; raises as ``ModelCore.act``."""
        if not self._left:
            chunk = await self._core.act(observation, self._client, self._protocol)
            self._left = list(chunk.actions[: self._horizon])
            self._version = chunk.version
        return self._left.pop(0), self._version
