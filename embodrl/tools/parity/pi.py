"""Parity with a small recording of openpi's PI0Pytorch.

Dimensions are read from its tensors, the variant from the names of the weights; the rest is in ``DEFAULTS``, or in the
optional section ``embodrl`` of the fixture's config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from embodrl.errors import CheckpointError
from embodrl.models.common.checkpoint import load_strict
from embodrl.models.common.patches import SiglipSpec
from embodrl.models.flow.flow import accumulated_times
from embodrl.models.flow.gemma import GemmaSpec
from embodrl.models.load_report import LoadReport
from embodrl.models.openpi.config import PiConfig
from embodrl.models.openpi.weights import aliases_and_ignored
from embodrl.models.pi.modeling import PiModel
from embodrl.tools.parity.common import (
    CPU,
    INPUTS_FILE,
    Comparison,
    compare_flow,
    count_layers,
    head_dimension,
    read_settings,
    read_tensors,
)

WEIGHTS_FILE = "model.safetensors"
DEFAULTS = {"siglip_heads": 2, "gemma_heads": 8, "num_steps": 10}
"""Values that shapes leave open; defaults match the known recordings. The expert has the heads of PaliGemma's Gemma."""

_VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model"
_VLM = "paligemma_with_expert.paligemma.model.language_model"
_EXPERT = "paligemma_with_expert.gemma_expert.model"


def run(directory: Path, device: torch.device = CPU) -> list[Comparison]:
    """Compare denoised actions and the elementwise loss with a recording.

    Args:
        directory: folder with ``model.safetensors`` and ``io.safetensors``: for each camera K ``imgs.K [B,3,h,w]`` and
            ``masks.K bool[B]``, ``lang int64[B,L]``, ``lm bool[B,L]``, ``state``, ``noise``, ``act`` and ``a``
            ``[B,H,D]`` (``state [B,D]``), ``t [B]`` and ``loss [B,H,D]``.
        device: device of the network.

    Raises:
        CheckpointError: a file is missing or corrupt, or the weights don't fit.
    """
    model = load(directory).to(device)
    num_steps = read_settings(directory, DEFAULTS)["num_steps"]
    return compare_outputs(model, read_tensors(directory / INPUTS_FILE, device), num_steps)


def load(directory: Path) -> PiModel:
    """Return the recording's network, loaded strictly, in evaluation mode."""
    weights = read_tensors(directory / WEIGHTS_FILE)
    inputs = read_tensors(directory / INPUTS_FILE)
    aliases, ignore = aliases_and_ignored(weights)
    named = {aliases.get(name, name): tensor for name, tensor in weights.items()}
    settings = read_settings(directory, DEFAULTS)
    try:
        config = _config(named, inputs, settings)
    except (KeyError, IndexError) as error:
        raise CheckpointError(
            f"{directory} is not a recording of pi0 or pi0.5: it lacks {error}",
            "see docs/models.md, Parity",
            code="parity-recording",
        ) from error
    with torch.device("meta"):
        model = PiModel(config)
    files = [directory / WEIGHTS_FILE]
    load_strict(
        model,
        files,
        LoadReport(str(directory)),
        device="cpu",
        dtype=torch.float32,
        aliases=aliases,
        ignore=ignore,
    )
    return model.eval()


@torch.no_grad()
def compare_outputs(model: PiModel, io: dict[str, Tensor], num_steps: int = DEFAULTS["num_steps"]) -> list[Comparison]:
    """Compare a loaded network with the outputs in ``io``, whose actions took that many denoising steps."""
    cameras = _cameras(io)
    pixels = torch.stack([io[name] for name in cameras], dim=1)
    image_mask = torch.stack([io[name.replace("imgs", "masks")] for name in cameras], dim=1)
    context = model.encode(pixels, io["lang"], io["lm"], io["state"], image_mask)

    velocity = partial(model.velocity, context)
    return compare_flow(velocity, io["noise"], io["act"], io["t"], num_steps, io["a"], io["loss"], accumulated_times)


def _cameras(inputs: Mapping[str, Tensor]) -> list[str]:
    return sorted((name for name in inputs if name.startswith("imgs.")), key=lambda name: int(name.split(".")[1]))


def _config(weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor], settings: Mapping[str, int]) -> PiConfig:
    patch = weights[f"{_VISION}.embeddings.patch_embedding.weight"]
    width = patch.shape[0]
    heads = settings["siglip_heads"]
    head_dimension(width, heads, "siglip_heads")
    siglip = SiglipSpec(
        inputs["imgs.0"].shape[-1],
        patch.shape[-1],
        width,
        count_layers(weights, f"{_VISION}.encoder.layers."),
        heads,
        weights[f"{_VISION}.encoder.layers.0.mlp.fc1.weight"].shape[0],
    )
    return PiConfig(
        "pi05" if "time_mlp_in.weight" in weights else "pi0",
        siglip,
        _gemma(weights, _VLM, settings["gemma_heads"]),
        _gemma(weights, _EXPERT, settings["gemma_heads"]),
        weights[f"{_VLM}.embed_tokens.weight"].shape[0],
        inputs["noise"].shape[2],
        inputs["noise"].shape[1],
        num_images=len(_cameras(inputs)),
        max_prompt_tokens=inputs["lang"].shape[1],
    )


def _gemma(weights: Mapping[str, Tensor], base: str, heads: int) -> GemmaSpec:
    first = f"{base}.layers.0"
    queries, width = weights[f"{first}.self_attn.q_proj.weight"].shape
    head_dim = head_dimension(queries, heads, "gemma_heads")
    return GemmaSpec(
        width,
        count_layers(weights, f"{base}.layers."),
        weights[f"{first}.mlp.gate_proj.weight"].shape[0],
        heads,
        weights[f"{first}.self_attn.k_proj.weight"].shape[0] // head_dim,
        head_dim,
    )
