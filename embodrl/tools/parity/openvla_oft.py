"""Parity of OpenVLA-OFT with outputs of its public reference implementation (moojink/openvla-oft)."""

from __future__ import annotations

from pathlib import Path

import torch

from embodrl.errors import CheckpointError
from embodrl.models.common.norm_stats import choose_stats
from embodrl.models.load_report import LoadReport
from embodrl.models.openvla_oft.components import (
    ACTION_HEAD,
    PROPRIO,
    VISION,
    component_file,
    film_tensors,
    load_component,
)
from embodrl.models.openvla_oft.config import choose_proprio_stats
from embodrl.models.openvla_oft.modeling import (
    ActionHead,
    ProprioProjector,
    append_action_places,
    at_action_places,
    instruction_mean,
)
from embodrl.tools.parity.common import ACTION_TOLERANCE, CPU, LOGITS_TOLERANCE, Comparison, compare
from embodrl.tools.parity.openvla import (
    action_columns,
    decode_actions,
    load_fixture,
    recorded_logits,
)

KEEP_STOP_TOKEN = True
"""Default matching the known recording; ``embodrl.keep_stop_token`` of the fixture's config.json overrides it."""


@torch.no_grad()
def run(directory: Path, device: torch.device = CPU) -> list[Comparison]:
    """Compare hidden states, logits and decoded actions of a chunk, or with an L1 head the regressed actions.

    Args:
        directory: folder with ``model.safetensors``, ``config.json`` and ``io.safetensors``: ``ids int64[1,L]``, ``pv
            [1,6V,H,W]``, ``h [1,S,D]`` and ``logits_M_N [1,S,N-M]`` over the whole sequence, ``ah [1,C*A,D]`` at the
            action tokens and ``a [C,A]``. With the reference's files ``action_head--*.pt``, ``proprio_projector--*.pt``
            and ``vision_backbone--*.pt`` (FiLM): ``ids``, ``pv``, ``state float64[S]``, ``ah``, ``normalized [1,C,A]``
            and ``a``.
        device: device of the network.

    Raises:
        CheckpointError: a file is missing or corrupt, or the weights do not fill the model.
    """
    if component_file(directory, ACTION_HEAD) is not None:
        return _run_regression(directory, device)
    model, io = load_fixture(directory, causal=False, device=device)
    prefix = model.embed_prefix(io["pv"], io["ids"])
    length = prefix.shape[1]
    num_tokens = io["a"].numel()
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
        compare("actions", decode_actions(model, tokens, directory), io["a"], ACTION_TOLERANCE, True),
    ]


def _run_regression(directory: Path, device: torch.device) -> list[Comparison]:
    """Compare FiLM, the state token and the L1 head together, from the reference's own files."""
    report = LoadReport(str(directory))
    paths = {name: component_file(directory, name) for name in (ACTION_HEAD, PROPRIO, VISION)}
    missing = [name for name, path in paths.items() if path is None]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {', '.join(missing)}", "record all three components", code="parity-recording"
        )
    head_path, proprio_path, vision_path = (path for path in paths.values() if path is not None)
    model, io = load_fixture(directory, False, film_tensors(vision_path, report, CPU), device)
    sets = model.config.norm_stats
    width = model.config.llama.hidden_size
    stats = choose_stats(sets, None, io["a"].shape[-1], str(directory))
    state = choose_proprio_stats(sets, stats.key, str(directory)).normalize(io["state"].cpu().numpy())
    with torch.device("meta"):
        head = ActionHead(width, stats.action_dim)
        projector = ProprioProjector(len(state), width)
    for module, path in ((head, head_path), (projector, proprio_path)):
        load_component(module, path, report, device=device, dtype=torch.float32)
    instruction = instruction_mean(model, io["ids"], torch.ones_like(io["ids"]), KEEP_STOP_TOKEN)
    token = projector(torch.from_numpy(state).float()[None].to(device))[:, None]
    prefix = model.embed_prefix(io["pv"], io["ids"], token, instruction)
    num_tokens = io["a"].numel()
    hidden = model.hidden_states(append_action_places(model, prefix, num_tokens, KEEP_STOP_TOKEN), None)
    at_actions = at_action_places(hidden, prefix.shape[1], num_tokens)
    normalized = head(at_actions)
    actions = torch.from_numpy(stats.unnormalize(normalized[0].double().cpu().numpy()))
    return [
        compare("hidden states at the actions", at_actions, io["ah"], LOGITS_TOLERANCE),
        compare("normalised actions", normalized, io["normalized"], LOGITS_TOLERANCE),
        compare("actions", actions, io["a"], LOGITS_TOLERANCE),
    ]
