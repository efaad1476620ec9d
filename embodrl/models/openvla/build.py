"""From a ModelConfig to an OpenVLA policy: a public checkpoint, or the tiny size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from embodrl.errors import CheckpointError
from embodrl.models.base import LoadReport
from embodrl.models.common import checkpoint
from embodrl.models.common.heads import build_value_head
from embodrl.models.common.init import new_generator
from embodrl.models.common.norm_stats import ActionStats, choose_stats, identity_stats
from embodrl.models.common.tokenizer import PromptTokenizer, tiny_tokenizer
from embodrl.models.common.value_head import ValueHead
from embodrl.models.openvla.config import OpenVLAConfig
from embodrl.models.openvla.modeling import OpenVLAModel, init_weights
from embodrl.models.openvla.policy import OpenVLAPolicy
from embodrl.models.openvla.processing import OpenVLAProcessor
from embodrl.models.openvla.spec import OpenVlaConfig

BUILTIN_WARM_START = Path(__file__).parents[2] / "assets" / "openvla_tiny"
TINY_STATS_KEY = "maniskill"
RANDOM_SOURCE = "random weights"


@dataclass
class Parts:
    """What policies on the OpenVLA network are put together from.

    Attributes:
        directory: of the checkpoint or the warm start; None with random weights.
        model: the network, filled.
        tokenizer: of its prompts.
        stats: action statistics of the robot.
        value_head: the critic, or None.
        report: what became of the checkpoint.
        generator: for further random weights.
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
    """Build the policy that a configuration asks for.

    With ``model_path`` it is a checkpoint in the public layout, from a directory or the Hugging Face hub. Without, it
    has the dimensions of ``architecture`` and the weights of ``warm_start``; random ones are a function of ``seed``
    and ``device``.

    Args:
        config: the section ``model``.
        device: where the policy lives.
        dtype: of its weights; the value head is always float32.
        seed: of weights that come from no checkpoint.

    Raises:
        CheckpointError: no such checkpoint, or it does not fit.
    """
    parts = build_parts(config, BUILTIN_WARM_START, True, torch.device(device), dtype, seed)
    model = parts.model.config
    if "keep_stop_token" in model.raw.get("embodrl", {}):
        raise CheckpointError(
            f"{parts.directory} holds an OpenVLA-OFT policy, whose attention is bidirectional",
            "set model.model_type=openvla_oft (model=openvla_oft)",
        )
    processor = OpenVLAProcessor(
        parts.tokenizer, model.image_size, config.architecture.max_prompt_tokens, model.pad_token_id, config.center_crop
    )
    return OpenVLAPolicy(parts.model, processor, parts.stats, config, parts.value_head), parts.report


def build_parts(
    config: OpenVlaConfig, builtin: Path | None, causal: bool, device: torch.device, dtype: torch.dtype, seed: int
) -> Parts:
    """Build the network and what goes with it.

    Args:
        config: the section ``model``.
        builtin: what ``warm_start: builtin`` means; None if no weights ship.
        causal: see OpenVLAModel.
        device: where the network lives.
        dtype: of its weights.
        seed: of weights that come from no checkpoint.

    Raises:
        CheckpointError: no such checkpoint, or it does not fit.
    """
    directory = _source(config, builtin)
    tokenizer = tiny_tokenizer()
    tiny = OpenVLAConfig.from_architecture(
        config.architecture,
        tokenizer.vocab_size,
        tokenizer.prompt_end_id,
        {TINY_STATS_KEY: identity_stats(config.action_dim)},
    )
    model_config = tiny
    if directory is not None:
        model_config = OpenVLAConfig.from_directory(directory)
        tokenizer = PromptTokenizer(directory / "tokenizer.json", model_config.bos_id, model_config.prompt_end_id)
        if config.model_path is None:
            checkpoint.check_size(model_config, tiny, ("dino", "siglip", "llama"), directory, "model.architecture")
    report = LoadReport(RANDOM_SOURCE if directory is None else str(directory))
    stats = choose_stats(model_config.norm_stats, config.unnorm_key, config.action_dim, report.source)
    generator = new_generator(device, seed)
    model = _build_model(model_config, causal, directory, report, device, dtype, generator)
    head = build_value_head(
        config, model_config.llama.hidden_size, directory, report, device=device, generator=generator
    )
    return Parts(directory, model, tokenizer, stats, head, report, generator)


def _source(config: OpenVlaConfig, builtin: Path | None) -> Path | None:
    if config.model_path is not None:
        return checkpoint.resolve(config.model_path)
    if config.warm_start is None:
        return None
    if config.warm_start == "builtin":
        if builtin is None:
            raise CheckpointError(
                f"no weights ship for {config.model_type}",
                "start from random weights with model.warm_start=null, or give a directory that `embodrl sft` wrote",
            )
        if not (builtin / "config.json").is_file():
            raise CheckpointError(
                "this installation of embodrl has no built-in warm start",
                "make one with `make warm-start`, or start from random weights with model.warm_start=null",
            )
        return builtin
    directory = Path(config.warm_start).expanduser()
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"model.warm_start: {directory} holds no policy",
            "give a directory that `embodrl sft` wrote, builtin or null",
        )
    return directory


def _build_model(
    config: OpenVLAConfig,
    causal: bool,
    directory: Path | None,
    report: LoadReport,
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> OpenVLAModel:
    # Without memory first, so that a 7B model is never held twice.
    with torch.device("meta"):
        model = OpenVLAModel(config, causal)
    if directory is None:
        model.to(dtype).to_empty(device=device)
        init_weights(model, generator)
        report.initialized = dict.fromkeys(model.state_dict(), "random weights were asked for")
    else:
        checkpoint.load_strict(model, checkpoint.weight_files(directory), report, device=device, dtype=dtype)
    model.reset_buffers(device)
    return model
