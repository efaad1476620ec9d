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
"""The non-tensor part of an engine's state: ``version`` and ``nonfinite_in_row``."""
FileFacts = dict[str, dict[str, int | str]]
"""By path inside a checkpoint: ``num_bytes`` and ``sha256``."""


def counters_of(fields: Fields) -> Counters:
    """Read the counters of a saved engine."""
    return {name: fields.integer(name) for name in fields}


@dataclass(frozen=True)
class EngineState:
    """Everything an engine needs to continue; ``tensors`` has ``policy``, ``optimizer`` and, if kept, ``reference``."""

    tensors: dict[str, dict[str, Tensor]]
    state: Counters


@dataclass(frozen=True)
class OptimizerStep:
    """Outcome of an optimizer step.

    Attributes:
        applied: False if the loss or the gradient was not finite; the weights are then unchanged.
        grad_norm: L2 norm over all gradients before clipping.
    """

    applied: bool
    grad_norm: float


class TrainEngine(ABC):
    """Holds the trained weights and their optimizer, in this process or in others.

    ``memory`` are the tensors that ``offload`` moves off the device; None for none.
    """

    memory: Offload | None = None

    @property
    @abstractmethod
    def version(self) -> int:
        """Number of completed updates; also the version of the weights."""

    @abstractmethod
    def attach(self, update: str, config: Config, on_step: Callable[[int, int], None] | None = None) -> Any:
        """Create an update that drives this engine, at the engine's current state.

        Args:
            update: ``module:Class``, constructed with the process's ``PolicyTrainEngine``, the configuration and
                ``on_step``.
            config: run configuration.
            on_step: called with the finished and the total number of optimizer steps of an update; never from other
                processes.

        Returns:
            the update, or a proxy that calls it in every training process and returns the answer of rank 0.
        """

    @abstractmethod
    def complete_update(self) -> None:
        """Increment ``version``.

        Raises:
            NonFiniteError: weights are not finite.
        """

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of the policy, without copies."""

    def fetch(self) -> None:  # noqa: B027 - most engines train the policy itself
        """Copy the weights into the engine's original policy, if they are elsewhere."""

    @abstractmethod
    def state_dict(self) -> EngineState:
        """Return weights, optimizer state and counters, without copies."""

    @abstractmethod
    def load_state_dict(self, saved: EngineState) -> None:
        """Restore a saved state.

        Raises:
            CheckpointError: names or shapes do not match this policy.
        """

    @abstractmethod
    def counters(self) -> Counters:
        """Return the JSON-serialisable part of the state."""

    @abstractmethod
    def save_shards(self, directory: Path) -> FileFacts:
        """Write the state's tensors, each process its shard; return size and SHA-256 of all files by relative path.

        See ``sharded_checkpoint.save_state``.

        Raises:
            OSError: the files could not be written.
        """

    @abstractmethod
    def load_shards(self, directory: Path, counters: Mapping[str, int]) -> None:
        """Restore the output of ``save_shards``, possibly from another backend or number of processes.

        Raises:
            CheckpointError: the shards belong to another policy, or are unreadable.
        """

    @abstractmethod
    def shapes(self) -> StateShapes:
        """Return the sections, names and shapes of the state, and its size once every weight has been trained."""

    def check(self) -> None:  # noqa: B027 - most engines have no other processes
        """Raise if a process that the engine needs is dead.

        Raises:
            WorkerDied: with its rank and its last output.
        """

    def close(self) -> None:  # noqa: B027 - most engines hold no resources
        """Stop the processes that the engine started."""

    def onload(self) -> None:
        """Bring back the offloaded tensors and the driver's policy."""
        if self.memory is not None:
            self.memory.onload()

    def present(self) -> AbstractContextManager[None]:
        """Return a context in which the weights of the driver's policy are on their device."""
        return nullcontext() if self.memory is None else self.memory.present()

    def offload(self) -> OffloadReport | None:
        """Offload training-only tensors until needed; return the memory before and after, None if unmoved."""
        return None if self.memory is None else self.memory.offload()

    def take_peak_memory(self) -> int | None:
        """Return the peak GPU bytes of any training process since the last call; None on a CPU."""
        return None
