"""The interfaces of training and rollout backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from embodrl.config.schema import Config
from embodrl.fields import Fields
from embodrl.hybrid_engines.offload import Offload, OffloadReport
from embodrl.hybrid_engines.training.state_shapes import StateShapes

Counters = dict[str, int]
"""The part of an engine's state that is not a tensor: ``version`` and ``nonfinite_in_row``."""
FileFacts = dict[str, dict[str, int | str]]
"""By path inside a checkpoint: ``num_bytes`` and ``sha256``."""


def counters_of(fields: Fields) -> Counters:
    """Read the counters of a saved engine."""
    return {name: fields.integer(name) for name in fields}


@dataclass(frozen=True)
class EngineState:
    """All that an engine needs to continue where it stopped.

    Attributes:
        tensors: ``policy``, ``optimizer`` and, where there is one, ``reference``, each by name.
        state: what can be written as JSON.
    """

    tensors: dict[str, dict[str, Tensor]]
    state: Counters


@dataclass(frozen=True)
class OptimizerStep:
    """Outcome of an optimizer step.

    Attributes:
        applied: False if the loss or the gradient was not finite, and the weights are as before.
        grad_norm: L2 norm over all gradients before clipping.
    """

    applied: bool
    grad_norm: float


class TrainEngine(ABC):
    """Holds the weights that train, and their optimizer; here or in other processes.

    Attributes:
        memory: what ``offload`` takes off the device; None for nothing.
    """

    memory: Offload | None = None

    @property
    @abstractmethod
    def version(self) -> int:
        """Completed updates; also the version of the weights."""

    @abstractmethod
    def attach(self, update: str, config: Config, on_step: Callable[[int, int], None] | None = None) -> Any:
        """Make an update that drives this engine, and stands where it stands.

        Args:
            update: ``module:Class``, made with a ``PolicyTrainEngine`` of that process, the configuration and
                ``on_step``.
            config: the run.
            on_step: called with how many optimizer steps of an update are done, and how many there are; not from other
                processes.

        Returns:
            the update, or what calls it in every training process and returns the answer of rank 0.
        """

    @abstractmethod
    def complete_update(self) -> None:
        """Raise ``version`` by one.

        Raises:
            NonFiniteError: weights are not finite.
        """

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of the policy, without copies."""

    def fetch(self) -> None:  # noqa: B027 - most train the policy itself
        """Bring the weights into the policy that the engine was made with, if they are elsewhere."""

    @abstractmethod
    def state_dict(self) -> EngineState:
        """Return weights, optimizer state and counters, without copies."""

    @abstractmethod
    def load_state_dict(self, saved: EngineState) -> None:
        """Go back to a saved state.

        Raises:
            CheckpointError: names or shapes are not those of this policy.
        """

    @abstractmethod
    def counters(self) -> Counters:
        """Return the part of the state that can be written as JSON."""

    @abstractmethod
    def save_shards(self, directory: Path) -> FileFacts:
        """Write the tensors of the state, each process what it holds; see ``sharded_checkpoint.save_state``.

        Returns:
            size and SHA-256 of all files by path inside the directory.

        Raises:
            OSError: they could not be written.
        """

    @abstractmethod
    def load_shards(self, directory: Path, counters: Mapping[str, int]) -> None:
        """Go back to what ``save_shards`` wrote, perhaps with another backend or number of processes.

        Raises:
            CheckpointError: it is of another policy, or can't be read.
        """

    @abstractmethod
    def shapes(self) -> StateShapes:
        """Return the sections, names and shapes of the state, and its size once every weight has been trained."""

    def check(self) -> None:  # noqa: B027 - most have nothing that could be gone
        """Raise if a process that the engine needs has gone.

        Raises:
            WorkerDied: with its rank and its last output.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """End the processes that the engine started."""

    def onload(self) -> None:
        """Bring back what ``offload`` took, and the driver's policy."""
        if self.memory is not None:
            self.memory.onload()

    def present(self) -> AbstractContextManager[None]:
        """Return a context in which the weights of the driver's policy are on their device."""
        return nullcontext() if self.memory is None else self.memory.present()

    def offload(self) -> OffloadReport | None:
        """Take off the device what only training needs; the next call that needs it brings it back.

        Returns:
            the memory before and after; None if nothing was moved.
        """
        return None if self.memory is None else self.memory.offload()

    def take_peak_memory(self) -> int | None:
        """Return the most bytes that a process which trains had allocated on its GPU since the last call.

        Returns:
            of several processes the largest number; None on a CPU.
        """
        return None
