"""Input figures of an engine's memory estimate, for `embodrl plan`."""

from __future__ import annotations

from dataclasses import dataclass

from embodrl.models.base import VLAPolicy


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on the device during the backward pass of a micro-batch.

    Attributes:
        weights: parameters and buffers, and their copies in the autocast type.
        gradients: gradients of the trained weights.
        optimizer: AdamW's two moments, in the type of the weights; for half-precision weights in float32, with a copy
            of the weights.
        activations: kept for the backward pass of one micro-batch.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Total in bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class ModelFigures:
    """Bytes of the model and of the data it produces.

    Attributes:
        policy: policy without its weights.
        training: weights, gradients, optimizer and activations of one process.
        trained: trained parameters.
        plain: weights without copies.
        kv_cache: KV cache of one rollout process.
        recorded: one chunk of one environment.
        gathered: weights that an fsdp process holds unsharded at a time, in addition to its shard.
        num_parameters: number of parameters (not bytes).
    """

    policy: VLAPolicy
    training: TrainingMemory
    trained: int
    plain: int
    kv_cache: int
    recorded: int
    gathered: int = 0
    num_parameters: int = 0
