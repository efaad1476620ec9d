"""Learners: the part of a run that defines an iteration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from embodrl.hybrid_engines.base import TrainEngine
from embodrl.models.base import VLAPolicy
from embodrl.reporting.metrics_file import Row
from embodrl.storage.checkpoint import Checkpoint


@dataclass(frozen=True)
class LearnerState:
    """Checkpoint contents besides the engine's state: JSON, tensors by section and name, named bytes."""

    content: Mapping[str, object]
    tensors: Mapping[str, dict[str, Tensor]] = field(default_factory=dict[str, "dict[str, Tensor]"])
    blobs: Mapping[str, bytes] = field(default_factory=dict[str, bytes])


class Learner(ABC):
    """Defines an iteration. The trainer drives it, and evaluates, logs and saves in between.

    Args:
        policy: this process's policy; has the trained weights after ``engine.fetch``.

    Attributes:
        is_updating: an update is in progress: the current state can be neither saved nor undone.
        records_videos: evaluations write videos according to ``env.video``.
    """

    records_videos = False

    def __init__(self, policy: VLAPolicy, engine: TrainEngine) -> None:
        self.policy = policy
        self.engine = engine
        self.is_updating = False

    @abstractmethod
    def step(self, iteration: int) -> Row:
        """Run the iteration that follows this many; return its metrics, with the new number as ``iteration``.

        Raises:
            InterruptedError: the run is stopping before the update began: ``undo`` restores the state before the
                iteration.
        """

    @abstractmethod
    def evaluate(self, video_dir: Path | None, every_decoding: bool) -> Row:
        """Evaluate the policy with ``every_decoding`` or with that of evaluations on the way; return the metrics.

        Raises:
            InterruptedError: the run is stopping.
        """

    @abstractmethod
    def state(self) -> LearnerState:
        """Return the input of ``load_state`` that continues from here."""

    @abstractmethod
    def load_state(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint whose engine state is loaded.

        Raises:
            CheckpointError: the state was made with other settings.
        """

    def first_row(self) -> Row:
        """Return the row of the evaluation before the first update."""
        return {"iteration": 0}

    def begin(self) -> None:  # noqa: B027 - optional for learners, like the hooks below
        """Publish the run's initial weights."""

    def undo(self) -> None:  # noqa: B027
        """Return to the state before the interrupted iteration."""

    def prepare_save(self) -> None:  # noqa: B027
        """Drop state that checkpoints do not keep, so that a continued run and a resumed one behave alike."""

    def saved(self, iteration: int) -> None:  # noqa: B027
        """Run follow-up work after the checkpoint of an iteration is written."""

    def finish(self) -> None:  # noqa: B027
        """Run follow-up work after the last checkpoint of a finished run."""

    def release_after_save(self) -> None:  # noqa: B027
        """Free device memory that saving brought back."""
