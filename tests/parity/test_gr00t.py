"""GR00T's action head against the outputs of the public reference implementation, recorded at small size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from expect import raises_code
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from embodrl.errors import CheckpointError
from embodrl.models.flow.flow import denoising_times, integrate, reversed_velocity
from embodrl.models.gr00t.action_head import FlowActionHead
from embodrl.tools.parity import gr00t as parity

FIXTURE = Path(__file__).parents[3] / "shared" / "parity" / "gr00t_n1_5_action_head"
pytestmark = pytest.mark.skipif(not FIXTURE.is_dir(), reason=f"no recorded reference outputs in {FIXTURE}")


@pytest.fixture
def head() -> FlowActionHead:
    return parity.load_head(FIXTURE)


@pytest.fixture(scope="module")
def io() -> dict[str, Tensor]:
    return load_file(FIXTURE / "io.safetensors")


def error(head: FlowActionHead, io: dict[str, Tensor], name: str = "v") -> float:
    return float((parity.outputs(head, io)[name] - io[name]).abs().max())


def test_features_and_velocity():
    results = parity.run(FIXTURE)
    assert [result.name for result in results] == ["vl", "v"]
    assert all(result.tolerance == 1e-5 and result.ok for result in results), results


def test_every_stored_tensor_is_loaded(head):
    stored = load_file(FIXTURE / "model.safetensors")
    loaded = head.state_dict()
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(stored[name], loaded[name]) for name in stored)


def test_one_embodiment_for_all_rows_gives_the_same(head, io):
    """The policy names its robot by an int, which takes another path than ids by row."""
    for row, robot in enumerate(io["emb"].tolist()):
        one = {name: value[row : row + 1] for name, value in io.items()}
        features = head.process_features(one["bf"], None)
        state = head.encode_state(one["state"], robot)
        velocity, _ = head(one["x"], one["t"], state, head.model.key_values(features), None, robot)
        torch.testing.assert_close(velocity, one["v"], rtol=0, atol=1e-5)


def test_masked_padding_changes_nothing(head, io):
    """Where padding is masked, outputs are those of the unpadded reference."""
    padded = F.pad(io["bf"], (0, 0, 3, 0), value=7.0)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[:, :3] = False
    features = head.process_features(padded, mask[:, None, None])
    torch.testing.assert_close(features[:, 3:], io["vl"], rtol=0, atol=1e-5)
    state = head.encode_state(io["state"], io["emb"])
    known = head.model.key_values(features)
    velocity, _ = head(io["x"], io["t"], state, known, mask[:, None, None], io["emb"])
    torch.testing.assert_close(velocity, io["v"], rtol=0, atol=1e-5)
    unmasked, _ = head(io["x"], io["t"], state, known, None, io["emb"])
    assert (unmasked - io["v"]).abs().max() > 1e-3


@pytest.mark.parametrize("wrong", ["exact GELU", "sine first", "no positions", "no future tokens", "state last"])
def test_other_errors_are_noticed(head, io, monkeypatch, wrong):
    gelu = F.gelu
    if wrong == "exact GELU":
        monkeypatch.setattr(F, "gelu", lambda x, approximate="none": gelu(x))
    elif wrong == "sine first":
        weight = head.model.timestep_encoder.timestep_embedder.linear_1.weight
        weight.data = weight.data.roll(128, dims=1)
    elif wrong == "no positions":
        head.position_embedding.weight.data.zero_()
    elif wrong == "no future tokens":
        head.future_tokens.weight.data = head.future_tokens.weight.data[:0]
    else:
        forward = head.model.forward
        monkeypatch.setattr(head.model, "forward", lambda x, *rest: forward(x.roll(-1, dims=1), *rest))
    assert error(head, io) > 1e-4


@torch.no_grad()
def test_sampling_runs_from_noise_to_data(head, io):
    """Four Euler steps written down in the reference's own time, from noise at 0 to data at 1."""
    state = head.encode_state(io["state"], io["emb"])
    known = head.model.key_values(io["vl"])
    noise = torch.randn(io["x"].shape, generator=torch.Generator().manual_seed(0))
    x = noise
    for step in range(4):
        bucket = torch.full((2,), int(step / 4 * 1000))
        x = x + 0.25 * head(x, bucket, state, known, None, io["emb"])[0]

    def network(actions: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        return head(actions, head.buckets(time), state, known, None, io["emb"])

    torch.testing.assert_close(integrate(reversed_velocity(network), noise, 4), x, rtol=0, atol=5e-5)
    wrong = integrate(lambda a, tau: network(a, tau), noise, 4)
    assert (wrong - x).abs().max() > 1e-2


@pytest.mark.parametrize("num_steps", [3, 4, 5, 7, 10, 16, 50])
def test_buckets_are_those_of_the_reference(head, num_steps):
    """``int(1000 i / K)`` in Python, whatever float32 makes of ``1 - tau``."""
    tau = torch.tensor(denoising_times(num_steps)[:-1])
    expected = [int(step / num_steps * 1000) for step in range(num_steps)]
    assert head.buckets(1.0 - tau).tolist() == expected


@pytest.mark.parametrize("change", ["lost", "added", "reshaped"])
def test_other_weights_are_refused(tmp_path, change):
    weights = load_file(FIXTURE / "model.safetensors")
    if change == "lost":
        del weights["model.proj_out_1.bias"]
    elif change == "added":
        weights["model.pos_embed"] = torch.zeros(1)
    else:
        weights["vlln.weight"] = torch.zeros(3)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "io.safetensors").write_bytes((FIXTURE / "io.safetensors").read_bytes())
    wanted = {"lost": "missing: model.proj_out_1.bias", "added": "unexpected: model.pos_embed"}
    with raises_code("weights-mismatch", CheckpointError, wanted.get(change, "vlln.weight (3,) instead of (32,)")):
        parity.load_head(tmp_path)
