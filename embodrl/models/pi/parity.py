"""A recording of openpi's PI0Pytorch, made at small size, beside the network here.

The recording has no config.json, so its dimensions are read from its tensors; what shapes leave open is in
``_FIXTURE``. The variant follows from the names of the weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from embodrl.errors import CheckpointError
from embodrl.models.base import LoadReport
from embodrl.models.common.checkpoint import load_strict
from embodrl.models.common.flow import integrate
from embodrl.models.common.gemma import GemmaSpec
from embodrl.models.common.parity import (
    CHAIN_TOLERANCE,
    INPUTS_FILE,
    LOGITS_TOLERANCE,
    Comparison,
    compare,
    read_tensors,
)
from embodrl.models.common.siglip import SiglipSpec
from embodrl.models.pi.config import PiConfig
from embodrl.models.pi.modeling import PiModel
from embodrl.models.pi.weights import aliases_and_ignored

WEIGHTS_FILE = "model.safetensors"
_FIXTURE = {"siglip_heads": 2, "gemma_heads": 8, "steps": 10}
_VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model"
_VLM = "paligemma_with_expert.paligemma.model.language_model"
_EXPERT = "paligemma_with_expert.gemma_expert.model"


def run(directory: Path) -> list[Comparison]:
    """Compare ten-step actions and the elementwise loss with a recording.

    Args:
        directory: holds ``model.safetensors`` and ``io.safetensors``.

    Raises:
        CheckpointError: a file is missing or corrupt, or the weights don't fit.
    """
    model = load(directory)
    return compare_outputs(model, read_tensors(directory / INPUTS_FILE))


def load(directory: Path) -> PiModel:
    """Return the recording's network, loaded strictly, in evaluation mode."""
    weights = read_tensors(directory / WEIGHTS_FILE)
    inputs = read_tensors(directory / INPUTS_FILE)
    try:
        config = _config(weights, inputs)
    except (KeyError, IndexError) as error:
        raise CheckpointError(
            f"{directory} is no recording of pi0 or pi0.5: it lacks {error}", "see shared/parity's layout"
        ) from error
    with torch.device("meta"):
        model = PiModel(config)
    files = [directory / WEIGHTS_FILE]
    aliases, ignore = aliases_and_ignored(weights)
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
def compare_outputs(model: PiModel, io: dict[str, Tensor]) -> list[Comparison]:
    """Compare a loaded network with the outputs in ``io``."""
    cameras = sorted(name for name in io if name.startswith("imgs."))
    pixels = torch.stack([io[name] for name in cameras], dim=1)
    image_mask = torch.stack([io[name.replace("imgs", "masks")] for name in cameras], dim=1)
    context = model.encode(pixels, io["lang"], io["lm"], io["state"], image_mask)

    def velocity(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        return model.velocity(context, x, tau)

    actions = integrate(velocity, io["noise"], _FIXTURE["steps"])
    tau = io["t"][:, None, None]
    x = tau * io["noise"] + (1.0 - tau) * io["act"]
    loss = (velocity(x, io["t"])[0] - (io["noise"] - io["act"])).square()
    return [
        compare("actions", actions, io["a"], CHAIN_TOLERANCE),
        compare("loss", loss, io["loss"], LOGITS_TOLERANCE),
    ]


def _config(weights: dict[str, Tensor], inputs: dict[str, Tensor]) -> PiConfig:
    patch = weights[f"{_VISION}.embeddings.patch_embedding.weight"]
    siglip = SiglipSpec(
        inputs["imgs.0"].shape[-1],
        patch.shape[-1],
        patch.shape[0],
        _depth(weights, f"{_VISION}.encoder.layers."),
        _FIXTURE["siglip_heads"],
        weights[f"{_VISION}.encoder.layers.0.mlp.fc1.weight"].shape[0],
    )
    embedding = weights[f"{_VLM}.embed_tokens.weight"]
    return PiConfig(
        "pi05" if "time_mlp_in.weight" in weights else "pi0",
        siglip,
        _gemma(weights, _VLM),
        _gemma(weights, _EXPERT),
        embedding.shape[0],
        inputs["noise"].shape[2],
        inputs["noise"].shape[1],
        max_prompt_tokens=inputs["lang"].shape[1],
    )


def _gemma(weights: dict[str, Tensor], base: str) -> GemmaSpec:
    first = f"{base}.layers.0"
    heads = _FIXTURE["gemma_heads"]
    head_dim = weights[f"{first}.self_attn.q_proj.weight"].shape[0] // heads
    return GemmaSpec(
        weights[f"{first}.self_attn.q_proj.weight"].shape[1],
        _depth(weights, f"{base}.layers."),
        weights[f"{first}.mlp.gate_proj.weight"].shape[0],
        heads,
        weights[f"{first}.self_attn.k_proj.weight"].shape[0] // head_dim,
        head_dim,
    )


def _depth(weights: dict[str, Tensor], prefix: str) -> int:
    return 1 + max(int(name[len(prefix) :].split(".")[0]) for name in weights if name.startswith(prefix))
