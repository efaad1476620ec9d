"""OpenVLA-OFT against outputs recorded from its public reference implementation (moojink/openvla-oft, discrete)."""

from __future__ import annotations

from pathlib import Path

import torch

from embodrl.models.common.parity import ACTION_TOLERANCE, LOGITS_TOLERANCE, Comparison, compare
from embodrl.models.openvla.parity import (
    action_columns,
    decode_actions,
    load_fixture,
    recorded_logits,
)
from embodrl.models.openvla_oft.modeling import append_action_places, at_action_places

KEEP_STOP_TOKEN = True
"""By default, as in the known recording; ``embodrl.keep_stop_token`` of the fixture's config.json says otherwise."""


@torch.no_grad()
def run(directory: Path) -> list[Comparison]:
    """Compare hidden states, logits and decoded actions of a chunk.

    Args:
        directory: with ``model.safetensors``, ``config.json`` and ``io.safetensors``: ``ids int64[1,L]``,
            ``pv [1,6V,H,W]``, ``h [1,S,D]`` and ``logits_M_N [1,S,N-M]`` over the whole sequence,
            ``ah [1,C*A,D]`` at the action tokens and ``a [C,A]``.

    Raises:
        CheckpointError: a file is missing or corrupt, or the weights do not fill the model.
    """
    model, io = load_fixture(directory, causal=False)
    prefix = model.embed_prefix(io["pv"], io["ids"])
    length, num_tokens = prefix.shape[1], io["a"].numel()
    keep_stop_token = model.config.own.flag("keep_stop_token", KEEP_STOP_TOKEN)
    hidden = model.hidden_states(append_action_places(model, prefix, num_tokens, keep_stop_token), None)
    at_actions = at_action_places(hidden, length, num_tokens)
    recorded, ids = recorded_logits(io, directory)
    logits = model.language_model.lm_head(hidden)[..., ids]
    wanted = at_action_places(recorded, length, num_tokens)[..., action_columns(model, ids)]
    # The reference takes the argmax over the whole vocabulary.
    tokens = model.language_model.lm_head(at_actions).argmax(dim=-1).view(io["a"].shape)
    return [
        compare("hidden states", hidden, io["h"], LOGITS_TOLERANCE),
        compare("logits", logits, recorded, LOGITS_TOLERANCE),
        compare("hidden states at the actions", at_actions, io["ah"], LOGITS_TOLERANCE),
        compare("action logits", model.action_logits(at_actions), wanted, LOGITS_TOLERANCE),
        compare("actions", decode_actions(model, tokens, directory), io["a"], ACTION_TOLERANCE),
    ]
