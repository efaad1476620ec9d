"""The interfaces of training and rollout backends."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from embodrl.algorithms.advantages import Advantages
from embodrl.config.schema import AlgorithmConfig, RolloutConfig, SamplingConfig
from embodrl.data.batch import Batch
from embodrl.data.rng import RandomSource, RowGenerators, generator_state, restore_generator
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.offload import OffloadReport
from embodrl.hybrid_engines.training.parallel import on_threads
from embodrl.hybrid_engines.training.precision import Precision, autocast, resolve_precision
from embodrl.models.base import VLAPolicy
from embodrl.types import Observation, PolicyOutput, SamplingParams


class NonFiniteError(EmbodrlError):
    """Losses or gradients were NaN or infinite several times in a row."""


@dataclass(frozen=True)
class EngineState:
    """All that an engine needs to go on where it stopped.

    Attributes:
        tensors: ``policy``, ``optimizer`` and, where there is one, ``reference``, each by name.
        state: what can be written as JSON.
    """

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


@dataclass(frozen=True)
class StepResult:
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
        version: completed updates; also the version of the weights.
    """

    version: int

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
    def reference_logprobs(self, batch: TrajectoryBatch, algorithm: AlgorithmConfig) -> Tensor:
        """Return ``float32[T,B,C,A]``: log-probs of the actions under the policy that the run began with.

        Chunks without a valid action get 0.

        Raises:
            EmbodrlError: no reference is kept.
        """

    @abstractmethod
    def proximal(self, batch: TrajectoryBatch, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor | None]:
        """Return log-probs of the actions ``float32[T,B,C,A]`` and values ``float32[T,B,K]`` of the present weights.

        Chunks played with these weights keep those of the rollout, to the bit. A loss without values gets None.

        Raises:
            EmbodrlError: a chunk has a version above the engine's.
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
    def counters(self) -> dict[str, Any]:
        """Return the part of the state that can be written as JSON."""

    @abstractmethod
    def save_shards(self, directory: Path) -> dict[str, dict[str, Any]]:
        """Write the tensors of the state, each process what it holds; see ``sharded_checkpoint.save_state``.

        Returns:
            size and SHA-256 of all files by path inside the directory.

        Raises:
            OSError: they could not be written.
        """

    @abstractmethod
    def load_shards(self, directory: Path, counters: Mapping[str, Any]) -> None:
        """Go back to what ``save_shards`` wrote, perhaps with another backend or number of processes.

        Raises:
            CheckpointError: it is of another policy, or can't be read.
        """

    @abstractmethod
    def state_num_bytes(self) -> int:
        """Return about how many bytes ``state_dict`` takes once every weight has been trained."""

    def check(self) -> None:  # noqa: B027 - most have nothing that could be gone
        """Raise if a process that the engine needs has gone.

        Raises:
            WorkerDied: with its rank and its last output.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """End the processes that the engine started."""

    def offload(self) -> OffloadReport | None:
        """Take off the device what only training needs; the next call that needs it brings it back.

        Returns:
            the memory before and after; None if nothing was moved.
        """
        return None


