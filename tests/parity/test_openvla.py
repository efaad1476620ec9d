"""The network against the outputs of the public reference implementation, recorded at small size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from expect import raises_code
from safetensors.torch import load_file, save_file

from embodrl.errors import CheckpointError
from embodrl.models.openvla import modeling
from embodrl.models.openvla.modeling import OpenVLAModel
from embodrl.tools.parity import openvla as parity
from embodrl.tools.parity.common import Comparison

FIXTURE = Path(__file__).parents[3] / "shared" / "parity" / "openvla"
pytestmark = pytest.mark.skipif(not FIXTURE.is_dir(), reason=f"no recorded reference outputs in {FIXTURE}")


def by_name(comparisons: list[Comparison]) -> dict[str, Comparison]:
    return {comparison.name: comparison for comparison in comparisons}


def test_everything_is_within_tolerance():
    comparisons = by_name(parity.run(FIXTURE))
    assert all(comparison.ok for comparison in comparisons.values()), comparisons
    assert {"hidden states", "logits", "action logits", "decoder, logits"} < set(comparisons)
    assert comparisons["hidden states"].tolerance == comparisons["logits"].tolerance == 1e-5
    assert comparisons["greedy tokens"].tolerance == 0 and comparisons["actions"].tolerance == 1e-6


def test_every_recorded_weight_is_loaded():
    model, _ = parity.load_fixture(FIXTURE)
    recorded = load_file(FIXTURE / "model.safetensors")
    assert model.state_dict().keys() == recorded.keys()
    assert all(torch.equal(value, recorded[name]) for name, value in model.state_dict().items())


@torch.no_grad()
def test_decoder_follows_the_full_pass():
    """Feeding the reference's tokens to the key-value decoder reproduces the logits of the full forward pass."""
    model, io = parity.load_fixture(FIXTURE)
    prefix, tokens = model.embed_prefix(io["pv"], io["ids"]), io["gen"]
    decoder = parity.ActionDecoder(model, len(prefix), prefix.shape[1] + 7)
    _, logits, _ = decoder.run(prefix, None, 7, lambda _, place: tokens[:, place])
    known = model.language_model.model.embed_tokens(tokens[:, :-1])
    full = model.hidden_states(torch.cat([prefix, known], dim=1), None)[:, prefix.shape[1] - 1 :]
    torch.testing.assert_close(logits, model.action_logits(full), rtol=0, atol=1e-5)


@pytest.mark.parametrize("wrong", ["towers swapped", "last block run", "no layer scale", "patches before BOS"])
def test_an_error_in_the_network_is_noticed(monkeypatch, wrong):
    forward = modeling.VisionBackbone.forward
    embed = OpenVLAModel.embed_prefix

    def broken(self, pixels, instruction=None):
        if wrong == "towers swapped":
            pixels = torch.cat([pixels[:, 3:], pixels[:, :3]], dim=1)
        elif wrong == "last block run":
            tower = self.fused_featurizer  # the other one's layer scale is too small to show
            tower.blocks.append(tower.blocks[-1])
        elif wrong == "no layer scale":
            for block in self.featurizer.blocks:
                block.ls1 = torch.nn.Identity()
        return forward(self, pixels, instruction)

    def misplaced(self, pixels, input_ids, state=None):
        out = embed(self, pixels, input_ids, state)
        return torch.cat([out[:, 1:5], out[:, :1], out[:, 5:]], dim=1) if wrong == "patches before BOS" else out

    monkeypatch.setattr(modeling.VisionBackbone, "forward", broken)
    monkeypatch.setattr(OpenVLAModel, "embed_prefix", misplaced)
    comparisons = by_name(parity.run(FIXTURE))
    assert comparisons["hidden states"].max_error > 1e-3 and not comparisons["logits"].ok


def test_a_lost_weight_is_refused(tmp_path):
    weights = load_file(FIXTURE / "model.safetensors")
    del weights["vision_backbone.fused_featurizer.attn_pool.q.bias"]
    save_file(weights, tmp_path / "model.safetensors")
    for name in ("config.json", "io.safetensors"):
        (tmp_path / name).write_bytes((FIXTURE / name).read_bytes())
    with raises_code("weights-mismatch", CheckpointError, "attn_pool.q.bias"):
        parity.run(tmp_path)
