"""Learning from records: the part of an iteration that draws from a replay buffer or a dataset."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from embodrl.config.schema import AlgorithmConfig
from embodrl.data.replay import ReplayStores
from embodrl.hybrid_engines.training.off_policy import OffPolicyEngine
from embodrl.learners.base import LearnerState
from embodrl.storage.checkpoint import Checkpoint


class RecordLearner(ABC):
    """Updates the weights once per iteration, through calls that every train engine has."""

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
        """Return what ``load_state`` needs to continue from here, apart from the engine's state and the records."""
        return LearnerState({})

    def load_state(self, checkpoint: Checkpoint) -> None:  # noqa: B027 - most is in the engine's state
        """Continue from a checkpoint, whose engine state is loaded.

        Raises:
            CheckpointError: it was made with other settings.
        """


class SmallActorLearner(RecordLearner):
    """Leaves all to an engine that has the critics: the actor's gradients flow through them.

    Args:
        engine: native engine with critics.
        stores: replay buffers that it draws from.
        algorithm: settings of the loss.
    """

    def __init__(self, engine: OffPolicyEngine, stores: ReplayStores, algorithm: AlgorithmConfig) -> None:
        self.engine = engine
        self.stores = stores
        self.algorithm = algorithm

    def learn(self, generator: torch.Generator) -> dict[str, float | None]:
        return self.engine.learn(self.stores, self.algorithm, generator)
