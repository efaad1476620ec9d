"""The interfaces of training and rollout backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodrl.algorithms.advantages import Advantages
from embodrl.config.schema import AlgorithmConfig
from embodrl.data.batch import Batch
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.fields import Fields
from embodrl.hybrid_engines.offload import Offload, OffloadReport

if TYPE_CHECKING:
    from embodrl.hybrid_engines.training.engine_state import HeldState

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
    """Holds the weights that train, and their optimizer.

    Attributes:
        state: state of an engine that trains in this process.
        memory: what ``offload`` takes off the device; None for nothing.
        version: completed updates; also the version of the weights.
        sections: parts of the state that there always are; ``reference`` may come with them.
        on_step: called with how many optimizer steps of an update are done, and how many there are.
    """

    version: int
    state: HeldState[Any]
    memory: Offload | None = None
    sections: tuple[str, ...] = ("policy", "optimizer")
    on_step: Callable[[int, int], None] | None = None

    def steps(self, total: int) -> Iterator[int]:
        """Count the optimizer steps of an update from 0, and report each when it is done."""
        for index in range(total):
            yield index
            if self.on_step is not None:
                self.on_step(index + 1, total)

    @abstractmethod
    def update(
        self,
        batch: TrajectoryBatch,
        advantages: Advantages,
        algorithm: AlgorithmConfig,
        generator: torch.Generator,
    ) -> dict[str, float]:
        """Train on a rollout and raise ``version`` by one.

        Args:
            batch: the rollout.
            advantages: of its chunks.
            algorithm: loss, epochs, sampling.
            generator: on the CPU; shuffles the chunks.

        Returns:
            metrics named ``train/...``, and ``staleness/...`` where chunks may be of older policies.

        Raises:
            NonFiniteError: several steps in a row were not finite.
            EmbodrlError: a chunk has a version above the engine's, or the batch lacks a column that the loss needs.
        """

    @abstractmethod
    def imitate(self, batch: Batch, learning_rate: float, label_smoothing_bins: float) -> dict[str, float]:
        """Take one optimizer step of supervised fine-tuning.

        Args:
            batch: flat, on the CPU: ``VLAPolicy.sft_inputs`` with ``action_mask bool[N,H]``.
            learning_rate: of the policy; the value head does not train.
            label_smoothing_bins: see ``VLAPolicy.sft_loss``.

        Returns:
            ``loss``, ``grad_norm`` before clipping, ``lr``, and the scalars of ``sft_loss``.

        Raises:
            NonFiniteError: several steps in a row were not finite.
            EmbodrlError: this backend does not support imitation.
        """

    @abstractmethod
    def imitation_step(
        self, batch: Batch, learning_rate: float, label_smoothing_bins: float, num_actions: float | None = None
    ) -> dict[str, float]:
        """Take one of several optimizer steps of an update, which ``complete_update`` ends; see ``imitate``.

        Args:
            batch: as there.
            learning_rate: as there.
            label_smoothing_bins: as there.
            num_actions: divisor of the loss where ``action_mask float32[N,H]`` has the weights of actions; None where
                it says which actions there are, all of which then count the same.

        Returns:
            ``loss``, ``grad_norm`` before clipping, and the scalars of ``sft_loss``.
        """

    @abstractmethod
    def complete_update(self) -> None:
        """Raise ``version`` by one.

        Raises:
            NonFiniteError: weights are not finite.
        """

    @abstractmethod
    def reference_logprobs(self, batch: TrajectoryBatch, algorithm: AlgorithmConfig) -> Tensor:
        """Return ``float32[T,B,C,A]``: log-probs of the actions under the policy that the run began with.

        Chunks without a valid action get 0.

        Raises:
            EmbodrlError: no reference is kept.
        """

    @abstractmethod
    def proximal(
        self, batch: TrajectoryBatch, algorithm: AlgorithmConfig, every_chunk: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probs of the actions ``float32[T,B,C,A]`` and values ``float32[T,B,K]`` of the present weights.

        Chunks acted with these weights keep those of the rollout, bit-exact; with ``every_chunk`` they keep values
        alone. A loss without values gets None for them, and so does one without ``algorithm.decoupled``.

        Raises:
            EmbodrlError: a chunk has a version above the engine's.
        """

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of the policy, without copies."""

    def fetch(self) -> None:  # noqa: B027 - most train the policy itself
        """Bring the weights into the policy that the engine was made with, if they are elsewhere."""

    def state_dict(self) -> EngineState:
        """Return weights, optimizer state and counters, without copies."""
        return self.state.whole()

    def load_state_dict(self, saved: EngineState) -> None:
        """Go back to a saved state.

        Raises:
            CheckpointError: names or shapes are not those of this policy.
        """
        self.state.load(saved)

    def counters(self) -> Counters:
        """Return the part of the state that can be written as JSON."""
        return self.state.counters()

    def save_shards(self, directory: Path) -> FileFacts:
        """Write the tensors of the state, each process what it holds; see ``sharded_checkpoint.save_state``.

        Returns:
            size and SHA-256 of all files by path inside the directory.

        Raises:
            OSError: they could not be written.
        """
        return self.state.save(directory)

    def load_shards(self, directory: Path, counters: Mapping[str, int]) -> None:
        """Go back to what ``save_shards`` wrote, perhaps with another backend or number of processes.

        Raises:
            CheckpointError: it is of another policy, or can't be read.
        """
        self.state.read(directory, counters)

    def state_num_bytes(self) -> int:
        """Return about how many bytes ``state_dict`` takes once every weight has been trained."""
        return self.state.num_bytes()

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
