"""GR00T N1.7 against the outputs of lerobot's, recorded at small size.

``recordings/gr00t_n1_7`` was made with the unmodified groot_n1_7.py and cross_attention_dit.py of lerobot 0.6.2 (commit
7427f31801f9) on transformers 5.19 and diffusers 0.42.1, the rest of its package stubbed: random weights, a Qwen3-VL of
width 32 in place of Cosmos-Reason2-2B, two cameras, patches in the order of transformers' image processor. Rows were
run one by one, since the reference lets padding influence a row.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from embodrl.models.gr00t.action_head import FlowActionHead
from embodrl.models.gr00t.dit import ContextMask
from embodrl.models.gr00t.modeling import Gr00tN17Model
from embodrl.tools.parity import gr00t_n1_7 as parity

RECORDING = Path(__file__).parent / "recordings" / "gr00t_n1_7"
IMAGE_TOKEN = 111


@pytest.fixture
def model() -> Gr00tN17Model:
    return parity.load(RECORDING)


@pytest.fixture(scope="module")
def io() -> dict[str, Tensor]:
    return load_file(RECORDING / "io.safetensors")


def errors(model: Gr00tN17Model, io: dict[str, Tensor]) -> dict[str, float]:
    return {result.name: result.max_error for result in parity.compare_outputs(model, io, IMAGE_TOKEN)}


def test_features_velocity_and_actions() -> None:
    results = parity.run(RECORDING)
    assert [result.name for result in results] == ["features", "vl", "v", "actions"]
    assert all(result.tolerance == 1e-5 and result.ok for result in results), results


def test_every_stored_tensor_is_loaded(model: Gr00tN17Model) -> None:
    stored, loaded = load_file(RECORDING / "model.safetensors"), model.state_dict()
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(stored[name], value) for name, value in loaded.items())


@pytest.mark.parametrize("wrong", ["all", "images first"])
def test_what_blocks_attend_to_shows(
    model: Gr00tN17Model, io: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    right = FlowActionHead.seen

    def seen(self: FlowActionHead, mask: Tensor | None, at_images: Tensor) -> ContextMask:
        assert mask is not None
        return mask[:, None, None] if wrong == "all" else right(self, mask, ~at_images & mask)

    monkeypatch.setattr(FlowActionHead, "seen", seen)
    changed = errors(model, io)
    assert changed["vl"] < 1e-5 and changed["v"] > 1e-3 and changed["actions"] > 1e-3


def test_padding_changes_nothing(model: Gr00tN17Model, io: dict[str, Tensor]) -> None:
    other = torch.where(io["attention_mask"].bool(), io["input_ids"], 7)
    assert max(errors(model, {**io, "input_ids": other}).values()) < 1e-5
