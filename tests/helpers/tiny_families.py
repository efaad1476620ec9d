"""Every registered family at a size that a test can afford, and what to feed it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodrl.config.schema import ModelConfig, model_settings
from embodrl.models.base import VLAPolicy
from embodrl.models.registry import build_policy
from embodrl.specs import MODELS
from embodrl.types import Observation

SIGLIP = {"width": 16, "depth": 2, "num_heads": 2, "mlp_dim": 24}
TINY = {
    "architecture": {
        "image_size": 16,
        "patch_size": 8,
        "dino": SIGLIP,
        "siglip": SIGLIP,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "pi": {
        "image_size": 16,
        "patch_size": 8,
        "siglip": SIGLIP,
        "depth": 2,
        "num_heads": 2,
        "head_dim": 8,
        "vlm_width": 32,
        "vlm_mlp_dim": 48,
        "expert_width": 24,
        "expert_mlp_dim": 32,
        "action_horizon": 4,
    },
    "pi0_fast": {
        "image_size": 16,
        "patch_size": 8,
        "siglip": SIGLIP,
        "depth": 2,
        "num_heads": 2,
        "head_dim": 8,
        "vlm_width": 32,
        "vlm_mlp_dim": 48,
        "action_horizon": 4,
    },
    "smolvla": {
        "image_size": 16,
        "patch_size": 4,
        "siglip": SIGLIP,
        "depth": 2,
        "num_heads": 4,
        "head_dim": 8,
        "vlm_width": 32,
        "vlm_mlp_dim": 48,
        "expert_width": 24,
        "expert_mlp_dim": 32,
        "action_horizon": 4,
    },
    "gr00t": {
        "image_size": 16,
        "patch_size": 8,
        "siglip": SIGLIP,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "dit_num_layers": 2,
        "dit_num_heads": 2,
        "dit_head_dim": 8,
        "dit_output_dim": 16,
        "vl_num_layers": 1,
        "vl_num_heads": 2,
        "vl_head_dim": 16,
        "action_horizon": 4,
        "num_future_tokens": 2,
    },
    "gr00t_n1_7": {
        "image_size": 16,
        "patch_size": 4,
        "vision": SIGLIP,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "dit_num_layers": 4,
        "dit_num_heads": 2,
        "dit_head_dim": 8,
        "dit_output_dim": 16,
        "vl_num_layers": 1,
        "vl_num_heads": 2,
        "vl_head_dim": 16,
        "action_horizon": 4,
    },
}
TINY["gaussian"] = {
    "use_images": True,
    "image_size": 8,
    "channels": (4, 6),
    "feature_dim": 12,
    "max_state_dim": 8,
    "hidden_sizes": (16, 16),
}
"""One size for all: a family reads its own part."""

# Neither lerobot, which has no network here, nor the planner, which has no actions (models/test_planner.py).
POLICIES = [name for name in MODELS if MODELS.entry(name).kind not in ("", "text")]
FAMILIES = [name for name in POLICIES if MODELS.entry(name).kind != "gaussian"]  # those that read an instruction
SAME_NETWORK = ("openvla_oft", "pi0", "gr00t")  # as another family, but for sizes
# For what depends on the network alone; the others with `make test-long`.
NETWORKS = [pytest.param(name, marks=pytest.mark.long) if name in SAME_NETWORK else name for name in FAMILIES]
TOKEN_FAMILIES = [name for name in FAMILIES if MODELS.entry(name).kind == "tokens"]
FLOW_FAMILIES = [name for name in FAMILIES if MODELS.entry(name).kind == "flow"]
# A family and, of flow families, each way to make it a distribution.
VARIANTS = [(name, None) for name in FAMILIES if name not in FLOW_FAMILIES] + [
    (name, method) for name in FLOW_FAMILIES for method in ("flow_sde", "flow_noise")
]
VARIANTS.append(("pi0", "cfm"))
TEXTS = ("push the cube to the goal", "pick up the small red cube and lift it over the box", "pull")
EVERY_VARIANT = [*VARIANTS, *((name, None) for name in POLICIES if name not in FAMILIES)]
# The noise of one family stands for that of the others, and one of two families of one policy class.
LONG_VARIANTS = [(name, "flow_noise") for name in FLOW_FAMILIES if name != "pi05"]


def with_long(variants: list[tuple[str, str | None]]) -> list[object]:
    """Return parameters of a test: the variants, some with the mark long."""
    return [pytest.param(*each, marks=pytest.mark.long) if each in LONG_VARIANTS else each for each in variants]


STATE_DIM = 6


def tiny_sizes(family: str) -> dict[str, object]:
    """Return the settings of ``TINY`` that the family has."""
    return {name: sizes for name, sizes in TINY.items() if name in model_settings(family).model_fields}


def tiny_config(family: str, method: str | None = None, **changes: object) -> ModelConfig:
    """Return a valid section ``model`` of two actions per chunk."""
    values = {"model_type": family, "warm_start": None, "num_action_chunks": 2, **tiny_sizes(family), **changes}
    values["value_head"] = {"hidden_sizes": (16,), **values.get("value_head", {})}
    if method is not None:
        values["flow"] = {"method": method, "num_steps": 3}
    return model_settings(family).model_validate(values)


def build(family: str, method: str | None = None, seed: int = 3, **changes: object) -> VLAPolicy:
    """Return a policy with random weights in float32 on the CPU."""
    config = tiny_config(family, method, **changes)
    return build_policy(config, device="cpu", dtype=torch.float32, seed=seed)[0].eval()


def observation(family: str, batch: int = 3, seed: int = 0, texts: tuple[str, ...] = TEXTS) -> Observation:
    """Return random pictures and states with instructions of different lengths."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (batch, 1, 16, 16, 3), dtype=np.uint8)
    state_dim = STATE_DIM if MODELS.entry(family).uses_state is True else 0
    state = rng.uniform(-1, 1, (batch, state_dim)).astype(np.float32)
    return Observation(images, state, [texts[i % len(texts)] for i in range(batch)], np.zeros(batch, np.int32))


def generator(seed: int = 0) -> torch.Generator:
    """Return a random generator on the CPU."""
    return torch.Generator().manual_seed(seed)
