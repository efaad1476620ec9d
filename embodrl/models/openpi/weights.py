"""Parameter names in openpi's and lerobot's weights, and in the network here.

They agree except that lerobot prefixes all with ``model.``, newer versions of transformers drop SigLIP's level
``vision_model``, and the tied embedding may be stored under the output layer's name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

LEROBOT_PREFIX = "model."
TOWER = "paligemma_with_expert.paligemma.model.vision_tower."
LANGUAGE = "paligemma_with_expert.paligemma.model.language_model."
EXPERT = "paligemma_with_expert.gemma_expert.model."
EMBEDDING = f"{LANGUAGE}embed_tokens.weight"
TIED_TO_EMBEDDING = "paligemma_with_expert.paligemma.lm_head.weight"
EXPERT_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"
_TOWER_LEVEL = "vision_model."
_TRUNK = "paligemma_with_expert."
_FLOAT32_IN_TOWER = ("embeddings.patch_embedding.", "embeddings.position_embedding.")
_FLOAT32 = ("_layernorm.", "model.norm.")


def aliases_and_ignored(stored: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return aliases (checkpoint name -> name here) and ignored checkpoint names with reasons."""
    plain = {name: name.removeprefix(LEROBOT_PREFIX) for name in stored}
    aliases: dict[str, str] = {}
    ignore: dict[str, str] = {}
    for name, target in plain.items():
        if target == EXPERT_HEAD:
            ignore[name] = "the action expert writes no text"
        elif target == TIED_TO_EMBEDDING and EMBEDDING in plain.values():
            ignore[name] = "tied to embed_tokens"
        elif target == TIED_TO_EMBEDDING:
            aliases[name] = EMBEDDING
        elif with_tower_level(target) != name:
            aliases[name] = with_tower_level(target)
    return aliases, ignore


def with_tower_level(name: str) -> str:
    """Return a name with SigLIP's level ``vision_model``."""
    lacking = name.startswith(TOWER) and not name.startswith(TOWER + _TOWER_LEVEL)
    return TOWER + _TOWER_LEVEL + name.removeprefix(TOWER) if lacking else name


def in_float32(name: str) -> bool:
    """Return whether openpi keeps a weight in float32 in a bfloat16 model.

    These are Gemma's norms (with their conditioning), patch and position embeddings, and the layers between actions,
    state, noise level and expert, so that the velocity is computed in float32.
    """
    parts = _FLOAT32_IN_TOWER if name.startswith(TOWER) else _FLOAT32
    return not name.startswith(_TRUNK) or any(part in name for part in parts)


def neutral_norm(name: str) -> int:
    """Return the norm weight that leaves the input unscaled: Gemma scales by 1 + weight."""
    return int(TOWER in name)


def variant_of(stored: Collection[str]) -> str | None:
    """Return the model that the weight names belong to, or None if they fit both."""
    names = {name.removeprefix(LEROBOT_PREFIX) for name in stored}
    if "time_mlp_in.weight" in names:
        return "pi05"
    return "pi0" if "state_proj.weight" in names else None


def public_state(state: Mapping[str, Tensor], expert_width: int) -> dict[str, Tensor]:
    """Return weights plus the one tensor, zeros, that openpi's strict loading needs but nothing reads."""
    embedding = state[EMBEDDING]
    return {**state, EXPERT_HEAD: torch.zeros(len(embedding), expert_width, dtype=embedding.dtype)}
