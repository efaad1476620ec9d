"""Parity of GR00T's action head with outputs of the public reference implementation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from embodrl.errors import CheckpointError
from embodrl.models.common.checkpoint import load_strict
from embodrl.models.gr00t.action_head import FlowActionHead
from embodrl.models.gr00t.config import ActionHeadSpec
from embodrl.models.gr00t.dit import TransformerSpec
from embodrl.models.load_report import LoadReport
from embodrl.tools.parity.common import (
    CPU,
    INPUTS_FILE,
    LOGITS_TOLERANCE,
    Comparison,
    compare,
    count_layers,
    head_dimension,
    read_settings,
    read_tensors,
)

WEIGHTS_FILE = "model.safetensors"
DEFAULTS = {"dit_heads": 2, "vl_heads": 2}
"""Values that shapes leave open, set in the fixture's config.json; defaults match the known recording."""

_FIRST = "model.transformer_blocks.0.attn1"


def load_head(directory: Path) -> FlowActionHead:
    """Return the recorded action head, loaded strictly.

    Raises:
        CheckpointError: weights or inputs are missing, or do not fit the network.
    """
    weights = read_tensors(directory / WEIGHTS_FILE)
    inputs = read_tensors(directory / INPUTS_FILE)
    try:
        spec = head_spec(weights, inputs, read_settings(directory, DEFAULTS))
    except (KeyError, IndexError) as error:
        raise CheckpointError(
            f"{directory} is not a recording of GR00T's action head: it lacks {error}",
            "see docs/models.md, Parity",
            code="parity-recording",
        ) from error
    with torch.device("meta"):
        head = FlowActionHead(spec)
    load_strict(head, [directory / WEIGHTS_FILE], LoadReport(str(directory)), device="cpu", dtype=torch.float32)
    return head


def head_spec(weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor], heads: Mapping[str, int]) -> ActionHeadSpec:
    """Return the dimensions of a recorded action head.

    Of the inputs, ``x [B,H,D]`` is read; ``heads`` has ``dit_heads`` and ``vl_heads``.

    Raises:
        KeyError: a tensor is missing.
        CheckpointError: heads do not divide a width.
    """
    # The first block's keys are computed from the features, so its matrix has both widths.
    width, features = weights[f"{_FIRST}.to_k.weight"].shape
    robots, state_dim, hidden_size = weights["state_encoder.layer1.W"].shape

    def transformer(prefix: str, width: int, setting: str) -> TransformerSpec:
        layers = count_layers(weights, f"{prefix}.transformer_blocks.")
        return TransformerSpec(layers, heads[setting], head_dimension(width, heads[setting], setting))

    return ActionHeadSpec(
        dit=transformer("model", width, "dit_heads"),
        vl=transformer("vl_self_attention", features, "vl_heads"),
        backbone_dim=features,
        hidden_size=hidden_size,
        action_dim=weights["action_encoder.W1.W"].shape[1],
        max_state_dim=state_dim,
        action_horizon=inputs["x"].shape[1],
        num_embodiments=robots,
        num_future_tokens=weights["future_tokens.weight"].shape[0],
        max_seq_len=weights["position_embedding.weight"].shape[0],
    )


@torch.no_grad()
def outputs(head: FlowActionHead, io: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``vl`` and ``v`` for the inputs ``bf``, ``state``, ``emb``, ``x``, ``t`` of a fixture."""
    features = head.process_features(io["bf"], None)
    state = head.encode_state(io["state"], io["emb"])
    velocity, _ = head(io["x"], io["t"], state, head.model.key_values(features), None, io["emb"])
    return {"vl": features, "v": velocity}


def run(directory: Path, device: torch.device = CPU) -> list[Comparison]:
    """Compare the head with a fixture folder.

    Args:
        directory: folder with ``model.safetensors`` and ``io.safetensors``: ``bf [B,S,E]``, ``state [B,1,*]``, ``emb
            int64[B]``, ``x [B,H,D]``, ``t int64[B]``, ``vl [B,S,E]`` and ``v [B,H,D]``.
        device: device of the network.

    Raises:
        CheckpointError: a file is missing or corrupt, or the weights do not fit.
    """
    io = read_tensors(directory / INPUTS_FILE, device)
    found = outputs(load_head(directory).to(device), io)
    return [compare(name, found[name], io[name], LOGITS_TOLERANCE) for name in ("vl", "v")]
