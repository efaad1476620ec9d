"""How much memory acting takes without the weights, from shapes alone: cached keys and values, and the record kept.

Nothing is allocated on a device; the record is measured on one made-up observation that the processor prepares.
Shapes: B rows decided at once, L layers, K key-value heads, H head width, S positions, C actions in a chunk, A their
dimensions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodrl.models.base import VLAPolicy
from embodrl.models.common.flow_policy import FlowPolicy
from embodrl.types import Observation

BOOL_BYTES, FLOAT32_BYTES, INT64_BYTES = 1, 4, 8
INSTRUCTION = "push the cube onto the target"
# rewards float32, and valid, terminated and truncated, of one action.
OUTCOME_BYTES = FLOAT32_BYTES + 3
# policy_version, task_id and group_id int64, success bool, value and bootstrap value float32, of one chunk.
CHUNK_BYTES = 3 * INT64_BYTES + 1 + 2 * FLOAT32_BYTES


def kv_cache_bytes(policy: VLAPolicy, num_rows: int, num_cameras: int, itemsize: int) -> int:
    """Return the bytes of keys and values kept while B rows are decided: ``2 L B K S H`` values.

    OpenVLA and pi0-FAST keep those of prompt and chunk, pi0, pi0.5 and SmolVLA those of images and prompt, GR00T those
    of its cross-attentions. OpenVLA-OFT decodes a chunk in one pass and keeps none; of others nothing is known, 0.

    Args:
        policy: on whatever device.
        num_rows: B.
        num_cameras: pictures an observation.
        itemsize: bytes of a value.
    """
    from embodrl.models.gr00t.policy import Gr00tPolicy
    from embodrl.models.openvla.policy import OpenVLAPolicy
    from embodrl.models.pi.policy import PiPolicy
    from embodrl.models.pi0_fast.policy import FastPolicy
    from embodrl.models.smolvla.policy import SmolVlaPolicy

    layers = width = positions = 0
    if isinstance(policy, OpenVLAPolicy):
        llama = policy.model.config.llama
        layers = llama.num_hidden_layers
        width = llama.num_key_value_heads * (llama.hidden_size // llama.num_attention_heads)
        positions = num_cameras * policy.model.config.num_patches + policy.processor.max_prompt_tokens
        positions += policy.num_action_chunks * policy.action_dim
    elif isinstance(policy, PiPolicy):
        spec = policy.model.config
        layers, width = spec.vlm.depth, spec.vlm.num_kv_heads * spec.vlm.head_dim
        positions = num_cameras * spec.siglip.num_patches + spec.max_prompt_tokens
    elif isinstance(policy, FastPolicy):
        spec = policy.model.config.inputs
        layers, width = spec.vlm.depth, spec.vlm.num_kv_heads * spec.vlm.head_dim
        positions = num_cameras * spec.siglip.num_patches + spec.max_prompt_tokens + policy.max_tokens
    elif isinstance(policy, SmolVlaPolicy):
        spec = policy.model.config
        layers, width = spec.vlm.depth, spec.vlm.num_kv_heads * spec.vlm.head_dim
        positions = num_cameras * spec.tokens_per_image + spec.max_prompt_tokens + 1
    elif isinstance(policy, Gr00tPolicy):
        spec = policy.model.config
        layers, width = -(-spec.head.dit.num_layers // 2), spec.head.dit.width
        positions = num_cameras * spec.tokens_per_image + policy.processor.max_prompt_tokens
    return 2 * layers * num_rows * width * positions * itemsize


def recorded_bytes(policy: VLAPolicy, num_cameras: int, height: int, width: int) -> int:
    """Return the bytes that a rollout keeps of one chunk of one environment, in main memory.

    What ``preprocess`` returns is made for one observation and counted; a policy without a ``processor`` counts with
    the pictures and the state. Actions, log-probs, rewards and the columns of the batch are added.

    Args:
        policy: on whatever device; no weight is touched.
        num_cameras: pictures an observation.
        height: of a picture, in pixels.
        width: of a picture, in pixels.
    """
    from embodrl.models.pi0_fast.policy import FastPolicy

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
    chunk, actions = policy.num_action_chunks, policy.num_action_chunks * policy.action_dim
    if isinstance(policy, FlowPolicy):
        # Flow-SDE keeps the random step and the point before it, Flow-Noise all but the last point; both what came out.
        points, step = (1, INT64_BYTES) if policy.noise_head is None else (policy.flow.num_steps, 0)
        stored = FLOAT32_BYTES * (points * policy.horizon * policy.padded_action_dim + actions) + step
    elif isinstance(policy, FastPolicy):
        stored = (INT64_BYTES + BOOL_BYTES + FLOAT32_BYTES) * policy.max_tokens - FLOAT32_BYTES * actions
    else:
        stored = INT64_BYTES * actions
    return seen + stored + FLOAT32_BYTES * actions + OUTCOME_BYTES * chunk + CHUNK_BYTES


def _state_dim(processor: Any) -> int:
    """Return how many numbers of the robot's state a processor needs; 0 if it goes without."""
    proprio, scaling = getattr(processor, "proprio", None), getattr(processor, "state", None)
    if proprio is not None:
        return proprio.dim
    return 0 if scaling is None else len(next(iter(vars(scaling).values())))  # its statistics come first
