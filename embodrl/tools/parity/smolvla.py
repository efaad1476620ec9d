"""Parity with a small recording of lerobot's VLAFlowMatching.

Dimensions are in the section ``embodrl`` of the fixture's config.json, as in policies written by embodrl.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from embodrl.models.common.checkpoint import load_strict, stored_shapes
from embodrl.models.common.config_file import CONFIG_FILE
from embodrl.models.load_report import LoadReport
from embodrl.models.smolvla.config import SmolVlaConfig
from embodrl.models.smolvla.files import aliases_and_ignored
from embodrl.models.smolvla.modeling import SmolVlaModel
from embodrl.tools.parity.common import (
    CPU,
    INPUTS_FILE,
    Comparison,
    compare_flow,
    read_tensors,
)

WEIGHTS_FILE = "model.safetensors"


def run(directory: Path, device: torch.device = CPU) -> list[Comparison]:
    """Compare the network with a recording.

    Args:
        directory: folder with ``model.safetensors`` (lerobot's names), ``config.json`` and ``io.safetensors``: ``images
            [B,V,3,h,w]`` in [-1, 1], ``lang``, ``lang_mask``, ``state``, ``noise``, ``actions``, ``time``; and from the
            reference ``sampled`` actions and ``losses``.
        device: device of the network.

    Raises:
        CheckpointError: not such a recording.
    """
    return compare_outputs(load(directory).to(device), read_tensors(directory / INPUTS_FILE, device))


def load(directory: Path) -> SmolVlaModel:
    """Return the recording's network, loaded strictly, in evaluation mode."""
    config = SmolVlaConfig.read(directory / CONFIG_FILE)
    with torch.device("meta"):
        model = SmolVlaModel(config)
    weights = [directory / WEIGHTS_FILE]
    aliases, ignore = aliases_and_ignored(stored_shapes(weights))
    report = LoadReport(str(directory))
    load_strict(model, weights, report, device="cpu", dtype=torch.float32, aliases=aliases, ignore=ignore)
    return model.eval()


@torch.no_grad()
def compare_outputs(model: SmolVlaModel, io: dict[str, Tensor]) -> list[Comparison]:
    """Compare a loaded network with the outputs in ``io``."""
    context = model.encode(io["images"], io["lang"], io["lang_mask"].bool(), io["state"])

    velocity = partial(model.velocity, context)
    steps = model.config.num_steps
    return compare_flow(velocity, io["noise"], io["actions"], io["time"], steps, io["sampled"], io["losses"])
