"""Parity with a small recording of lerobot's PI0FastPytorch.

Dimensions are in the section ``embodrl`` of the fixture's config.json, as in policies written by embodrl.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from embodrl.models.common.checkpoint import load_strict, stored_shapes
from embodrl.models.common.config_file import CONFIG_FILE
from embodrl.models.load_report import LoadReport
from embodrl.models.pi0_fast.config import FastConfig
from embodrl.models.pi0_fast.files import aliases, is_tied
from embodrl.models.pi0_fast.modeling import FastModel
from embodrl.tools.parity.common import CPU, INPUTS_FILE, LOGITS_TOLERANCE, Comparison, compare, read_tensors

WEIGHTS_FILE = "model.safetensors"


def run(directory: Path, device: torch.device = CPU) -> list[Comparison]:
    """Compare the network with a recording.

    Logits, loss and ``gen`` are from lerobot's training, where the prompt does not see BOS, ``decoded`` from its
    decoding.

    Args:
        directory: folder with ``model.safetensors`` (lerobot's names), ``config.json`` and ``io.safetensors``: ``images
            [B,V,3,h,w]`` in [-1, 1], ``lang``, ``lang_mask``, the tokens ``sentence`` and their mask ``written``; and
            from the reference their ``logits``, the ``loss``, and the tokens written after the first one: ``gen``,
            ``decoded``.
        device: device of the network.

    Raises:
        CheckpointError: not such a recording.
    """
    return compare_outputs(load(directory).to(device), read_tensors(directory / INPUTS_FILE, device))


def load(directory: Path) -> FastModel:
    """Return the recording's network, loaded strictly, in evaluation mode."""
    weights = [directory / WEIGHTS_FILE]
    names = stored_shapes(weights)
    config = replace(FastConfig.read(directory / CONFIG_FILE), tied=is_tied(names))
    with torch.device("meta"):
        model = FastModel(config)
    report = LoadReport(str(directory))
    load_strict(model, weights, report, device="cpu", dtype=torch.float32, aliases=aliases(names))
    return model.eval()


@torch.no_grad()
def compare_outputs(model: FastModel, io: dict[str, Tensor]) -> list[Comparison]:
    """Compare a loaded network with the outputs in ``io``."""
    model.config = replace(model.config, bos_in_prompt=False)
    sentence = io["sentence"]
    written = io["written"].bool()
    x, valid = model.paligemma.embed_prefix(io["images"], io["lang"], io["lang_mask"].bool(), None)
    logits = model.logits(model.hidden_states(x, valid, sentence)[:, x.shape[1] :])
    targets = torch.where(written[:, 1:], sentence[:, 1:], -100)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
    everything = torch.arange(logits.shape[-1], device=logits.device)
    limit = io["gen"].shape[1]

    def greedy() -> Tensor:
        def most_probable(choices: Tensor, place: int) -> Tensor:
            return choices.argmax(dim=-1)

        return model.write(x, valid, sentence[0, :1], everything, -1, limit, most_probable)[0]

    tokens = greedy()
    model.config = replace(model.config, bos_in_prompt=True)
    return [
        compare("logits", logits[written], io["logits"][written], LOGITS_TOLERANCE),
        compare("loss", loss, io["loss"], LOGITS_TOLERANCE),
        compare("tokens", tokens, io["gen"], 0.0, chosen=True),
        compare("decoded", greedy(), io["decoded"], 0.0, chosen=True),
    ]
