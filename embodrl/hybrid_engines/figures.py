"""What an engine estimates its memory from, for `embodrl plan`."""

from __future__ import annotations

from dataclasses import dataclass

from embodrl.models.base import VLAPolicy


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on the device while a micro-batch is differentiated.

    Attributes:
        weights: parameters and buffers, and their copies in the type of autocast.
        gradients: of what trains.
        optimizer: AdamW's two moments, in the type of the weights; of weights in half precision, in float32 with a
            copy of the weights.
        activations: kept for the backward pass of one micro-batch.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class ModelFigures:
    """Bytes of the model, and of what it leaves behind.

    Attributes:
        policy: without its weights.
        training: weights, gradients, optimizer and activations of one process.
        trained: of the trained parameters.
        plain: of the weights without copies.
        kv_cache: of one rollout process.
        recorded: of one chunk of one environment.
        gathered: of the weights that a process of fsdp has whole at a time, in addition to its part.
        num_parameters: of the policy.
    """

    policy: VLAPolicy
    training: TrainingMemory
    trained: int
    plain: int
    kv_cache: int
    recorded: int
    gathered: int = 0
    num_parameters: int = 0
