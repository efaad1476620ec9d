"""Builds a GR00T N1.5 policy from a ModelConfig: a public checkpoint, or the tiny size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from embodrl.models.common import checkpoint
from embodrl.models.common.config_file import OWN_SECTION
from embodrl.models.common.heads import build_value_head
from embodrl.models.common.init import new_generator
from embodrl.models.common.limits import check_vocabulary
from embodrl.models.common.norm_stats import given_sets
from embodrl.models.flow.fetched_tokenizer import fetch_tokenizer
from embodrl.models.flow.noise_head import build_noise_head
from embodrl.models.gr00t.config import METADATA_FILE, Gr00tConfig
from embodrl.models.gr00t.modeling import Gr00tModel
from embodrl.models.gr00t.policy import Gr00tPolicy
from embodrl.models.gr00t.processing import (
    ChatTokenizer,
    Gr00tProcessor,
    has_tokenizer,
    load_chat_tokenizer,
    tiny_chat_tokenizer,
)
from embodrl.models.gr00t.robots import NEW_EMBODIMENT, Keys, choose_keys, choose_robot, identity_metadata
from embodrl.models.gr00t.spec import Gr00tModelConfig
from embodrl.models.load_report import LoadReport

EAGLE_TOKENIZER = "lerobot/eagle2hg-processor-groot-n1p5"
EAGLE_FILES = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
EAGLE = "backbone.eagle_model"
EMBEDDING = f"{EAGLE}.language_model.model.embed_tokens.weight"
LM_HEAD = f"{EAGLE}.language_model.lm_head.weight"
POOLING_HEAD = f"{EAGLE}.vision_model.vision_model.head."


def build_gr00t(
    config: Gr00tModelConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[Gr00tPolicy, LoadReport]:
    """Build the configured policy; see ``models.registry.build_policy``."""
    device = torch.device(device)
    directory, report = checkpoint.locate(config)
    tokenizer = tiny_chat_tokenizer()
    metadata = identity_metadata(NEW_EMBODIMENT, config.action_dim)
    model_config = Gr00tConfig.from_architecture(config.gr00t, tokenizer.vocab_size, metadata)
    files = []
    aliases = {}
    if directory is not None:
        found = Gr00tConfig.from_directory(directory, checkpoint.place_of(METADATA_FILE, directory, report))
        if config.model_path is None:
            checkpoint.check_size(found, model_config, ("siglip", "qwen", "head"), directory, "model.gr00t")
        tokenizer = _tokenizer(directory, found)
        files = checkpoint.weight_files(directory)
        model_config, aliases = _fitted(found, files, directory)
    settings = Keys(config.gr00t.state_keys, config.gr00t.action_keys)
    used = dict(model_config.keys)
    given = given_sets(config, "gr00t", NEW_EMBODIMENT)
    if given:
        model_config = replace(model_config, metadata=given)
    public = directory is not None and OWN_SECTION not in model_config.raw

    def keys_of(name: str) -> Keys:
        if given:  # of the whole state and action
            used[name] = settings
            return settings
        used[name], origin = choose_keys(name, settings, model_config.keys, public, report.source)
        if directory is not None:
            report.conventions[f"keys of {name}"] = origin
        return used[name]

    robot = choose_robot(model_config.metadata, config.unnorm_key, config.action_dim, report.source, keys_of)
    model_config = replace(model_config, keys=used)
    processor = Gr00tProcessor(
        tokenizer,
        model_config.siglip.image_size,
        model_config.siglip.num_patches,
        config.gr00t.max_prompt_tokens,
        model_config.system_prompt,
        config.gr00t.crop_side,
        robot.state,
        model_config.head.max_state_dim,
    )
    processor.check_room()
    generator = new_generator(device, seed)
    with torch.device("meta"):
        model = Gr00tModel(model_config)
    checkpoint.fill(
        model, files, report, lambda: model.init_weights(generator), device=device, dtype=dtype, aliases=aliases
    )
    model.reset_buffers(device)
    report.conventions["images"] = (
        f"the middle {config.gr00t.crop_side:g} of each side, then bilinear (model.gr00t.crop_side)"
    )
    head = model_config.head
    value_input = head.hidden_size if config.value_head.input == "suffix" else head.backbone_dim + head.dit.width
    value_head = build_value_head(config, value_input, directory, report, device=device, generator=generator)
    noise_head = build_noise_head(
        config, head.hidden_size, head.action_dim, directory, report, device=device, generator=generator
    )
    return Gr00tPolicy(model, processor, robot, config, value_head, noise_head), report


def _tokenizer(directory: Path, config: Gr00tConfig) -> ChatTokenizer:
    """Return the checkpoint's tokenizer, or Eagle's from the hub: NVIDIA's checkpoints have none."""
    place = directory
    if not has_tokenizer(directory):
        hint = f"put {', '.join(EAGLE_FILES[1:5])} of {EAGLE_TOKENIZER} in the directory of the weights"
        place = fetch_tokenizer(EAGLE_TOKENIZER, EAGLE_FILES, directory, hint)
    tokenizer = load_chat_tokenizer(place)
    check_vocabulary(place, tokenizer.vocab_size, config.qwen.vocab_size)
    return tokenizer


def _fitted(config: Gr00tConfig, files: list[Path], directory: Path) -> tuple[Gr00tConfig, dict[str, str]]:
    """Return the configuration with the optional parts that a checkpoint has, and the required renames.

    Qwen's output layer is tied to its embedding, and some writers store only the former; GR00T needs the embedding.
    """
    names = checkpoint.stored_shapes(files)
    layers = {
        f"{EAGLE}.vision_model.vision_model.encoder.layers.": config.siglip.depth,
        f"{EAGLE}.language_model.model.layers.": config.qwen.num_hidden_layers,
        "action_head.model.transformer_blocks.": config.head.dit.num_layers,
        "action_head.vl_self_attention.transformer_blocks.": config.head.vl.num_layers,
    }
    checkpoint.check_layers(names, layers, directory)
    tied = LM_HEAD in names and EMBEDDING not in names
    pooling = any(name.startswith(POOLING_HEAD) for name in names)
    aliases = {LM_HEAD: EMBEDDING} if tied else {}
    return replace(config, lm_head=LM_HEAD in names and not tied, pooling_head=pooling), aliases
