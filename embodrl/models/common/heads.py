"""Heads that embodrl adds to a family's network: the critic, and others such as the noise of denoising steps.

Each has its own file, so that the rest remains a plain checkpoint of its family.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TypeVar

import torch

from embodrl.config.schema import ModelConfig
from embodrl.models.common import checkpoint
from embodrl.models.common.value_head import DrawnHead, FeatureTap, ValueHead
from embodrl.models.load_report import LoadReport
from embodrl.storage.files import write_safetensors

logger = logging.getLogger(__name__)

VALUE_HEAD_FILE = "value_head.safetensors"

Head = TypeVar("Head", bound=DrawnHead)


def build_value_head(
    config: ModelConfig,
    input_dim: int,
    directory: Path | None,
    report: LoadReport,
    device: torch.device | str,
    generator: torch.Generator,
) -> ValueHead | None:
    """Return the configured critic, in float32, loaded from the checkpoint if it has one of the same shape.

    ``input_dim`` is the size of the hidden state it reads. Raises ``CheckpointError`` if the critic's file is corrupt.
    """
    if not config.add_value_head:
        ignore_head(directory, VALUE_HEAD_FILE, "model.add_value_head is false", report)
        return None
    outputs = config.num_action_chunks if config.value_head.output == "action" else 1
    head = ValueHead(input_dim, config.value_head.hidden_sizes, outputs).to(device)
    return fill_head(
        head, "value_head", "model.value_head asks for another shape", directory, report, device, generator
    )


def save_heads(directory: Path, value_head: ValueHead | FeatureTap | None) -> None:
    """Write the critic, if any."""
    if value_head is not None and not isinstance(value_head, FeatureTap):
        write_safetensors(directory / VALUE_HEAD_FILE, value_head.state_dict())


def ignore_head(directory: Path | None, name: str, reason: str, report: LoadReport) -> None:
    """Report a head's file, if any, as unused."""
    if directory is not None and (directory / name).is_file():
        report.ignored[name] = reason


def fill_head(
    head: Head,
    role: str,
    mismatch: str,
    directory: Path | None,
    report: LoadReport,
    device: torch.device | str,
    generator: torch.Generator,
) -> Head:
    """Load a head from ``{role}.safetensors`` if the checkpoint has it in the same shape; else draw new weights.

    The head is always float32. ``mismatch`` is the reason reported for a valid head of another shape. Raises
    ``CheckpointError`` if the file is corrupt.
    """
    if torch.device(device).type != "meta":  # drawing on the meta device would import torch's compiler
        head.init_weights(generator)  # even if overwritten, so later draws do not depend on the checkpoint
    name = f"{role}.safetensors"
    path = None if directory is None else checkpoint.place_of(name, directory, report) / name
    if path is not None and path.is_file():
        found = checkpoint.stored_shapes([path])
        wanted = {name: tuple(value.shape) for name, value in head.state_dict().items()}
        # A valid head of another shape was made with other settings; anything else is damage.
        if found == wanted or not (_is_mlp(found) or _is_own_critic(found)):
            checkpoint.load_strict(head, [path], report, device=device, dtype=torch.float32)
            return head
        report.ignored[path.name] = mismatch
        logger.warning("%s is not used: %s; initializing a new one", path, mismatch)
    for name in head.state_dict():
        report.initialized[f"{role}.{name}"] = "not in the checkpoint"
    return head


def _is_own_critic(shapes: dict[str, tuple[int, ...]]) -> bool:
    """Return whether the names are those of a critic that is a network of its own (``own_critic.OwnCritic``)."""
    return {"head"} <= {name.partition(".")[0] for name in shapes} <= {"encoder", "head"}


def _is_mlp(shapes: dict[str, tuple[int, ...]]) -> bool:
    """Return whether names and shapes form an MLP with consistent layer sizes."""
    width: int | None = None
    left = dict(shapes)
    for stem in [*_numbered(left, "hidden"), *_numbered(left, "layers"), *(["out"] if "out.weight" in left else [])]:
        weight = left.pop(f"{stem}.weight")
        bias = left.pop(f"{stem}.bias", None)
        if len(weight) != 2 or (width is not None and weight[1] != width) or (bias is None) != (stem == "out"):
            return False
        if bias is not None and bias != weight[:1]:
            return False
        width = weight[0]
    return not left and width is not None and ("out.weight" in shapes or "layers.0.weight" in shapes)


def _numbered(shapes: dict[str, tuple[int, ...]], stem: str) -> list[str]:
    names: list[str] = []
    while f"{stem}.{len(names)}.weight" in shapes:
        names.append(f"{stem}.{len(names)}")
    return names