class RolloutEngine(ABC):
    """Acts with a policy: the one that trains, or a copy that is told of new weights.

    Several threads may ask at once: one batch is computed at a time, and weights change only between batches. What is
    drawn follows from generators on the CPU, so that every backend draws the same actions from the same state.

    Args:
        policy: on its device.
        config: section ``rollout``.
        sampling: section ``algorithm.sampling``.
        seed: of the actions that are drawn.
        num_threads: parts of a batch computed at the same time on a CPU, each with a random generator of its own.
        part: rank and number of the processes that decide for neighbouring rows of the environments: together they
            draw as one process with the threads of all of them does.

    Attributes:
        version: updates that the weights have seen.
        may_offload: nobody else needs the weights while this engine does not act, so that ``offload`` may take them.
        offload_report: what the last ``offload`` that freed something did; None if there was none.
    """

    def __init__(
        self,
        policy: VLAPolicy,
        config: RolloutConfig,
        sampling: SamplingConfig,
        seed: int,
        num_threads: int = 1,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.part = part
        self.policy = policy
        self.device = policy.device
        self.precision: Precision = resolve_precision(config.precision, self.device)
        self.sampling = SamplingParams(sampling.temperature, sampling.top_k)
        self.num_threads = num_threads if self.device.type == "cpu" else 1
        self.generators = self.make_generators([seed])
        self.version = 0
        self.may_offload = False
        self.offload_report: OffloadReport | None = None
        # Reentrant: a stream of new weights may bring back memory that was taken away.
        self._lock = threading.RLock()

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over weights, between two batches.

        Args:
            weights: names and tensors of the policy; what this engine shares already is passed over.
            version: updates that they have seen.

        Raises:
            KeyError: a name is unknown.
        """

    @abstractmethod
    def _predict(
        self,
        observation: Observation,
        mode: Literal["train", "eval"],
        compute_values: bool,
        generators: Sequence[RandomSource],
    ) -> PolicyOutput:
        """Choose a chunk of actions for each row."""

    @abstractmethod
    def offload(self) -> None:
        """Free what the device need not hold until the next ``act``, which brings it back by itself."""

    @abstractmethod
    def onload(self) -> None:
        """Bring back what ``offload`` freed."""

    def make_generators(self, seed: Sequence[int]) -> list[torch.Generator]:
        """Return generators for ``act``, one a thread, that follow from the numbers."""
        # A list of one number and the number itself give the same sequence.
        rank, count = self.part
        seeds = np.random.SeedSequence(list(seed)).generate_state(self.num_threads * count)
        mine = seeds[rank * self.num_threads : (rank + 1) * self.num_threads]
        return [torch.Generator().manual_seed(int(s)) for s in mine]

    def row_generators(self, seeds: Sequence[Sequence[int]]) -> list[RandomSource] | None:
        """Return generators for ``act`` such that each row draws from its own, which follows from its numbers.

        None if the policy can't; it then draws from the engine's.
        """
        if not self.policy.draws_by_row:
            return None
        numbers = [int(np.random.SeedSequence(list(seed)).generate_state(1)[0]) for seed in seeds]
        rows = [torch.Generator().manual_seed(number) for number in numbers]
        parts = np.array_split(np.arange(len(rows)), min(self.num_threads, len(rows)))
        return [RowGenerators(tuple(rows[i] for i in part)) for part in parts]

    def act(
        self, observation: Observation, compute_values: bool, generators: Sequence[RandomSource] | None = None
    ) -> PolicyOutput:
        """Draw a chunk of actions for each row, with the engine's own generators unless others are given."""
        return self._predict(observation, "train", compute_values, generators or self.generators)

    def act_greedily(self, observation: Observation) -> PolicyOutput:
        """Choose the most probable chunk of actions for each row."""
        return self._predict(observation, "eval", False, self.generators)

    def values(self, observation: Observation) -> Tensor:
        """Return ``float32[B,K]`` on the CPU."""

        def compute(part: Observation) -> Tensor:
            with torch.no_grad(), autocast(self.precision, self.device):
                return self.policy.predict_values(part).float().cpu()

        tasks = [lambda part=part: compute(part) for part in self._parts(observation)]
        with self._lock:
            return torch.cat(on_threads(tasks, self.num_threads))

    def _parts(self, observation: Observation) -> list[Observation]:
        rows = np.array_split(np.arange(observation.batch_size), min(self.num_threads, observation.batch_size))
        return [observation] if len(rows) == 1 else [observation.select(part) for part in rows]

    def _copy_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights into the policy, but for those that it shares; the lock must be held."""
        mine = dict(self.policy.named_parameters()) | dict(self.policy.named_buffers())
        with torch.no_grad():
            for name, tensor in weights:
                if mine[name].data_ptr() != tensor.data_ptr():
                    mine[name].copy_(tensor)

    def random_state(self) -> list[str]:
        """Return the state of the generators, as text."""
        return [generator_state(generator) for generator in self.generators]

    def set_random_state(self, states: list[str]) -> None:
        """Restore what ``random_state`` returned.

        Raises:
            ValueError: it was another number of threads.
        """
        for generator, state in zip(self.generators, states, strict=True):
            restore_generator(generator, state)
