"""From a ModelConfig to a GR00T N1.7 policy, or to one of a version that differs by a ``Version``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.models.base import LoadReport
from embodrl.models.common import checkpoint
from embodrl.models.common.heads import build_value_head
from embodrl.models.common.init import new_generator
from embodrl.models.common.limits import check_vocabulary
from embodrl.models.common.norm_stats import given_sets
from embodrl.models.flow.fetched_tokenizer import fetch_tokenizer
from embodrl.models.flow.flow_spec import FlowModelConfig
from embodrl.models.flow.noise_head import build_noise_head
from embodrl.models.gr00t.config_n1_6_n1_7 import Gr00tN17Config
from embodrl.models.gr00t.modeling import Gr00tN16Model, Gr00tN17Model
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
from embodrl.models.gr00t.spec import Gr00tN17ModelConfig, Gr00tTiledSizes

IMAGE_START = "<|vision_start|>"
IMAGE_TOKEN = "<|image_pad|>"
IMAGE_END = "<|vision_end|>"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json")
QWEN = "backbone.model"
MASK_TOKEN = "action_head.mask_token"


class QwenTokenizer(ChatTokenizer):
    """Qwen3-VL's tokenizer."""

    special_tokens: ClassVar[tuple[str, ...]] = (CHAT_START, CHAT_END, IMAGE_START, IMAGE_TOKEN, IMAGE_END)
    image_token: ClassVar[str] = IMAGE_TOKEN
    model: ClassVar[str] = "Qwen3-VL"


class Gr00tN17Processor(Gr00tProcessor):
    """Prompts, images and states as N1.7's processor_config.json says.

    Args:
        tokenizer: of the language model.
        config: of the model.
        robot: whose states are normalised.
        max_prompt_tokens: L.
    """

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
        """Return a user's message of images and instruction, as Qwen3-VL's template makes it of those alone."""
        text = self.formalized(instruction)
        images = f"{IMAGE_START}{IMAGE_TOKEN * self.num_patches}{IMAGE_END}" * num_images
        return f"{CHAT_START}user\n{images}{text}{CHAT_END}\n"

    def formalized(self, instruction: str) -> str:
        """Return an instruction in small letters without punctuation, unless the checkpoint takes it as it is."""
        return re.sub(r"[^\w\s]", "", instruction.lower()) if self.formalize else instruction

    def resized(self, images: Tensor) -> Tensor:
        """Return images ``uint8[B,H,W,3]`` at the model's size."""
        return self.images(images)


@dataclass(frozen=True)
class Version:
    """What N1.6 and N1.7 differ in.

    Attributes:
        config: class of the configuration.
        model: of the network.
        processor: of the processor.
        tokenizer: of the chat's tokenizer.
        fetched: hub repository of the tokenizer; None if it is in none.
        language: prefix of the language model's names.
        lm_head: name of its output layer.
        vision_layers: prefix of the names of vision blocks.
    """

    config: type[Gr00tN17Config]
    model: Callable[[Any], Gr00tN17Model | Gr00tN16Model]
    processor: type[Gr00tN17Processor]
    tokenizer: type[ChatTokenizer]
    fetched: str | None
    language: str
    lm_head: str
    vision_layers: str


N1_7 = Version(
    Gr00tN17Config,
    Gr00tN17Model,
    Gr00tN17Processor,
    QwenTokenizer,
    Gr00tN17Config.backbone,
    f"{QWEN}.model.language_model.",
    f"{QWEN}.lm_head.weight",
    f"{QWEN}.model.visual.blocks.",
)


