"""Learning from records: the part of an iteration that draws from a replay buffer or a dataset."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch

from embodrl.learners.base import LearnerState
from embodrl.storage.checkpoint import Checkpoint


class ReplayUpdater(ABC):
    """Draws what the optimizer steps of an iteration learn from, and hands it to an update where the engine is.

    Args:
        on_step: called with how many steps of an update are done, and how many there are.
    """

    def __init__(self, on_step: Callable[[int, int], None] | None = None) -> None:
        self._on_step = on_step

    def steps(self, total: int) -> Iterator[int]:
        """Count the optimizer steps of an update from 0, and report each when it is done."""
        for index in range(total):
            yield index
            if self._on_step is not None:
                self._on_step(index + 1, total)

    @abstractmethod
    def learn(self, generator: torch.Generator) -> dict[str, float | None]:
        """Take the optimizer steps of an iteration and raise the engine's version by one.

        Args:
            generator: source of the draws, on the CPU.

        Returns:
            metrics named ``train/...``.

        Raises:
            NonFiniteError: a loss or several steps in a row were not finite.
        """

    def state(self) -> LearnerState:
        """Return what ``load_state`` needs to continue from here, besides the engine's state and the records."""
        return LearnerState({})

    def load_state(self, checkpoint: Checkpoint) -> None:  # noqa: B027 - most is in the engine's state
        """Continue from a checkpoint, whose engine state is loaded.

        Raises:
            CheckpointError: it was made with other settings.
        """
