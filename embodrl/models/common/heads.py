"""The heads that embodrl adds to a family's network: built, loaded and saved beside the family's own weights."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from embodrl.config.model_schema import ModelConfig
from embodrl.errors import CheckpointError
from embodrl.models.base import LoadReport
from embodrl.models.common import checkpoint
from embodrl.models.common.flow import NoiseHead
from embodrl.models.common.value_head import ValueHead

VALUE_HEAD_FILE = "value_head.safetensors"
NOISE_HEAD_FILE = "noise_head.safetensors"

Head = TypeVar("Head", ValueHead, NoiseHead)


def build_value_head(
    config: ModelConfig,
    input_dim: int,
    directory: Path | None,
    report: LoadReport,
    device: torch.device,
    generator: torch.Generator,
) -> ValueHead | None:
    """Return the critic, from ``value_head.safetensors`` of a checkpoint or random, or None if none is wanted.

    Args:
        config: section ``model``.
        input_dim: width of what the value is read from.
        directory: of the checkpoint, or None.
        report: filled in.
        device: of the head.
        generator: of random weights.

    Raises:
        CheckpointError: the file is corrupt.
    """
    if not config.add_value_head:
        _unused(directory, VALUE_HEAD_FILE, report, "model.add_value_head is false")
        return None
    outputs = config.num_action_chunks if config.value_head.output == "action" else 1
    head = ValueHead(input_dim, config.value_head.hidden_sizes, outputs).to(device)
    return _filled(head, "value_head", directory, VALUE_HEAD_FILE, report, device, generator)


def build_noise_head(
    config: ModelConfig,
    feature_dim: int,
    padded_action_dim: int,
    directory: Path | None,
    report: LoadReport,
    device: torch.device,
    generator: torch.Generator,
) -> NoiseHead | None:
    """Return Flow-Noise's head, from ``noise_head.safetensors`` or random, or None with Flow-SDE; see above."""
    if config.flow.method != "flow_noise":
        _unused(directory, NOISE_HEAD_FILE, report, "model.flow.method is flow_sde")
        return None
    head = NoiseHead(feature_dim, padded_action_dim, config.flow.noise_std_min, config.flow.noise_std_max).to(device)
    return _filled(head, "noise_head", directory, NOISE_HEAD_FILE, report, device, generator)


def save_heads(value_head: nn.Module | None, noise_head: nn.Module | None, directory: Path) -> None:
    """Write the heads that there are."""
    for head, name in ((value_head, VALUE_HEAD_FILE), (noise_head, NOISE_HEAD_FILE)):
        if head is not None:
            checkpoint.save_file(head.state_dict(), directory / name)


def _unused(directory: Path | None, name: str, report: LoadReport, reason: str) -> None:
    if directory is not None and (directory / name).is_file():
        report.ignored[name] = reason


def _filled(
    head: Head,
    name: str,
    directory: Path | None,
    file_name: str,
    report: LoadReport,
    device: torch.device,
    generator: torch.Generator,
) -> Head:
    head.init_weights(generator)
    path = None if directory is None else directory / file_name
    if path is not None and path.is_file():
        if _shapes(path) == {key: tuple(value.shape) for key, value in head.state_dict().items()}:
            checkpoint.load_strict(head, [path], report, device=device, dtype=torch.float32)
            return head
        report.ignored[file_name] = "the configuration asks for another shape"
    for key in head.state_dict():
        report.initialized[f"{name}.{key}"] = "not in the checkpoint"
    return head


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as reader:
            return {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", "fetch or make the checkpoint again") from error
