"""Checkpoints with random weights: of the published names and shapes, loaded strictly, and able to act."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from safetensors import safe_open
from test_public_layouts import (
    gr00t_n1_7_shapes,
    gr00t_shapes,
    openvla_shapes,
    pi0_fast_shapes,
    pi_shapes,
    smolvla_shapes,
    write_json,
)
from tiny_families import FAMILIES
from tokenizers import Tokenizer, models

from embodrl.config.schema import model_settings
from embodrl.models.common.checkpoint import stored_shapes, weight_files
from embodrl.models.openpi.weights import EXPERT_HEAD
from embodrl.models.registry import build_policy
from embodrl.specs import MODELS
from embodrl.tools.model_tools import random_model
from embodrl.tools.model_tools.cli import families
from embodrl.tools.model_tools.random_model import random_policy, write_random_model
from embodrl.types import Observation, SamplingParams

OFFERED = families()
PARAMETERS = {"openvla": 7_541_237_184, "openvla_oft": 7_541_237_184}
PARAMETERS |= {"gr00t_n1_7": 3_144_016_000}
PARAMETERS |= {"pi0": 3_238_048_528, "pi05": 3_353_433_872, "gr00t": 2_724_163_520, "smolvla": 402_737_376}
PARAMETERS |= {"pi0_fast": 2_923_335_408}


@pytest.fixture(scope="module", autouse=True)
def no_checksums() -> None:
    """Checksums are written here, other than in the tests beside."""


def load(family: str, directory: Path) -> Any:
    values = {"model_type": family, "model_path": str(directory), "add_value_head": False}
    config = model_settings(family).model_validate(values)
    policy, report = build_policy(config, device="cpu", dtype=torch.float32, seed=0)
    assert report.ok and report.has_checksums and not report.initialized
    return policy.eval()


def test_every_family_with_a_network_is_offered() -> None:
    assert sorted(OFFERED) == sorted(FAMILIES)


@pytest.mark.parametrize("family", OFFERED)
def test_tiny_loads_and_acts(family: str, tmp_path: Path) -> None:
    made = write_random_model(family, tmp_path / "made", "tiny", seed=1)
    policy = load(family, tmp_path / "made")
    assert made.num_parameters == sum(parameter.numel() for parameter in policy.parameters())
    rng = np.random.default_rng(0)
    state_dim = 6 if MODELS.entry(family).uses_state is True else 0
    images = rng.integers(0, 256, (1, 1, 64, 64, 3), dtype=np.uint8)
    seen = Observation(images, np.zeros((1, state_dim), np.float32), ["push the cube"], np.zeros(1, np.int32))
    with torch.no_grad():
        actions = policy.predict_action_batch(seen, "eval", SamplingParams(), compute_values=False).actions
    assert actions.shape == (1, policy.num_action_chunks, 7) and np.isfinite(actions).all()
    matrices = torch.cat([p.flatten() for p in policy.model.parameters() if p.dim() == 2])
    assert matrices.std().item() == pytest.approx(0.02, rel=0.02) and abs(matrices.mean().item()) < 2e-4
    if family in ("pi0", "pi05", "pi0_fast"):  # Gemma's norms scale by 1 + weight
        norms = [p for n, p in policy.model.named_parameters() if "language_model" in n and "layernorm" in n]
        assert norms and not any(norm.any() for norm in norms)
    ones = {bool((p == 1).all()) for n, p in policy.model.named_parameters() if p.dim() == 1 and "norm" in n}
    biases = [p for n, p in policy.model.named_parameters() if p.dim() == 1 and n.endswith("bias")]
    assert True in ones and not any(bias.any() for bias in biases)


@pytest.mark.parametrize("family", OFFERED)
def test_public_names_and_shapes(family: str, tmp_path: Path) -> None:
    policy = random_policy(family, "public", torch.bfloat16, None)
    state = policy.public_state()
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    write_json(tmp_path / "config.json", {"type": "smolvla", "chunk_size": 50})
    wanted = {
        "gr00t": gr00t_shapes,
        "gr00t_n1_7": gr00t_n1_7_shapes,
        "smolvla": lambda: smolvla_shapes(tmp_path / "config.json"),
        **{name: functools.partial(pi_shapes, name) for name in ("pi0", "pi05")},
        "pi0_fast": pi0_fast_shapes,
    }.get(family, openvla_shapes)()
    extra = {EXPERT_HEAD: (257152, 1024)} if family in ("pi0", "pi05") else {}
    assert found == {**wanted, **extra}
    assert sum(math.prod(shape) for shape in wanted.values()) == pytest.approx(PARAMETERS[family], rel=1e-5)
    if not extra and family != "pi0_fast":
        assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}


def test_content_is_a_function_of_the_seed_and_not_of_the_shards(tmp_path: Path) -> None:
    def read(name: str, **given: Any) -> dict[str, torch.Tensor]:
        write_random_model("gr00t", tmp_path / name, "tiny", "float32", **given)
        tensors: dict[str, torch.Tensor] = {}
        for path in weight_files(tmp_path / name):
            with safe_open(path, framework="pt") as reader:
                tensors |= {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118
        return tensors

    whole, shards, other = read("whole"), read("shards", shard_gb=1e-3), read("other", seed=1)
    assert len(weight_files(tmp_path / "shards")) > 1 and stored_shapes(weight_files(tmp_path / "shards"))
    assert all(torch.equal(whole[name], shards[name]) for name in whole)
    matrices = [name for name in whole if whole[name].dim() == 2]
    assert not any(torch.equal(whole[name], other[name]) for name in matrices)
    assert len({whole[name].flatten()[0].item() for name in matrices}) > 0.9 * len(matrices)
    load("gr00t", tmp_path / "shards")


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "made"
    with raises_code("one-file-layout"):
        write_random_model("pi0", target, "tiny", shard_gb=1.0)
    Tokenizer(models.WordLevel({f"t{i}": i for i in range(32000)}, unk_token="t0")).save(
        str(tmp_path / "tokenizer.json")
    )
    with raises_code("tokenizer-mismatch"):  # more ids than the tiny model has rows
        write_random_model("openvla", target, "tiny", tokenizer=tmp_path)
    policy = random_policy("openvla", "public", torch.bfloat16, tmp_path)
    assert policy.model.config.prompt_end_id == 29871 and policy.processor.tokenizer.vocab_size == 32000
    monkeypatch.setattr(random_model.shutil, "disk_usage", lambda place: SimpleNamespace(free=12_345))
    with raises_code("disk-space") as refused:
        write_random_model("openvla", target, "tiny")
    needed = 2 * sum(p.numel() for p in random_policy("openvla", "tiny", torch.bfloat16, None).parameters()) + 2**26
    assert f"{needed:,} bytes" in str(refused.value) and "12,345 free" in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"], "nothing was written"
    target.mkdir()
    with raises_code("output-exists"):
        write_random_model("smolvla", target, "tiny")
