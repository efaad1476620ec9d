"""Builds an OpenVLA policy from a ModelConfig: a public checkpoint, or the tiny size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from embodrl.config.policy_card import shipped_policy
from embodrl.errors import CheckpointError
from embodrl.models.common import checkpoint
from embodrl.models.common.config_file import CONFIG_FILE, OWN_SECTION
from embodrl.models.common.heads import build_value_head
from embodrl.models.common.init import new_generator
from embodrl.models.common.limits import check_vocabulary
from embodrl.models.common.norm_stats import ActionStats, choose_stats, given_sets, identity_stats
from embodrl.models.common.tokenizer import PromptTokenizer, tiny_tokenizer
from embodrl.models.common.value_head import ValueHead
from embodrl.models.load_report import LoadReport
from embodrl.models.openvla.config import STATISTICS_FILE, OpenVLAConfig
from embodrl.models.openvla.modeling import OpenVLAModel, init_weights
from embodrl.models.openvla.policy import OpenVLAPolicy
from embodrl.models.openvla.processing import OpenVLAProcessor
from embodrl.models.openvla.spec import OpenVlaConfig

TINY_STATS_KEY = "maniskill"

Components = Callable[[Path, LoadReport, torch.device], dict[str, Tensor]]
"""From a checkpoint's directory to all tensors ``vision_backbone.*``; empty to use those of the weights."""


@dataclass
class ModelParts:
    """Parts of a policy on the OpenVLA network.

    Attributes:
        directory: directory of the checkpoint or the warm start; None with random weights.
        model: network with its weights.
        tokenizer: prompt tokenizer.
        stats: action statistics of the robot.
        value_head: critic, or None.
        report: load report.
        generator: random generator for additional weights.
    """

    directory: Path | None
    model: OpenVLAModel
    tokenizer: PromptTokenizer
    stats: ActionStats
    value_head: ValueHead | None
    report: LoadReport
    generator: torch.Generator


def build_openvla(
    config: OpenVlaConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[OpenVLAPolicy, LoadReport]:
    """Build the configured policy; see ``models.registry.build_policy``."""
    parts = build_parts(config, True, torch.device(device), dtype, seed)
    model = parts.model.config
    if "keep_stop_token" in model.own:
        raise CheckpointError(
            f"{parts.directory} holds an OpenVLA-OFT policy, whose attention is bidirectional",
            "set model.model_type=openvla_oft (model=openvla_oft)",
            code="checkpoint-family",
        )
    processor = OpenVLAProcessor(
        parts.tokenizer,
        model.image_size,
        config.architecture.max_prompt_tokens,
        model.pad_token_id,
        config.center_crop,
        resize_filter(config, parts),
    )
    return OpenVLAPolicy(parts.model, processor, parts.stats, config, parts.value_head), parts.report


def resize_filter(config: OpenVlaConfig, parts: ModelParts) -> str:
    """Return the resize filter: from the setting, from embodrl's training, or by dataset."""
    own = parts.model.config.own
    raw = parts.model.config.raw
    is_public = parts.directory is not None and OWN_SECTION not in raw
    if config.resize_filter != "auto":
        found = config.resize_filter
        origin = "setting model.resize_filter"
    elif is_public and "libero" in parts.stats.key.lower():
        found = "lanczos_jpeg"
        origin = f"dataset {parts.stats.key}"
    else:
        found = own.text("resize_filter", "bicubic")
        origin = "default" if is_public else CONFIG_FILE
    if found not in ("bicubic", "lanczos_jpeg"):
        own.refuse(f"'resize_filter' is '{found}'")
    if parts.directory is not None:
        parts.report.conventions["resizing"] = f"{found} ({origin})"
    return found


def build_parts(
    config: OpenVlaConfig,
    causal: bool,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    film: bool = False,
    components: Components | None = None,
) -> ModelParts:
    """Build the network and its accompanying parts.

    Args:
        config: section ``model``.
        causal: see ``OpenVLAModel``.
        device: device of the network.
        dtype: dtype of its weights.
        seed: seed of weights that come from no checkpoint.
        film: whether the vision backbone reads the instruction.
        components: function that reads a checkpoint's other files before any weights.

    Raises:
        CheckpointError: no such checkpoint, or it does not fit.
    """
    directory, report = checkpoint.locate(config, shipped_policy(config.model_type))
    tokenizer = tiny_tokenizer()
    tiny = OpenVLAConfig.from_architecture(
        config.architecture,
        tokenizer.vocab_size,
        tokenizer.prompt_end_id,
        {TINY_STATS_KEY: identity_stats(config.action_dim)},
    )
    model_config = tiny
    files = []
    tensors = {}
    ignore = {}
    if directory is not None:
        model_config = OpenVLAConfig.from_directory(directory, checkpoint.place_of(STATISTICS_FILE, directory, report))
        tokenizer = PromptTokenizer(directory / "tokenizer.json", model_config.bos_id, model_config.prompt_end_id)
        check_vocabulary(directory, tokenizer.vocab_size, model_config.llama.vocab_size)
        if config.model_path is None:
            checkpoint.check_size(model_config, tiny, ("dino", "siglip", "llama"), directory, "model.architecture")
        files = checkpoint.weight_files(directory)
        layers = {
            "language_model.model.layers.": model_config.llama.num_hidden_layers,
            "vision_backbone.featurizer.blocks.": model_config.dino.depth,
            "vision_backbone.fused_featurizer.blocks.": model_config.siglip.depth,
        }
        shapes = checkpoint.stored_shapes(files)
        checkpoint.check_layers(shapes, layers, directory)
        tensors = components(directory, report, device) if components is not None else {}
        plain = [name for name in shapes if tensors and name.startswith("vision_backbone.")]
        ignore = dict.fromkeys(plain, "the file of the vision backbone has it with FiLM")
    if given := given_sets(config, "openvla"):
        model_config = replace(model_config, norm_stats=given)
    stats = choose_stats(model_config.norm_stats, config.unnorm_key, config.action_dim, report.source)
    generator = new_generator(device, seed)
    with torch.device("meta"):
        model = OpenVLAModel(model_config, causal, film)
    checkpoint.fill(
        model,
        files,
        report,
        lambda: init_weights(model, generator),
        device=device,
        dtype=dtype,
        ignore=ignore,
        tensors=tensors,
    )
    head = build_value_head(
        config, model_config.llama.hidden_size, directory, report, device=device, generator=generator
    )
    return ModelParts(directory, model, tokenizer, stats, head, report, generator)
