"""The network against the outputs of the public reference implementation, recorded at small size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from embodrl.models.base import LoadReport
from embodrl.models.common.action_bins import ActionBins
from embodrl.models.common.checkpoint import load_strict
from embodrl.models.common.norm_stats import choose_stats
from embodrl.models.common.vit import VitSpec
from embodrl.models.openvla.config import OpenVLAConfig, read_json
from embodrl.models.openvla.decode import ActionDecoder
from embodrl.models.openvla.modeling import OpenVLAModel

FIXTURE = Path(__file__).parents[3] / "shared" / "parity" / "openvla"
pytestmark = pytest.mark.skipif(not FIXTURE.is_dir(), reason=f"no recorded reference outputs in {FIXTURE}")

DINO = VitSpec(28, 14, 32, 3, 2, 128, num_registers=4, class_token=True, layer_scale=True)
SIGLIP = VitSpec(28, 14, 32, 3, 2, 119, attention_pool=True)


@pytest.fixture(scope="module")
def config() -> OpenVLAConfig:
    return OpenVLAConfig.from_dict(read_json(FIXTURE / "config.json"), vision=(DINO, SIGLIP))


@pytest.fixture
def model(config: OpenVLAConfig) -> OpenVLAModel:
    model = OpenVLAModel(config).eval()
    report = LoadReport(str(FIXTURE))
    load_strict(model, [FIXTURE / "model.safetensors"], report, device="cpu", dtype=torch.float32)
    assert report.ok and not report.ignored and not report.aliased
    assert report.num_loaded == len(load_file(FIXTURE / "model.safetensors"))
    return model


@pytest.fixture(scope="module")
def io() -> dict[str, Tensor]:
    return load_file(FIXTURE / "io.safetensors")


@torch.no_grad()
def hidden_states(model: OpenVLAModel, io: dict[str, Tensor]) -> Tensor:
    return model.hidden_states(model.embed_prefix(io["pv"], io["ids"]), None)


@torch.no_grad()
def greedy_over_all_ids(model: OpenVLAModel, io: dict[str, Tensor], count: int) -> Tensor:
    """The reference takes the argmax over the whole vocabulary; the fixture's random weights leave the action ids."""
    sequence = model.embed_prefix(io["pv"], io["ids"])
    tokens = []
    for _ in range(count):
        hidden = model.hidden_states(sequence, None)[:, -1]
        tokens.append(model.language_model.lm_head(hidden).argmax(dim=-1))
        sequence = torch.cat([sequence, model.language_model.model.embed_tokens(tokens[-1])[:, None]], dim=1)
    return torch.stack(tokens, dim=1)


def test_hidden_states_and_logits(model, io):
    hidden = hidden_states(model, io)
    logits = model.language_model.lm_head(hidden)[..., 31743:32001]
    torch.testing.assert_close(hidden, io["h"], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits, io["logits_31743_32001"], rtol=0, atol=1e-5)


def test_action_logits_are_the_rows_of_the_action_ids(model, io):
    logits = model.action_logits(hidden_states(model, io))
    torch.testing.assert_close(logits, io["logits_31743_32001"][..., 1:257], rtol=0, atol=1e-5)


def test_greedy_tokens(model, io):
    assert torch.equal(greedy_over_all_ids(model, io, 7), io["gen"])


def test_decoded_actions(config, io):
    bins = ActionBins(config.action_vocab_size, config.n_action_bins)
    stats = choose_stats(config.norm_stats, "bridge_orig", 7, "fixture")
    actions = stats.unnormalize(bins.decode(io["gen"].numpy()))
    np.testing.assert_allclose(actions, io["a"].numpy(), rtol=0, atol=1e-6)


@torch.no_grad()
def test_decoder_follows_the_reference(model, io):
    """Feeding the reference's tokens to the key-value decoder reproduces the logits of the full forward pass."""
    prefix = model.embed_prefix(io["pv"], io["ids"])
    tokens = io["gen"]
    decoder = ActionDecoder(model, len(prefix), prefix.shape[1] + 7)
    _, logits, hidden = decoder.run(prefix, None, 7, lambda _, place: tokens[:, place])
    torch.testing.assert_close(hidden, io["h"][:, -1], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[:, 0], io["logits_31743_32001"][:, -1, 1:257], rtol=0, atol=1e-5)
    known = model.language_model.model.embed_tokens(tokens[:, :-1])
    full = model.hidden_states(torch.cat([prefix, known], dim=1), None)[:, prefix.shape[1] - 1 :]
    torch.testing.assert_close(logits, model.action_logits(full), rtol=0, atol=1e-5)


@pytest.mark.parametrize("wrong", ["towers swapped", "last block run", "no layer scale", "patches before BOS"])
def test_the_comparison_notices_errors(model, io, wrong):
    vision = model.vision_backbone
    pixels, ids = io["pv"], io["ids"]
    if wrong == "towers swapped":
        pixels = torch.cat([pixels[:, 3:], pixels[:, :3]], dim=1)
    elif wrong == "last block run":
        tower = vision.fused_featurizer  # the other one's layer scale is too small to show
        tower.blocks.append(tower.blocks[-1])
    elif wrong == "no layer scale":
        for block in vision.featurizer.blocks:
            block.ls1 = torch.nn.Identity()
    with torch.no_grad():
        embeddings = model.embed_prefix(pixels, ids)
        if wrong == "patches before BOS":
            embeddings = torch.cat([embeddings[:, 1:5], embeddings[:, :1], embeddings[:, 5:]], dim=1)
        hidden = model.hidden_states(embeddings, None)
    assert (hidden - io["h"]).abs().max() > 1e-3


def test_a_lost_weight_is_refused(config, tmp_path):
    from safetensors.torch import save_file

    from embodrl.errors import CheckpointError

    weights = load_file(FIXTURE / "model.safetensors")
    del weights["vision_backbone.fused_featurizer.attn_pool.latent"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: .*attn_pool\.latent"):
        load_strict(
            OpenVLAModel(replace(config)),
            [tmp_path / "model.safetensors"],
            LoadReport("x"),
            device="cpu",
            dtype=torch.float32,
        )
