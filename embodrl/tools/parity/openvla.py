"""Parity of OpenVLA with outputs of its public reference implementation (modeling_prismatic)."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from embodrl.errors import CheckpointError
from embodrl.models.common.action_bins import ActionBins
from embodrl.models.common.checkpoint import SINGLE_FILE, load_strict, stored_shapes
from embodrl.models.common.config_file import CONFIG_FILE, OWN_SECTION, read_file
from embodrl.models.common.norm_stats import choose_stats
from embodrl.models.common.vit import VitSpec
from embodrl.models.load_report import LoadReport
from embodrl.models.openvla.config import OpenVLAConfig
from embodrl.models.openvla.decode import ActionDecoder
from embodrl.models.openvla.modeling import OpenVLAModel
from embodrl.tools.parity.common import (
    ACTION_TOLERANCE,
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

DEFAULTS = {"dino_heads": 2, "siglip_heads": 2, "unnorm_key": ""}
"""Values that shapes leave open, set in the fixture's config.json; defaults match the known recordings.

Without ``unnorm_key``, the dataset is one of ``RECORDED_STATS`` if present, else the only one.
"""
RECORDED_STATS = ("bridge_orig", "libero_10_no_noops")
MODEL_KEYS = (
    *("dino", "siglip", "prompt_end_id", "bos_id", "eos_id", "keep_stop_token"),
    *("use_film", "normalization"),
)
"""Keys of that section in embodrl's own exports, which describe the model rather than the recording."""

_LOGITS = re.compile(r"logits_(\d+)_(\d+)")


@torch.no_grad()
def run(directory: Path, device: torch.device = CPU) -> list[Comparison]:
    """Compare hidden states, logits, greedy tokens, decoded actions and key-value decoding.

    Args:
        directory: folder with ``model.safetensors``, ``config.json`` and ``io.safetensors``: ``ids int64[B,L]``, ``pv
            [B,6,H,W]``, ``h [B,S,D]``, ``logits_M_N [B,S,N-M]`` (of the ids from M to N - 1), ``gen int64[B,A]`` and
            ``a [B,A]``.
        device: device of the network.

    Raises:
        CheckpointError: a file is missing or corrupt, or the weights do not fill the model.
    """
    model, io = load_fixture(directory, device=device)
    prefix = model.embed_prefix(io["pv"], io["ids"])
    hidden = model.hidden_states(prefix, None)
    recorded, ids = recorded_logits(io, directory)
    logits = model.language_model.lm_head(hidden)[..., ids]
    columns = action_columns(model, ids)
    tokens = io["gen"]
    decoder = ActionDecoder(model, len(prefix), prefix.shape[1] + tokens.shape[1])
    _, decoded, prefix_hidden = decoder.run(prefix, None, tokens.shape[1], lambda _, place: tokens[:, place])
    return [
        compare("hidden states", hidden, io["h"], LOGITS_TOLERANCE),
        compare("logits", logits, recorded, LOGITS_TOLERANCE),
        compare("action logits", model.action_logits(hidden), recorded[..., columns], LOGITS_TOLERANCE),
        compare("decoder, hidden states", prefix_hidden, io["h"], LOGITS_TOLERANCE),
        compare("decoder, logits", decoded[:, 0], recorded[:, -1, columns], LOGITS_TOLERANCE),
        compare("greedy tokens", greedy_over_all_ids(model, prefix, tokens.shape[1]), tokens, 0.0, True),
        compare("actions", decode_actions(model, tokens, directory), io["a"], ACTION_TOLERANCE),
    ]


def load_fixture(
    directory: Path, causal: bool = True, film: dict[str, Tensor] | None = None, device: torch.device = CPU
) -> tuple[OpenVLAModel, dict[str, Tensor]]:
    """Return the loaded network in float32, and the recorded inputs and outputs of ``directory`` (see ``run``).

    The recorded config.json implies the vision dimensions by the backbone's name, while the recording has smaller
    towers. Unless embodrl's own section states them, they are read off the weights, except for the number of heads
    (``DEFAULTS``). ``film`` uses a vision backbone with FiLM instead of the recorded one.

    Raises:
        CheckpointError: a file is missing or corrupt, or the weights do not fill the model.
    """
    fields = read_file(directory / CONFIG_FILE)
    vision = None
    settings = read_settings(directory, DEFAULTS, MODEL_KEYS)
    if "dino" not in fields.fields(OWN_SECTION, {}):
        weights = read_tensors(directory / SINGLE_FILE)
        vision = (
            tower_spec(weights, "vision_backbone.featurizer.", int(settings["dino_heads"]), "dino_heads"),
            tower_spec(weights, "vision_backbone.fused_featurizer.", int(settings["siglip_heads"]), "siglip_heads"),
        )
    config = OpenVLAConfig.from_dict(fields.content, vision, fields.source)
    model = OpenVLAModel(config, causal, film is not None).eval()
    files = [directory / SINGLE_FILE]
    report = LoadReport(str(directory))
    ignore = {}
    if film is not None:
        ignore = {name: "replaced" for name in stored_shapes(files) if name.startswith("vision_backbone.")}
    load_strict(model, files, report, device="cpu", dtype=torch.float32, ignore=ignore, tensors=film)
    return model.to(device), read_tensors(directory / INPUTS_FILE, device)


