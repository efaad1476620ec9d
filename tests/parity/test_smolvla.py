"""SmolVLA against the outputs of lerobot 0.4.4's VLAFlowMatching, recorded at small size.

``recordings/smolvla`` was made with the unmodified modeling_smolvla.py and smolvlm_with_expert.py of the package on
transformers 5.19, with random weights, a SmolVLM configuration of width 32 in place of the hub's, and two cameras.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from embodrl.models.smolvla.files import public_state
from embodrl.models.smolvla.modeling import SmolVlaModel
from embodrl.tools.parity import smolvla as parity

RECORDING = Path(__file__).parent / "recordings" / "smolvla"


@pytest.fixture
def model() -> SmolVlaModel:
    return parity.load(RECORDING)


@pytest.fixture(scope="module")
def io() -> dict[str, Tensor]:
    return load_file(RECORDING / "io.safetensors")


def errors(model: SmolVlaModel, io: dict[str, Tensor]) -> dict[str, float]:
    return {result.name: result.max_error for result in parity.compare_outputs(model, io)}


def test_actions_and_losses() -> None:
    results = parity.run(RECORDING)
    assert [result.name for result in results] == ["actions", "loss"]
    assert all(result.ok for result in results), results


def test_every_stored_tensor_is_loaded_but_the_output_layer(model: SmolVlaModel) -> None:
    stored = load_file(RECORDING / "model.safetensors")
    loaded = public_state(model.state_dict())
    assert stored.keys() - loaded.keys() == {"model.vlm_with_expert.vlm.lm_head.weight"}
    assert all(torch.equal(stored[name], value) for name, value in loaded.items())


def test_self_attention_in_the_cross_layers_shows(model: SmolVlaModel, io: dict[str, Tensor]) -> None:
    """Negative control: actions that do not count their positions from 0 in cross-attention."""
    encode = model.encode

    def shifted(*inputs: Tensor):
        context = encode(*inputs)
        return replace(context, cross_rope=context.rope)

    model.encode = shifted  # type: ignore[method-assign]
    assert errors(model, io)["actions"] > 1e-3


def test_padding_of_prompts_changes_nothing(model: SmolVlaModel, io: dict[str, Tensor]) -> None:
    noise = io["lang"].clone()
    noise[~io["lang_mask"].bool()] = 7
    changed = errors(model, {**io, "lang": noise})
    assert changed["actions"] < 5e-5 and changed["loss"] < 1e-5
