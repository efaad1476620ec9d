"""The interface of training backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodrl.algorithms.advantages import Advantages
from embodrl.algorithms.losses import LossOutput
from embodrl.config.schema import AlgorithmConfig
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import EmbodrlError


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
    def forward_backward(
        self, minibatch: TrajectoryBatch, loss_fn: Callable[[TrajectoryBatch], LossOutput]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradients of a minibatch, micro-batch by micro-batch.

        Args:
            minibatch: flat; its rows are chunks.
            loss_fn: loss of a micro-batch; those of a minibatch must add up to its loss.

        Returns:
            the loss and metrics, summed over the micro-batches; of metrics named ``..._max`` the largest.
        """

    @abstractmethod
    def optimizer_step(self, loss: Tensor) -> StepResult:
        """Clip the gradients, update the weights unless something is not finite, and clear the gradients.

        Args:
            loss: scalar; not finite means no update.

        Raises:
            NonFiniteError: the last steps were all not finite.
        """

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of the policy, without copies."""

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
    def state_num_bytes(self) -> int:
        """Return about how many bytes ``state_dict`` takes once every weight has been trained."""
