"""What a learner is: the part of a run that says what an iteration does."""

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
    """What a learner keeps in a checkpoint, apart from the engine's state.

    Attributes:
        content: JSON.
        tensors: section -> name -> tensor.
        blobs: name -> bytes.
    """

    content: Mapping[str, object]
    tensors: Mapping[str, dict[str, Tensor]] = field(default_factory=dict[str, "dict[str, Tensor]"])
    blobs: Mapping[str, bytes] = field(default_factory=dict[str, bytes])


class Learner(ABC):
    """What an iteration does. The trainer walks it, and evaluates, logs and saves in between.

    Args:
        policy: of this process; has the weights that train after ``engine.fetch``.
        engine: holds the weights that train.

    Attributes:
        is_updating: an update has begun and is not complete: what there is can neither be saved nor undone.
        records_videos: evaluations write videos as ``env.video`` says.
    """

    records_videos = False

    def __init__(self, policy: VLAPolicy, engine: TrainEngine) -> None:
        self.policy = policy
        self.engine = engine
        self.is_updating = False

    @abstractmethod
    def step(self, iteration: int) -> Row:
        """Do what comes after so many iterations; return its metrics, with the new number as ``iteration``.

        Raises:
            InterruptedError: the run is to stop, and the update had not begun: ``undo`` leaves it as it was before.
        """

    @abstractmethod
    def evaluate(self, video_dir: Path | None) -> Row:
        """Measure the policy; return the metrics.

        Raises:
            InterruptedError: the run is to stop.
        """

    @abstractmethod
    def state(self) -> LearnerState:
        """Return what ``load_state`` needs to continue from here."""

    @abstractmethod
    def load_state(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint, whose engine state is loaded.

        Raises:
            CheckpointError: it was made with other settings.
        """

    def first_row(self) -> Row:
        """Return the row of a run that has done nothing yet, for its evaluation before the first update."""
        return {"iteration": 0}

    def begin(self) -> None:  # noqa: B027 - a learner need not do anything then, as below
        """Let others have the weights that the run begins with."""

    def undo(self) -> None:  # noqa: B027
        """Be as before the iteration that was interrupted."""

    def prepare_save(self) -> None:  # noqa: B027
        """Drop what a checkpoint does not keep, so that a run that continues and one that is resumed do the same."""

    def saved(self, iteration: int) -> None:  # noqa: B027
        """Do what may follow once a checkpoint after so many iterations is written."""

    def release_after_save(self) -> None:  # noqa: B027
        """Free what saving brought back to the device."""
