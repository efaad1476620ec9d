"""Flow-Noise's head on a family's network: the noise of its denoising steps, in a separate file."""

from __future__ import annotations

from pathlib import Path

import torch

from embodrl.models.common.heads import fill_head, ignore_head
from embodrl.models.flow.flow import NoiseHead
from embodrl.models.flow.flow_spec import FlowModelConfig
from embodrl.models.load_report import LoadReport
from embodrl.storage.files import write_safetensors

NOISE_HEAD_FILE = "noise_head.safetensors"


def build_noise_head(
    config: FlowModelConfig,
    feature_dim: int,
    action_dim: int,
    directory: Path | None,
    report: LoadReport,
    device: torch.device | str,
    generator: torch.Generator,
) -> NoiseHead | None:
    """Return Flow-Noise's head, loaded from the checkpoint if it has one; None with Flow-SDE.

    It reads an action's features, ``float32[..., feature_dim]``; ``action_dim`` is padded. See ``build_value_head``.
    """
    if config.flow.method != "flow_noise":
        ignore_head(directory, NOISE_HEAD_FILE, f"model.flow.method is {config.flow.method}", report)
        return None
    head = NoiseHead(feature_dim, action_dim, config.flow.noise_std_min, config.flow.noise_std_max).to(device)
    return fill_head(head, "noise_head", "the network has another size", directory, report, device, generator)


def save_noise_head(directory: Path, noise_head: NoiseHead | None) -> None:
    """Write the head, if any."""
    if noise_head is not None:
        write_safetensors(directory / NOISE_HEAD_FILE, noise_head.state_dict())
