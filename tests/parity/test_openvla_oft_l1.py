"""FiLM, the state's token and the L1 head against outputs of moojink/openvla-oft's own modules.

``recordings/openvla_oft`` was made with the unmodified modeling_prismatic.py, film_vit_wrapper.py, action_heads.py,
projectors.py and ``normalize_proprio`` of commit 213c5ff on timm 0.9.10, transformers 4.40.1 and peft 0.11.1, with
random weights, small towers, two images and a vocabulary of 384. Two things stood in for the original: attention of
Llama was made bidirectional as the project's fork of transformers does it, and the check that a prompt ends with
Llama's id 29871 was passed over, as the vocabulary has none.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from embodrl.models.load_report import LoadReport
from embodrl.models.openvla_oft import components
from embodrl.tools.parity import openvla_oft as parity

RECORDING = Path(__file__).parent / "recordings" / "openvla_oft"


def errors() -> dict[str, float]:
    return {result.name: result.max_error for result in parity.run(RECORDING)}


def test_everything_is_within_tolerance() -> None:
    results = parity.run(RECORDING)
    assert [result.name for result in results] == ["hidden states at the actions", "normalised actions", "actions"]
    assert all(result.ok for result in results), results


def test_the_state_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the state in the robot's units."""

    class AsItIs:
        @staticmethod
        def normalize(state: object) -> object:
            return state

    monkeypatch.setattr(parity, "choose_proprio_stats", lambda *args: AsItIs)
    assert errors()["normalised actions"] > 1e-3


def test_adapters_are_added_to_every_layer_and_to_the_convolution() -> None:
    """By hand, from the reference's file."""
    path = RECORDING / "vision_backbone--3_checkpoint.pt"
    report = LoadReport("here")
    found = components.film_tensors(path, report, torch.device("cpu"))
    stored = torch.load(path, weights_only=True)
    assert report.conventions == {
        "adapters of the vision backbone": "alpha 16 for rank 20, as finetune.py sets it",
    }
    name = "vision_backbone.featurizer.patch_embed.proj"
    kernel = stored[f"{name}.base_layer.weight"].clone()
    down, up = (stored[f"{name}.lora_{factor}.default.weight"] for factor in "AB")
    kernel += 0.8 * torch.einsum("orij,rchw->ochw", up, down)
    torch.testing.assert_close(found[f"{name}.weight"], kernel)
    plain = {key for key in load_file(RECORDING / "model.safetensors") if key.startswith("vision_backbone.")}
    assert {key for key in found if ".scale." not in key and ".shift." not in key} == plain
