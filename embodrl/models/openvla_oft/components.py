"""Components of an OpenVLA-OFT checkpoint outside of its weights, each in a separate file.

Public files (finetune.py of moojink/openvla-oft) are pickled mappings of tensors, from which only tensors are read;
embodrl writes safetensors.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor, nn

from embodrl.errors import PolicyFileError
from embodrl.fields import check_regular_file
from embodrl.models.common import checkpoint
from embodrl.models.load_report import LoadReport

PROPRIO = "proprio_projector"
ACTION_HEAD = "action_head"
NOISY_ACTIONS = "noisy_action_projector"
VISION = "vision_backbone"
MAX_DEFAULT_ALPHA = 16
"""finetune.py adapts layers with ``alpha = min(rank, 16)``; the file only has the rank."""


def component_file(directory: Path, name: str) -> Path | None:
    """Return embodrl's file of a component, else the single public file; None if there is none.

    Raises ``PolicyFileError`` for public files of several training steps.
    """
    own = directory / f"{name}.safetensors"
    if own.is_file():
        return own
    public = sorted(directory.glob(f"{name}--*.pt"))
    if len(public) > 1:
        names = ", ".join(path.name for path in public)
        raise PolicyFileError(f"{directory} has files of several training steps: {names}", "keep one of them")
    return public[0] if public else None


def load_component(
    module: nn.Module, path: Path, report: LoadReport, *, device: torch.device, dtype: torch.dtype
) -> None:
    """Fill a module on the meta device from a component's file; raise ``PolicyFileError`` if corrupt or unfit."""
    own = path.suffix == ".safetensors"
    files, tensors = ([path], {}) if own else ([], read_pickled(path, device))
    checkpoint.load_strict(module, files, report, device=device, dtype=dtype, tensors=tensors)


def read_pickled(path: Path, device: torch.device) -> dict[str, Tensor]:
    """Return the memory-mapped tensors of a public file; on the meta device if ``device`` is.

    Raises ``PolicyFileError`` if the file is corrupt, not a mapping of tensors, or smaller than its tensors.
    """
    again = "fetch the checkpoint again"
    try:
        check_regular_file(path)
        stored: object = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise PolicyFileError(f"{path} can't be read: {error}", again) from error
    if not isinstance(stored, dict) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise PolicyFileError(f"{path} can't be read: it is not a mapping of tensors", again)
    tensors: dict[str, Tensor] = {str(name).removeprefix("module."): value for name, value in stored.items()}
    # A view of stride 0 can have any size without memory, until it is copied.
    if sum(value.numel() * value.element_size() for value in tensors.values()) > path.stat().st_size:
        raise PolicyFileError(f"{path} can't be read: its tensors are larger than the file", again)
    return {name: value.to("meta") if device.type == "meta" else value for name, value in tensors.items()}


def film_tensors(path: Path, report: LoadReport, device: torch.device) -> dict[str, Tensor]:
    """Return a public file's FiLM vision backbone under embodrl's names, with adapters merged.

    finetune.py wraps the adapted backbone in a FiLM backbone, hence nested names such as
    ``vision_backbone.featurizer.blocks.0.block.attn.qkv.base_layer.weight`` and its ``lora_A.default.weight``.

    Raises:
        PolicyFileError: the file is corrupt, or factors do not fit their layer.
    """
    stored = read_pickled(path, device)
    tensors: dict[str, Tensor] = {}
    for name, value in stored.items():
        if ".lora_" in name:
            continue
        layer, base, parameter = name.rpartition(".base_layer.")
        if base and parameter == "weight":
            value = _merged(value, stored, layer, path, report)
        plain = name.replace(".base_layer.", ".").replace(".block.", ".")
        tensors[plain] = value
    return tensors


def _merged(weight: Tensor, stored: dict[str, Tensor], layer: str, path: Path, report: LoadReport) -> Tensor:
    """Return ``float32[out,...]``: ``weight + alpha / rank * up @ down``; a convolution is a product of patches."""
    down, up = (stored.get(f"{layer}.lora_{factor}.default.weight") for factor in "AB")
    if down is None or up is None:
        raise PolicyFileError(f"{path} lacks factors of the adapter of {layer}", "fetch the checkpoint again")
    rank = len(down)
    (down, up) = (down.flatten(1).float(), up.flatten(1).float())
    if up.shape[1] != rank or (len(up), down.shape[1]) != weight.flatten(1).shape:
        raise PolicyFileError(f"{path}: the adapter of {layer} does not fit its layer", "fetch the checkpoint again")
    alpha = min(rank, MAX_DEFAULT_ALPHA)
    report.conventions["adapters of the vision backbone"] = f"alpha {alpha} for rank {rank}, as finetune.py sets it"
    return weight.float() + (up @ down * (alpha / rank)).view(weight.shape)