def recorded_logits(io: dict[str, Tensor], directory: Path) -> tuple[Tensor, slice]:
    """Return the recorded logits, and their token ids, which the tensor's name states.

    Raises:
        CheckpointError: there are none, or their number does not match.
    """
    for name, logits in io.items():
        match = _LOGITS.fullmatch(name)
        if match is not None:
            ids = slice(int(match[1]), int(match[2]))
            if logits.shape[-1] == ids.stop - ids.start:
                return logits, ids
    raise CheckpointError(
        f"{directory / INPUTS_FILE} has no logits_M_N of N - M columns", "record them", code="parity-recording"
    )


def tower_spec(weights: dict[str, Tensor], prefix: str, num_heads: int, setting: str) -> VitSpec:
    """Return the dimensions of the vision transformer with a prefix, from the weights of the whole model.

    Shapes do not show ``num_heads``, which ``setting`` sets.

    Raises:
        CheckpointError: no vision transformer has that prefix, or the heads do not divide its width.
    """
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not {"pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight"} <= own.keys():
        raise CheckpointError(
            f"there are no weights {prefix}*",
            "use a recording of the fused DINOv2 + SigLIP model",
            code="parity-recording",
        )
    _, num_patches, width = own["pos_embed"].shape
    head_dimension(width, num_heads, setting)
    patch_size = own["patch_embed.proj.weight"].shape[-1]
    return VitSpec(
        image_size=round(num_patches**0.5) * patch_size,
        patch_size=patch_size,
        width=width,
        depth=count_layers(own, "blocks."),
        num_heads=num_heads,
        mlp_dim=len(own["blocks.0.mlp.fc1.weight"]),
        num_registers=own["reg_token"].shape[1] if "reg_token" in own else 0,
        class_token="cls_token" in own,
        layer_scale="blocks.0.ls1.scale_factor" in own,
        attention_pool="attn_pool.latent" in own,
    )


def action_columns(model: OpenVLAModel, ids: slice) -> slice:
    """Return the position of the action ids in the recorded slice of the vocabulary."""
    start = model.config.first_action_id - ids.start
    return slice(start, start + model.config.n_action_bins)


def greedy_over_all_ids(model: OpenVLAModel, prefix: Tensor, count: int) -> Tensor:
    """Return ``int64[B,count]`` greedy tokens over the whole vocabulary, as in the reference.

    Random weights may select ids that are not actions, so the policy's choice among action ids would differ.
    """
    sequence = prefix
    tokens = []
    for _ in range(count):
        hidden = model.hidden_states(sequence, None)[:, -1]
        tokens.append(model.language_model.lm_head(hidden).argmax(dim=-1))
        sequence = torch.cat([sequence, model.language_model.model.embed_tokens(tokens[-1])[:, None]], dim=1)
    return torch.stack(tokens, dim=1)


def decode_actions(model: OpenVLAModel, tokens: Tensor, directory: Path) -> Tensor:
    """Decode token ids to ``float64[...,A]`` actions in environment units, with the recording's statistics.

    Raises:
        CheckpointError: there are no statistics, several without a choice, or of other dimensions.
    """
    config = model.config
    key = str(read_settings(directory, DEFAULTS, MODEL_KEYS)["unnorm_key"]) or None
    if key is None:
        key = next((key for key in RECORDED_STATS if key in config.norm_stats), None)
    stats = choose_stats(config.norm_stats, key, tokens.shape[-1], "config.json")
    bins = ActionBins(config.action_vocab_size, config.n_action_bins)
    return torch.from_numpy(stats.unnormalize(bins.decode(tokens.cpu().numpy())))
