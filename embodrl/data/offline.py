"""A dataset for offline algorithms: frames, the actions that followed, and their outcomes.

Shapes: N frames, B drawn frames, C actions of a chunk, A action dimensions, n chunks of a return.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.data.demos import Demos
from embodrl.errors import CheckpointError
from embodrl.types import Observation

DATASET = "dataset"
"""Checkpoint key: checksum of the training data."""


@dataclass(frozen=True)
class ChunkOutcomes:
    """Outcome of the chunk that starts at each frame.

    Attributes:
        returns: ``float32[N]``, discounted rewards up to the bootstrap.
        discount: ``float32[N]``, factor of the bootstrap value; 0 after a termination.
        next: ``int64[N]``, frame of the bootstrap; any frame where ``discount`` is 0.
        known: ``bool[N]``, False where an episode was cut off within the chunk: its last observation is not recorded.
    """

    returns: Tensor
    discount: Tensor
    next: Tensor
    known: Tensor


@dataclass(frozen=True)
class OfflineData:
    """Training data of a run without rollouts.

    Attributes:
        demos: demonstrations whose actions are the executed ones.
        chunk: C.
        seen: inputs of the critics, ``[N,...]`` by name; empty for algorithms without critics.
        outcomes: chunk outcomes, for algorithms with critics.
        positive: ``bool[N]``, the advantage indicator of RECAP; None for other algorithms.
    """

    demos: Demos
    chunk: int
    seen: Mapping[str, Tensor]
    outcomes: ChunkOutcomes | None = None
    positive: NDArray[np.bool_] | None = None

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Sample frames ``int64[count]`` uniformly with replacement, from those with a known outcome."""
        if self.outcomes is None:
            return torch.randint(len(self.demos.actions), (count,), generator=generator)
        usable = self.outcomes.known.nonzero().squeeze(-1)
        return usable[torch.randint(len(usable), (count,), generator=generator)]

    def observation(self, frames: Tensor, instructions: Sequence[str] | None = None) -> Observation:
        """Return the observation; ``instructions``, if given, replace the dataset's."""
        index = frames.numpy()
        demos = self.demos
        words = list(instructions or demos.said(index))
        return Observation(demos.images[index], demos.state[index], words, np.zeros(len(index), np.int32))

    def actions(self, frames: Tensor, horizon: int) -> tuple[Tensor, Tensor]:
        """Return the executed actions ``float32[B,H,A]`` from each frame on, and ``bool[B,H]``: within the episode."""
        actions, inside = self.demos.action_chunks(frames.numpy(), horizon)
        return torch.from_numpy(actions), torch.from_numpy(inside)

    def inputs(self, frames: Tensor) -> dict[str, Tensor]:
        """Return the inputs of the critics, ``[B,...]`` by name."""
        return {name: column[frames] for name, column in self.seen.items()}

    def state(self) -> dict[str, Tensor]:
        """Return a checksum for the checkpoint; the dataset is read again on resume."""
        return {DATASET: torch.tensor(self._checksum)}

    @cached_property
    def _checksum(self) -> int:
        result = self.demos.checksum
        for piece in (None if self.outcomes is None else self.outcomes.returns.numpy(), self.positive):
            result = result if piece is None else zlib.crc32(np.ascontiguousarray(piece).data, result)
        return result

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from ``state``; CheckpointError if the dataset has changed."""
        if not torch.equal(state.get(DATASET, torch.tensor(-1)), self.state()[DATASET]):
            raise CheckpointError(
                "the dataset is not the one the run started with",
                "resume with the same algorithm.off_policy.demos, and with dataset and labels unchanged",
                code="offline-other-data",
            )
