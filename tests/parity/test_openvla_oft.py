"""The network against the outputs of the public reference implementation, recorded at small size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from embodrl.models.openvla.modeling import OpenVLAModel
from embodrl.tools.parity import openvla as openvla_parity
from embodrl.tools.parity import openvla_oft as parity
from embodrl.tools.parity.common import Comparison

FIXTURE = Path(__file__).parents[3] / "shared" / "parity" / "openvla_oft"
pytestmark = pytest.mark.skipif(not FIXTURE.is_dir(), reason=f"no recorded reference outputs in {FIXTURE}")


def by_name(comparisons: list[Comparison]) -> dict[str, Comparison]:
    return {comparison.name: comparison for comparison in comparisons}


def test_everything_is_within_tolerance():
    comparisons = by_name(parity.run(FIXTURE))
    assert all(comparison.ok for comparison in comparisons.values()), comparisons
    assert comparisons["hidden states"].tolerance == comparisons["action logits"].tolerance == 1e-5
    assert comparisons["actions"].tolerance == 1e-6


def test_every_recorded_weight_is_loaded():
    model, _ = openvla_parity.load_fixture(FIXTURE, causal=False)
    recorded = load_file(FIXTURE / "model.safetensors")
    assert model.state_dict().keys() == recorded.keys()
    assert all(torch.equal(value, recorded[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("mask", ["none", "explicit"])
def test_causal_attention_is_noticed(monkeypatch, mask):
    """Both ways to say so: by the mask, and by what the language model does without one."""

    def causal(directory, causal, device):
        model, io = openvla_parity.load_fixture(directory, causal=mask == "none", device=device)
        if mask == "explicit":
            model.causal = True
            plain = model.hidden_states
            model.hidden_states = lambda x, _: plain(x, torch.ones(x.shape[:2], dtype=torch.long))
        return model, io

    monkeypatch.setattr(parity, "load_fixture", causal)
    comparisons = by_name(parity.run(FIXTURE))
    assert comparisons["hidden states"].max_error > 0.1 and not comparisons["action logits"].ok


def test_an_explicit_bidirectional_mask_changes_nothing(monkeypatch):
    plain = OpenVLAModel.hidden_states

    def masked(self, x, mask):
        return plain(self, x, torch.ones(x.shape[:2], dtype=torch.long))

    monkeypatch.setattr(OpenVLAModel, "hidden_states", masked)
    assert all(comparison.ok for comparison in parity.run(FIXTURE))
