"""Builds a GR00T N1.7 policy from a ModelConfig: a public checkpoint, or the tiny size."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.models.common import checkpoint
from embodrl.models.common.heads import build_value_head
from embodrl.models.common.init import new_generator
from embodrl.models.common.limits import check_vocabulary
from embodrl.models.common.norm_stats import given_sets
from embodrl.models.flow.fetched_tokenizer import fetch_tokenizer
from embodrl.models.flow.noise_head import build_noise_head
from embodrl.models.gr00t.config_n1_7 import Gr00tN17Config
from embodrl.models.gr00t.modeling import Gr00tN17Model
from embodrl.models.gr00t.policy import Gr00tPolicy
from embodrl.models.gr00t.processing import (
    CHAT_END,
    CHAT_START,
    ChatTokenizer,
    Gr00tProcessor,
    has_tokenizer,
    load_chat_tokenizer,
    tiny_chat_tokenizer,
)
from embodrl.models.gr00t.robots import NEW_EMBODIMENT, RobotStats
from embodrl.models.gr00t.sidecars import PROCESSOR_FILE, with_statistics
from embodrl.models.gr00t.spec import Gr00tN17ModelConfig
from embodrl.models.load_report import LoadReport

IMAGE_START = "<|vision_start|>"
IMAGE_TOKEN = "<|image_pad|>"
IMAGE_END = "<|vision_end|>"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json")
LANGUAGE = "backbone.model.model.language_model."
LM_HEAD = "backbone.model.lm_head.weight"
VISION_LAYERS = "backbone.model.model.visual.blocks."
MASK_TOKEN = "action_head.mask_token"


class QwenTokenizer(ChatTokenizer):
    """Qwen3-VL's tokenizer."""

    special_tokens: ClassVar[tuple[str, ...]] = (CHAT_START, CHAT_END, IMAGE_START, IMAGE_TOKEN, IMAGE_END)
    image_token: ClassVar[str] = IMAGE_TOKEN
    model: ClassVar[str] = "Qwen3-VL"


class Gr00tN17Processor(Gr00tProcessor):
    """Prepares prompts, images and states as in N1.7's processor_config.json; ``max_prompt_tokens`` is L."""

    section: ClassVar[str] = "model.gr00t_n1_7"

    def __init__(
        self, tokenizer: ChatTokenizer, config: Gr00tN17Config, robot: RobotStats, max_prompt_tokens: int
    ) -> None:
        super().__init__(
            tokenizer,
            config.image_size,
            config.tokens_per_image,
            max_prompt_tokens,
            system_prompt="",
            crop_side=1.0,
            state_stats=robot.state,
            max_state_dim=config.head.max_state_dim,
        )
        self.images = config.sidecars.images()
        self.formalize = config.sidecars.settings.flag("formalize_language", True)

    def chat(self, instruction: str, num_images: int) -> str:
        """Return a user message of images and instruction, as from Qwen3-VL's template without anything else."""
        text = self.formalized(instruction)
        images = f"{IMAGE_START}{IMAGE_TOKEN * self.num_patches}{IMAGE_END}" * num_images
        return f"{CHAT_START}user\n{images}{text}{CHAT_END}\n"

    def formalized(self, instruction: str) -> str:
        """Return an instruction in lower case without punctuation, unless the checkpoint uses it unchanged."""
        return re.sub(r"[^\w\s]", "", instruction.lower()) if self.formalize else instruction

    def resized(self, images: Tensor) -> Tensor:
        """Return images ``uint8[B,H,W,3]`` at the model's size."""
        return self.images(images)


