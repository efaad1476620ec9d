"""Parity with a small recording of lerobot's GR00T N1.7.

The dimensions of the vision-language model and the id of its image token are in the section ``embodrl`` of the
fixture's config.json, as in policies written by embodrl.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from embodrl.models.common.checkpoint import load_strict
from embodrl.models.common.config_file import CONFIG_FILE, OWN_SECTION, read_file
from embodrl.models.flow.flow import integrate, reversed_velocity
from embodrl.models.gr00t.config_n1_7 import Gr00tN17Config
from embodrl.models.gr00t.modeling import Gr00tN17Model
from embodrl.models.gr00t.sidecars import identity_sidecars
from embodrl.models.load_report import LoadReport
from embodrl.tools.parity.common import (
    CHAIN_TOLERANCE,
    CPU,
    INPUTS_FILE,
    LOGITS_TOLERANCE,
    Comparison,
    compare,
    read_tensors,
)

WEIGHTS_FILE = "model.safetensors"
NUM_STEPS = 4


def run(directory: Path, device: torch.device = CPU) -> list[Comparison]:
    """Compare the network with a recording.

    Args:
        directory: folder with ``model.safetensors`` (the public names), ``config.json`` and ``io.safetensors``:
            ``pixels [B,V,3,h,w]`` in [-1, 1], ``input_ids`` and ``attention_mask [B,S]``, left-padded, ``state
            [B,1,*]``, ``emb int64[B]``, ``x`` and ``noise [B,H,D]``, ``t int64[B]``; and from the reference, row by row
            without padding, ``features`` and ``vl [B,S,E]``, the velocity ``v`` at ``x`` and actions ``sampled`` from
            ``noise``.
        device: device of the network.

    Raises:
        CheckpointError: not such a recording.
    """
    io = read_tensors(directory / INPUTS_FILE, device)
    return compare_outputs(load(directory).to(device), io, image_token_id(directory))


def image_token_id(directory: Path) -> int:
    """Return the id of the image token."""
    return read_file(directory / CONFIG_FILE).fields(OWN_SECTION).integer("image_token_id")


def load(directory: Path) -> Gr00tN17Model:
    """Return the recording's network, loaded strictly."""
    fields = read_file(directory / CONFIG_FILE)
    shape = read_tensors(directory / INPUTS_FILE)["pixels"].shape
    config = Gr00tN17Config.from_dict(fields.content, identity_sidecars("", shape[-1], 1.0, 1, 1, 0), fields.source)
    with torch.device("meta"):
        model = Gr00tN17Model(config)
    load_strict(model, [directory / WEIGHTS_FILE], LoadReport(str(directory)), device="cpu", dtype=torch.float32)
    model.reset_buffers(torch.device("cpu"))
    return model


@torch.no_grad()
def compare_outputs(model: Gr00tN17Model, io: dict[str, Tensor], image_token: int) -> list[Comparison]:
    """Compare a loaded network with the outputs in ``io``."""
    head = model.action_head
    mask = io["attention_mask"].bool()
    features = model.features(io["pixels"], io["input_ids"], image_token, mask)
    processed = head.process_features(features, mask[:, None, None])
    seen = head.seen(mask, io["input_ids"] == image_token)
    state = head.encode_state(io["state"], io["emb"])
    known = head.model.key_values(processed)

    def towards_data(x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        return head(x, head.buckets(time), state, known, seen, io["emb"])

    velocity, _ = head(io["x"], io["t"], state, known, seen, io["emb"])
    sampled = integrate(reversed_velocity(towards_data), io["noise"], NUM_STEPS)
    return [
        compare("features", features[mask], io["features"][mask], LOGITS_TOLERANCE),
        compare("vl", processed[mask], io["vl"][mask], LOGITS_TOLERANCE),
        compare("v", velocity, io["v"], LOGITS_TOLERANCE),
        compare("actions", sampled, io["sampled"], CHAIN_TOLERANCE),
    ]
