"""The networks of pi0 and pi0.5 against the outputs of openpi's PyTorch implementation, recorded at small size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from expect import raises_code
from safetensors.torch import load_file, save_file
from torch import Tensor

from embodrl.errors import CheckpointError
from embodrl.models.flow import gemma
from embodrl.models.openpi.weights import EMBEDDING, TIED_TO_EMBEDDING, public_state
from embodrl.models.pi import modeling
from embodrl.models.pi.modeling import PiModel
from embodrl.tools.parity import pi as parity

FIXTURES = Path(__file__).parents[3] / "shared" / "parity"
pytestmark = pytest.mark.skipif(
    not (FIXTURES / "pi0").is_dir(), reason=f"no recorded reference outputs in {FIXTURES / 'pi0'}"
)
VARIANTS = ("pi0", "pi05")


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(variant: str) -> PiModel:
    return parity.load(FIXTURES / variant)


@pytest.fixture
def io(variant: str) -> dict[str, Tensor]:
    return load_file(FIXTURES / variant / "io.safetensors")


def errors(model: PiModel, io: dict[str, Tensor]) -> dict[str, float]:
    return {result.name: result.max_error for result in parity.compare_outputs(model, io)}


def differs(model: PiModel, io: dict[str, Tensor]) -> bool:
    """Whether the comparison fails, and not by a hair."""
    return any(result.max_error > 5 * result.tolerance for result in parity.compare_outputs(model, io))


def test_actions_and_loss(variant):
    results = {result.name: result for result in parity.run(FIXTURES / variant)}
    assert results["actions"].max_error < 2e-6 and results["actions"].tolerance == 1e-5
    assert results["loss"].max_error < 1e-5 and results["loss"].tolerance == 1e-5


def test_every_weight_is_accounted_for(variant, model):
    stored = set(load_file(FIXTURES / variant / "model.safetensors"))
    heads = {"paligemma_with_expert.paligemma.lm_head.weight", "paligemma_with_expert.gemma_expert.lm_head.weight"}
    assert set(model.state_dict()) == stored - heads


def test_what_is_exported_has_the_names_that_openpi_loads(variant, model):
    """openpi's load_model is strict but for tied weights: the embedding and the output layer that nothing reads."""
    stored = load_file(FIXTURES / variant / "model.safetensors")
    exported = public_state(model.state_dict(), model.config.expert.width)
    assert set(stored) - set(exported) <= {TIED_TO_EMBEDDING} and set(exported) <= {*stored, EMBEDDING}
    assert all(stored[name].shape == tensor.shape for name, tensor in exported.items() if name in stored)


def test_masked_cameras_cost_nothing_and_change_nothing(model, io):
    """The recording's third camera is masked: neither its picture nor its place matters."""
    assert not io["masks.2"].any()
    assert errors(model, {**io, "imgs.2": io["imgs.0"]})["actions"] < 1e-5
    two = {name: value for name, value in io.items() if name not in ("imgs.2", "masks.2")}
    assert errors(model, two)["actions"] < 1e-5
    first = {**io, "imgs.0": io["imgs.2"], "masks.0": io["masks.2"], "imgs.2": io["imgs.0"], "masks.2": io["masks.0"]}
    assert differs(model, first)  # the order of those that are there does matter


def test_a_camera_that_some_rows_lack(model, io):
    """Masking a row's camera in a batch is the same as that row without the camera."""
    partly = {**io, "masks.1": torch.tensor([True, False])}
    names = ("lang", "lm", "state")
    pixels = torch.stack([io["imgs.0"], io["imgs.1"]], dim=1)
    with torch.no_grad():
        mask = torch.stack([partly["masks.0"], partly["masks.1"]], dim=1)
        both = model.encode(pixels, *(io[name] for name in names), mask)
        alone = model.encode(pixels[1:, :1], *(io[name][1:] for name in names))
        x, tau = io["noise"], torch.full((2,), 0.5)
        velocity, _ = model.velocity(both, x, tau)
        wanted, _ = model.velocity(alone, x[1:], tau[1:])
    torch.testing.assert_close(velocity[1:], wanted, rtol=0, atol=1e-5)


# Negative controls: each makes one thing wrong, and the comparison must see it. ----------------------------------


@pytest.mark.parametrize(
    "wrong", ["causal prefix", "embeddings not scaled", "images scaled", "no shift of norms", "positions of padding"]
)
def test_errors_in_the_prefix(model, io, wrong, monkeypatch):
    language = model.paligemma.language_model
    if wrong == "causal prefix":
        plain = language.encode

        def causal(x, rope, mask=None, past=None):
            length = x.shape[1]
            lower = torch.ones(length, length, dtype=torch.bool).tril()
            eye = torch.eye(length, dtype=torch.bool)
            return plain(x, rope, lower & mask | eye if mask is not None else lower, past)

        monkeypatch.setattr(language, "encode", causal)
    elif wrong == "embeddings not scaled":
        monkeypatch.setattr(language, "embed", lambda ids: language.embed_tokens(ids))
    elif wrong == "images scaled":
        plain_images = model.paligemma.embed_images
        monkeypatch.setattr(
            model.paligemma, "embed_images", lambda pixels: plain_images(pixels) / language.spec.width**0.5
        )
    elif wrong == "no shift of norms":  # weight instead of 1 + weight
        for layer in language.layers:
            layer.input_layernorm.weight.data -= 1.0
    else:
        counted = torch.arange(100)[None].expand(2, -1)
        monkeypatch.setattr(modeling, "token_places", lambda valid, length, device: counted[:, :length])
    assert differs(model, io)


def test_state_token():
    """pi0's state is a token of its own, which must be there."""
    model = parity.load(FIXTURES / "pi0")
    io = load_file(FIXTURES / "pi0" / "io.safetensors")
    assert differs(model, {**io, "state": io["state"] + 0.1})
    model.__dict__["_append_state"] = lambda cache, state, position, valid: (cache, valid)
    assert differs(model, io)


@pytest.mark.parametrize("wrong", ["ignored", "no gate", "no shift", "final norm plain"])
def test_adaptive_norms(wrong, monkeypatch):
    model = parity.load(FIXTURES / "pi05")
    io = load_file(FIXTURES / "pi05" / "io.safetensors")
    plain = gemma.AdaptiveRMSNorm.forward

    def changed(self, x, condition):
        normed, gate = plain(self, x, condition)
        if wrong == "no gate":
            return normed, None
        if wrong == "no shift":
            return normed - self.dense(condition)[:, None].chunk(3, dim=-1)[1], gate
        if wrong == "final norm plain" and self is not model.expert.norm:
            return normed, gate
        return gemma.GemmaRMSNorm(x.shape[-1])(x)

    monkeypatch.setattr(gemma.AdaptiveRMSNorm, "forward", changed)
    assert differs(model, io)


# Loading --------------------------------------------------------------------------------------------------------------


def copy(source: Path, target: Path, change) -> Path:
    weights = load_file(source / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors")
    save_file(load_file(source / "io.safetensors"), target / "io.safetensors")
    return target


def test_a_lost_weight_is_refused(variant, tmp_path):
    name = "paligemma_with_expert.gemma_expert.model.layers.2.self_attn.q_proj.weight"
    directory = copy(FIXTURES / variant, tmp_path, lambda weights: weights.pop(name))
    with raises_code("weights-mismatch", CheckpointError, "layers.2.self_attn.q_proj"):
        parity.run(directory)
