"""Memory of a rollout without the weights, from shapes alone: KV cache, and recorded data.

Nothing is allocated on a device; the record is measured on one dummy observation from the processor.

Shapes: B rows decided at once, L layers, K key-value heads, H head width, S positions, C actions in a chunk, A action
dimensions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodrl.models.base import VLAPolicy
from embodrl.types import Observation

FLOAT32_BYTES = 4
INT64_BYTES = 8
INSTRUCTION = "push the cube onto the target"
# per action: reward float32, and valid, terminated and truncated
OUTCOME_BYTES = FLOAT32_BYTES + 3
# per chunk: policy_version, task_id and group_id int64, success bool, value and bootstrap value float32
CHUNK_BYTES = 3 * INT64_BYTES + 1 + 2 * FLOAT32_BYTES


def kv_cache_bytes(policy: VLAPolicy, num_rows: int, num_cameras: int, itemsize: int) -> int:
    """Return the bytes of keys and values kept while B rows are decided: ``2 L B K S H * itemsize``."""
    layers, width, positions = policy.cache_shape(num_cameras)
    return 2 * layers * num_rows * width * positions * itemsize


def recorded_bytes(policy: VLAPolicy, num_cameras: int, height: int, width: int) -> int:
    """Return the bytes that a rollout records per chunk of one environment, in main memory.

    Counts the result of ``preprocess`` for one observation (without a ``processor``, images and state), plus actions,
    log-probs, rewards and the other columns of the batch. The policy may be on any device; no weight is touched.
    """
    processor: Any = getattr(policy, "processor", None)
    observation = Observation(
        np.zeros((1, num_cameras, height, width, 3), np.uint8),
        np.zeros((1, _state_dim(processor)), np.float32),
        [INSTRUCTION],
        np.zeros(1, np.int32),
    )
    inputs: dict[str, Tensor] = processor(observation, torch.device("cpu")) if processor is not None else {}
    seen = sum(tensor.numel() * tensor.element_size() for tensor in inputs.values())
    seen = seen or observation.images.nbytes + observation.state.nbytes
    return seen + policy.chosen_bytes(num_cameras) + OUTCOME_BYTES * policy.num_action_chunks + CHUNK_BYTES


def _state_dim(processor: Any) -> int:
    """Return the size of the robot state that a processor needs; 0 if none."""
    proprio = getattr(processor, "proprio", None)
    scaling = getattr(processor, "state", None)
    if proprio is not None:
        return proprio.dim
    return 0 if scaling is None else len(next(iter(vars(scaling).values())))  # its statistics take precedence