def build_gr00t_n1_7(
    config: Gr00tN17ModelConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[Gr00tPolicy, LoadReport]:
    """Build the configured policy; see ``models.registry.build_policy``."""
    device = torch.device(device)
    sizes = config.gr00t_n1_7
    directory, report = checkpoint.locate(config)
    tokenizer = tiny_chat_tokenizer(QwenTokenizer)
    model_config = Gr00tN17Config.from_architecture(sizes, tokenizer.vocab_size, config.action_dim)
    files = []
    aliases = {}
    ignore = {}
    if directory is not None:
        found = Gr00tN17Config.from_directory(directory, checkpoint.place_of(PROCESSOR_FILE, directory, report))
        if config.model_path is None:
            parts = ("vision", "qwen", "head")
            checkpoint.check_size(found, model_config, parts, directory, Gr00tN17Processor.section)
        tokenizer = _tokenizer(directory, found)
        files = checkpoint.weight_files(directory)
        model_config, aliases, ignore = _fitted(found, files, directory)
    if given := given_sets(config, "gr00t", NEW_EMBODIMENT):
        horizon = max(config.num_action_chunks, model_config.head.action_horizon)
        model_config = replace(model_config, sidecars=with_statistics(model_config.sidecars, given, horizon))
    robot = model_config.sidecars.robot(config.unnorm_key, config.action_dim, report.source)
    _check_horizon(robot, config.num_action_chunks, model_config.head.action_horizon)
    processor = Gr00tN17Processor(tokenizer, model_config, robot, sizes.max_prompt_tokens)
    processor.check_room()
    generator = new_generator(device, seed)
    with torch.device("meta"):
        model = Gr00tN17Model(model_config)
    checkpoint.fill(
        model,
        files,
        report,
        lambda: model.init_weights(generator),
        device=device,
        dtype=dtype,
        aliases=aliases,
        ignore=ignore,
    )
    model.reset_buffers(device)
    images = processor.images
    report.conventions["images"] = (
        f"to {images.side} pixels, the middle {images.crop}, to {model_config.image_size} ({PROCESSOR_FILE})"
    )
    head = model_config.head
    value_input = head.hidden_size if config.value_head.input == "suffix" else head.backbone_dim + head.dit.width
    value_head = build_value_head(config, value_input, directory, report, device=device, generator=generator)
    noise_head = build_noise_head(
        config, head.hidden_size, head.action_dim, directory, report, device=device, generator=generator
    )
    return Gr00tPolicy(model, processor, robot, config, value_head, noise_head), report


def _check_horizon(robot: RobotStats, num_action_chunks: int, predicted: int) -> None:
    assert robot.horizon is not None
    if robot.horizon > predicted:
        raise CheckpointError(
            f"the robot '{robot.name}' has actions of {robot.horizon} steps, the model predicts {predicted}",
            "use a checkpoint whose processor_config.json and config.json match",
            code="action-horizon",
        )
    if num_action_chunks > robot.horizon:
        raise EmbodrlError(
            f"the robot '{robot.name}' was trained with {robot.horizon} actions, {num_action_chunks} are to be run",
            f"set model.num_action_chunks to {robot.horizon} or less",
            code="action-horizon",
        )


def _tokenizer(directory: Path, config: Gr00tN17Config) -> ChatTokenizer:
    """Return the checkpoint's tokenizer, or its language model's from the hub: NVIDIA's checkpoints have none."""
    place = directory
    if not has_tokenizer(directory):
        hint = f"put tokenizer.json of {config.backbone} into the directory; its page grants access"
        place = fetch_tokenizer(config.backbone, TOKENIZER_FILES, directory, hint)
    tokenizer = load_chat_tokenizer(place, QwenTokenizer)
    check_vocabulary(place, tokenizer.vocab_size, config.qwen.vocab_size)
    return tokenizer


def _fitted(
    config: Gr00tN17Config, files: list[Path], directory: Path
) -> tuple[Gr00tN17Config, dict[str, str], dict[str, str]]:
    """Return the configuration with a checkpoint's optional parts, the required renames and the ignored names.

    Qwen's output layer is tied to its embedding, and writers store one or both; GR00T needs the embedding.
    """
    names = checkpoint.stored_shapes(files)
    layers = {
        VISION_LAYERS: config.vision.depth,
        f"{LANGUAGE}layers.": config.qwen.num_hidden_layers,
        "action_head.model.transformer_blocks.": config.head.dit.num_layers,
        "action_head.vl_self_attention.transformer_blocks.": config.head.vl.num_layers,
    }
    checkpoint.check_layers(names, {name: count for name, count in layers.items() if count}, directory)
    embedding = f"{LANGUAGE}embed_tokens.weight"
    tied = LM_HEAD in names and embedding not in names
    aliases = {LM_HEAD: embedding} if tied else {}
    ignore = {MASK_TOKEN: "replaces states in the public training only"} if MASK_TOKEN in names else {}
    lm_head = LM_HEAD in names and not tied
    return replace(config, lm_head=lm_head), aliases, ignore