def build_gr00t_n1_7(
    config: Gr00tN17ModelConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[Gr00tPolicy, LoadReport]:
    """Build the policy that a configuration asks for.

    With ``model_path`` it is a checkpoint in NVIDIA's layout, from a directory or the Hugging Face hub. Without, it
    has the dimensions of ``gr00t_n1_7`` and the weights of ``warm_start``; random ones are a function of ``seed`` and
    ``device``.

    Arguments and errors as of ``models.registry.build_policy``.
    """
    return build(config, config.gr00t_n1_7, N1_7, torch.device(device), dtype, seed)


def build(
    config: FlowModelConfig,
    sizes: Gr00tTiledSizes,
    version: Version,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> tuple[Gr00tPolicy, LoadReport]:
    """Build a policy of a version; see ``build_gr00t_n1_7``."""
    directory, report = checkpoint.locate(config)
    tokenizer = tiny_chat_tokenizer(version.tokenizer)
    model_config = version.config.from_architecture(sizes, tokenizer.vocab_size, config.action_dim)
    files = []
    aliases = {}
    ignore = {}
    if directory is not None:
        found = version.config.from_directory(directory, checkpoint.place_of(PROCESSOR_FILE, directory, report))
        if config.model_path is None:
            parts = ("vision", "qwen", "head")
            checkpoint.check_size(found, model_config, parts, directory, version.processor.section)
        tokenizer = _tokenizer(directory, found, version)
        files = checkpoint.weight_files(directory)
        model_config, aliases, ignore = _fitted(found, version, files, directory)
    if given := given_sets(config, "gr00t", NEW_EMBODIMENT):
        horizon = max(config.num_action_chunks, model_config.head.action_horizon)
        model_config = replace(model_config, sidecars=with_statistics(model_config.sidecars, given, horizon))
    robot = model_config.sidecars.robot(config.unnorm_key, config.action_dim, report.source)
    _check_horizon(robot, config.num_action_chunks, model_config.head.action_horizon)
    processor = version.processor(tokenizer, model_config, robot, sizes.max_prompt_tokens)
    processor.check_room()
    generator = new_generator(device, seed)
    with torch.device("meta"):
        model = version.model(model_config)
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
            "use a checkpoint whose processor_config.json and config.json belong together",
            code="action-horizon",
        )
    if num_action_chunks > robot.horizon:
        raise EmbodrlError(
            f"the robot '{robot.name}' was trained with {robot.horizon} actions, {num_action_chunks} are to be run",
            f"set model.num_action_chunks to {robot.horizon} or less",
            code="action-horizon",
        )


def _tokenizer(directory: Path, config: Gr00tN17Config, version: Version) -> ChatTokenizer:
    """Return the checkpoint's tokenizer, or that of its language model from the hub: NVIDIA's come without one."""
    place = directory
    if not has_tokenizer(directory):
        hint = f"put tokenizer.json of {config.backbone} into the directory"
        if version.fetched is None:
            raise CheckpointError(
                f"{directory} has no tokenizer",
                f"{hint}: it comes with NVIDIA's code, gr00t/model/modules/{config.backbone}",
                code="tokenizer-mismatch",
            )
        place = fetch_tokenizer(version.fetched, TOKENIZER_FILES, directory, f"{hint}; its page grants access")
    tokenizer = load_chat_tokenizer(place, version.tokenizer)
    check_vocabulary(place, tokenizer.vocab_size, config.qwen.vocab_size)
    return tokenizer


def _fitted(
    config: Gr00tN17Config, version: Version, files: list[Path], directory: Path
) -> tuple[Gr00tN17Config, dict[str, str], dict[str, str]]:
    """Return the configuration with the optional parts that a checkpoint has, what to rename in it and what to ignore.

    Qwen's output layer is its embedding, and writers store one of them or both; GR00T needs the embedding.
    """
    names = checkpoint.stored_shapes(files)
    layers = {
        version.vision_layers: config.vision.depth,
        f"{version.language}layers.": config.qwen.num_hidden_layers,
        "action_head.model.transformer_blocks.": config.head.dit.num_layers,
        "action_head.vl_self_attention.transformer_blocks.": config.head.vl.num_layers,
    }
    checkpoint.check_layers(names, {name: count for name, count in layers.items() if count}, directory)
    embedding = f"{version.language}embed_tokens.weight"
    tied = version.lm_head in names and embedding not in names
    pooling = any(".vision_model.head." in name for name in names)
    aliases = {version.lm_head: embedding} if tied else {}
    ignore = {MASK_TOKEN: "replaces states in the public training only"} if MASK_TOKEN in names else {}
    lm_head = version.lm_head in names and not tied
    return replace(config, lm_head=lm_head, pooling_head=pooling), aliases, ignore
