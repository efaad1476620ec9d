"""Learning from records: the part of an iteration that draws from a replay buffer or a dataset."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch

from embodrl.learners.base import LearnerState
from embodrl.storage.checkpoint import Checkpoint


class ReplayUpdater(ABC):
    """Draws the data of an iteration's optimizer steps, and passes it to an update in the engine's process.

    ``on_step`` is called with the finished and the total number of steps of an update.
    """

    def __init__(self, on_step: Callable[[int, int], None] | None = None) -> None:
        self._on_step = on_step

    def steps(self, total: int) -> Iterator[int]:
        """Count the optimizer steps of an update from 0, and report each one when done."""
        for index in range(total):
            yield index
            if self._on_step is not None:
                self._on_step(index + 1, total)

    @abstractmethod
    def learn(self, generator: torch.Generator) -> dict[str, float | None]:
        """Take the optimizer steps of an iteration and increment the engine's version; return ``train/...`` metrics.

        ``generator``, on the CPU, is the source of the draws.

        Raises:
            NonFiniteError: a loss or several consecutive steps were not finite.
        """

    def state(self) -> LearnerState:
        """Return the input of ``load_state``, without the engine's state and the records."""
        return LearnerState({})

    def load_state(self, checkpoint: Checkpoint) -> None:  # noqa: B027 - most state is in the engine
        """Continue from a checkpoint whose engine state is loaded.

        Raises:
            CheckpointError: the state was made with other settings.
        """
