"""pi0-FAST against the outputs of lerobot 0.6.1's PI0FastPytorch, recorded at small size.

``recordings/pi0_fast`` was made with the unmodified modeling_pi0_fast.py and pi_gemma.py of the release (but for an
argument that create_causal_mask no longer takes) on transformers 5.19, with random weights, output layer and embedding
apart as lerobot trains them, a PaliGemma of width 32, two cameras, and prompts and sentences of different lengths. What
is written (``gen``) is the most probable token after each pass of its training mode; its decoding lets the prompt see
BOS, which its training does not: ``decoded`` is what its sample_actions_fast_kv_cache writes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from embodrl.models.pi0_fast import modeling
from embodrl.models.pi0_fast.files import public_state
from embodrl.models.pi0_fast.modeling import FastModel
from embodrl.tools.parity import pi0_fast as parity

RECORDING = Path(__file__).parent / "recordings" / "pi0_fast"


@pytest.fixture
def model() -> FastModel:
    return parity.load(RECORDING)


@pytest.fixture(scope="module")
def io() -> dict[str, Tensor]:
    return load_file(RECORDING / "io.safetensors")


def errors(model: FastModel, io: dict[str, Tensor]) -> dict[str, float]:
    return {result.name: result.max_error for result in parity.compare_outputs(model, io)}


def test_logits_loss_and_tokens() -> None:
    results = parity.run(RECORDING)
    assert [result.name for result in results] == ["logits", "loss", "tokens", "decoded"]
    assert all(result.ok for result in results), results


def test_what_is_decoded_shows_whether_the_prompt_sees_bos(io: dict[str, Tensor]) -> None:
    """Else the two recordings would be one."""
    assert not torch.equal(io["gen"], io["decoded"])


def test_every_stored_tensor_is_loaded(model: FastModel) -> None:
    stored, loaded = load_file(RECORDING / "model.safetensors"), public_state(model.state_dict())
    level = "model.paligemma_with_expert.paligemma.model.vision_tower.vision_model."
    here = {name.replace(level, level.removesuffix("vision_model.")): tensor for name, tensor in loaded.items()}
    assert stored.keys() == here.keys()
    assert all(torch.equal(tensor, here[name]) for name, tensor in stored.items())


@pytest.mark.parametrize("wrong", ["bidirectional", "causal", "positions", "tied"])
def test_what_would_be_wrong_shows(
    wrong: str, model: FastModel, io: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls."""
    plain = model._visible
    if wrong == "bidirectional":
        monkeypatch.setattr(model, "_visible", lambda valid, p, ids: _seen(valid, p, ids.shape[1]))
    elif wrong == "causal":
        monkeypatch.setattr(model, "_visible", lambda valid, p, ids: plain(valid, p, ids) & _lower(p + ids.shape[1]))
    elif wrong == "positions":
        monkeypatch.setattr(modeling, "_positions", lambda valid, p, s, device: torch.arange(p + s)[None])
    else:
        head = model.paligemma_with_expert.paligemma.lm_head
        head.weight.data.copy_(model.language.embed_tokens.weight)
    assert errors(model, io)["logits"] > 1e-3


def _seen(valid: Tensor | None, prefix: int, written: int) -> Tensor:
    assert valid is not None
    return F.pad(valid, (0, written), value=True)[:, None, None].expand(-1, 1, prefix + written, -1)


def _lower(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()
