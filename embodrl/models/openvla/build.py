"""From a ModelConfig to an OpenVLA policy: a public checkpoint, or the tiny size."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from embodrl.config.schema import ModelConfig
from embodrl.errors import CheckpointError
from embodrl.models.base import LoadReport
from embodrl.models.common import checkpoint
from embodrl.models.common.norm_stats import choose_stats, identity_stats
from embodrl.models.common.tokenizer import PromptTokenizer, tiny_tokenizer
from embodrl.models.common.value_head import ValueHead
from embodrl.models.openvla.config import OpenVLAConfig
from embodrl.models.openvla.modeling import OpenVLAModel, init_weights
from embodrl.models.openvla.policy import VALUE_HEAD_FILE, OpenVLAPolicy
from embodrl.models.openvla.processing import OpenVLAProcessor

BUILTIN_WARM_START = Path(__file__).parents[2] / "assets" / "openvla_tiny"
TINY_STATS_KEY = "maniskill"
RANDOM_SOURCE = "random weights"


def build_openvla(
    config: ModelConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
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
    device = torch.device(device)
    directory = _source(config)
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
            _check_architecture(model_config, tiny, directory)
    source = RANDOM_SOURCE if directory is None else str(directory)
    stats = choose_stats(model_config.norm_stats, config.unnorm_key, config.action_dim, source)
    generator = torch.Generator(device).manual_seed(seed)
    report = LoadReport(source)
    model = _build_model(model_config, directory, report, device, dtype, generator)
    processor = OpenVLAProcessor(
        tokenizer,
        model_config.image_size,
        config.architecture.max_prompt_tokens,
        model_config.pad_token_id,
        config.center_crop,
    )
    head = _value_head(config, model_config, directory, report, device, generator)
    policy = OpenVLAPolicy(model, processor, stats, config.num_action_chunks, head, config.freeze_vision)
    return policy, report


def _source(config: ModelConfig) -> Path | None:
    if config.model_path is not None:
        return checkpoint.resolve(config.model_path)
    if config.warm_start is None:
        return None
    if config.warm_start == "builtin":
        if not (BUILTIN_WARM_START / "config.json").is_file():
            raise CheckpointError(
                "this installation of embodrl has no built-in warm start",
                "make one with `make warm-start`, or start from random weights with model.warm_start=null",
            )
        return BUILTIN_WARM_START
    directory = Path(config.warm_start).expanduser()
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"model.warm_start: {directory} holds no policy",
            "give a directory that `embodrl sft` wrote, builtin or null",
        )
    return directory


def _check_architecture(found: OpenVLAConfig, wanted: OpenVLAConfig, directory: Path) -> None:
    differences: list[str] = []
    for part in ("dino", "siglip", "llama"):
        have, want = asdict(getattr(found, part)), asdict(getattr(wanted, part))
        differences += [
            f"{part}.{name} {have[name]} instead of {want[name]}" for name in want if have[name] != want[name]
        ]
    if differences:
        raise CheckpointError(
            f"the warm start {directory} has another size than model.architecture: {'; '.join(differences)}",
            "set model.architecture to the size of the warm start, or model.warm_start=null for random weights",
        )


def _build_model(
    config: OpenVLAConfig,
    directory: Path | None,
    report: LoadReport,
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> OpenVLAModel:
    # Without memory first, so that a 7B model is never held twice.
    with torch.device("meta"):
        model = OpenVLAModel(config)
    if directory is None:
        model.to(dtype).to_empty(device=device)
        init_weights(model, generator)
        report.initialized = dict.fromkeys(model.state_dict(), "random weights were asked for")
    else:
        checkpoint.load_strict(model, checkpoint.weight_files(directory), report, device=device, dtype=dtype)
    model.reset_buffers(device)
    return model


def _value_head(
    config: ModelConfig,
    model_config: OpenVLAConfig,
    directory: Path | None,
    report: LoadReport,
    device: torch.device,
    generator: torch.Generator,
) -> ValueHead | None:
    path = None if directory is None else directory / VALUE_HEAD_FILE
    if not config.add_value_head:
        if path is not None and path.is_file():
            report.ignored[VALUE_HEAD_FILE] = "model.add_value_head is false"
        return None
    outputs = config.num_action_chunks if config.value_head.output == "action" else 1
    head = ValueHead(model_config.llama.hidden_size, config.value_head.hidden_sizes, outputs).to(device)
    head.init_weights(generator)
    if path is not None and path.is_file():
        if _shapes(path) == {name: tuple(value.shape) for name, value in head.state_dict().items()}:
            checkpoint.load_strict(head, [path], report, device=device, dtype=torch.float32)
            return head
        report.ignored[VALUE_HEAD_FILE] = "model.value_head asks for another shape"
    for name in head.state_dict():
        report.initialized[f"value_head.{name}"] = "not in the checkpoint"
    return head


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as reader:
            return {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", "fetch or make the checkpoint again") from error
