"""The interface of every simulator: a batch of environments that steps in chunks.

Legend: B environments, C actions in a chunk, A action dimensions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.types import EnvSpec, EnvStep, Observation


class VectorEnv(ABC):
    """B environments of one process.

    A constructor takes keyword arguments of plain types only (they cross a process border as JSON).
    """

    spec: EnvSpec

    @abstractmethod
    def reset(self, seeds: NDArray[np.int64], task_ids: NDArray[np.int32], indices: NDArray[np.int64]) -> Observation:
        """Start new episodes.

        Args:
            seeds: ``int64[N]``, one initial state each; the same seed and task give the same state.
            task_ids: ``int32[N]``, index into ``spec.tasks``.
            indices: ``int64[N]``, which environments.

        Returns:
            The observation of all B environments.
        """

    @abstractmethod
    def chunk_step(self, actions: NDArray[np.float32], active: NDArray[np.bool_]) -> EnvStep:
        """Play ``actions float32[B,C,A]`` in order; render only what the policy will see next.

        Rows where ``active bool[B]`` is False are not simulated: their ``valid`` is False throughout.
        """

    @abstractmethod
    def get_state(self) -> bytes:
        """Return the full simulator state (all environments, random generators, counters), free of pickled code."""

    @abstractmethod
    def set_state(self, state: bytes) -> None:
        """Continue from a state of ``get_state`` to the bit."""

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """Answer a rare, small request (JSON in, JSON out), e.g. ``expert_action``; simulators may extend it."""
        raise NotImplementedError(f"{type(self).__name__} has no method '{method}'")

    @abstractmethod
    def close(self) -> None:
        """Free the simulator."""
