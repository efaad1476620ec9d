"""The action head against outputs recorded from the public reference implementation."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from embodrl.models.base import LoadReport
from embodrl.models.common.checkpoint import load_strict, weight_files
from embodrl.models.common.dit import TransformerSpec
from embodrl.models.common.parity import INPUTS_FILE, LOGITS_TOLERANCE, Comparison, compare, read_tensors
from embodrl.models.gr00t.action_head import ActionHead
from embodrl.models.gr00t.config import ActionHeadSpec

FIXTURE_HEAD = ActionHeadSpec(
    dit=TransformerSpec(4, 2, 12),
    vl=TransformerSpec(2, 2, 16),
    backbone_dim=32,
    hidden_size=16,
    action_dim=8,
    max_state_dim=10,
    action_horizon=4,
    num_embodiments=4,
    num_future_tokens=3,
    max_seq_len=64,
)
"""Dimensions of the recorded head; the weights do not tell the number of attention heads."""


def load_head(directory: Path) -> ActionHead:
    """Return the recorded action head, loaded strictly.

    Raises:
        CheckpointError: no weights, or they do not fit.
    """
    with torch.device("meta"):
        head = ActionHead(FIXTURE_HEAD)
    load_strict(head, weight_files(directory), LoadReport(str(directory)), device="cpu", dtype=torch.float32)
    return head


@torch.no_grad()
def outputs(head: ActionHead, io: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``vl`` and ``v`` for the inputs ``bf``, ``state``, ``emb``, ``x``, ``t`` of a fixture."""
    features = head.process_features(io["bf"], None)
    state = head.encode_state(io["state"], io["emb"])
    velocity, _ = head(io["x"], io["t"], state, head.model.key_values(features), None, io["emb"])
    return {"vl": features, "v": velocity}


def run(directory: Path) -> list[Comparison]:
    """Compare the head with a fixture folder.

    Raises:
        CheckpointError: a file is missing or corrupt, or the weights do not fit.
    """
    io = read_tensors(directory / INPUTS_FILE)
    found = outputs(load_head(directory), io)
    return [compare(name, found[name], io[name], LOGITS_TOLERANCE) for name in ("vl", "v")]
