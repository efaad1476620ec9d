"""Training states in shards, written and read by one process."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from expect import raises_code
from safetensors import safe_open
from tiny_training import largest_difference, train, training_config

from embodrl.errors import CheckpointError
from embodrl.hybrid_engines.training import sharded_checkpoint
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.hybrid_engines.training.sharded_checkpoint import read_index, read_whole
from embodrl.workers.policy import build_policy

CONFIG = training_config(algorithm={"update_epoch": 1})


def engine_of(reference: bool = True) -> NativeTrainEngine:
    return NativeTrainEngine(build_policy(CONFIG), EngineOptions(CONFIG.actor, 4, reference), "cpu")


@pytest.fixture(scope="module")
def trained() -> NativeTrainEngine:
    """After updates of which the first was the critic's alone."""
    engine = engine_of()
    train(engine, "openvla", engine.policy, CONFIG)
    return engine


@pytest.mark.parametrize("bucket_bytes", [1 << 30, 20_000])
def test_what_was_written_comes_back(
    trained: NativeTrainEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket_bytes: int
) -> None:
    monkeypatch.setattr(sharded_checkpoint, "BUCKET_BYTES", bucket_bytes)
    facts = trained.save_shards(tmp_path)
    files = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert facts == {
        name: {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
    }
    assert all(name.endswith(".safetensors") for name in files)  # and no index of DCP, which is a pickle
    assert (len(files) == 3) is (bucket_bytes > 1 << 20)
    other, expected = engine_of(), trained.state_dict()
    other.load_shards(tmp_path, trained.counters())
    found = other.state_dict()
    assert found.state == expected.state and found.tensors.keys() == {"policy", "optimizer", "reference"}
    for section, tensors in expected.tensors.items():
        assert largest_difference(found.tensors[section], tensors) == 0
    weights = {name: torch.zeros_like(tensor) for name, tensor in expected.tensors["policy"].items()}
    read_whole(tmp_path, "policy", weights)
    assert largest_difference(weights, expected.tensors["policy"]) == 0


def test_before_the_first_update_there_is_no_optimizer_state(tmp_path: Path) -> None:
    engine = engine_of(reference=False)
    engine.save_shards(tmp_path)
    assert read_index(tmp_path).keys() == {"policy"}
    other = engine_of(reference=False)
    train(other, "openvla", other.policy, CONFIG)
    other.load_shards(tmp_path, engine.counters())
    assert other.state_dict().tensors["optimizer"] == {} and other.version == 0
    assert largest_difference(other.state_dict().tensors["policy"], engine.state_dict().tensors["policy"]) == 0


def test_tensors_that_share_memory_are_written_apart(trained: NativeTrainEngine, tmp_path: Path) -> None:
    engine = engine_of(reference=False)
    norms = [p for name, p in engine.policy.named_parameters() if name.endswith("layernorm.weight")]
    norms[1].data = norms[0].data
    engine.save_shards(tmp_path)
    weights = {name: torch.zeros_like(tensor) for name, tensor in engine.policy.state_dict().items()}
    read_whole(tmp_path, "policy", weights)
    assert largest_difference(weights, engine.policy.state_dict()) == 0


def test_the_index_has_shapes_and_types_without_contents(trained: NativeTrainEngine, tmp_path: Path) -> None:
    trained.save_shards(tmp_path)
    for section, tensors in read_index(tmp_path).items():
        expected = trained.state_dict().tensors[section]
        assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {
            name: (t.shape, t.dtype) for name, t in expected.items()
        }
        assert all(tensor.is_meta for tensor in tensors.values())


def test_what_does_not_fit_or_is_missing_is_refused(trained: NativeTrainEngine, tmp_path: Path) -> None:
    trained.save_shards(tmp_path)
    with raises_code("checkpoint-mismatch", CheckpointError):
        engine_of().load_shards(_without_reference(tmp_path), trained.counters())
    path = next((tmp_path / "policy").iterdir())
    with safe_open(path, framework="pt") as file:
        assert "value_head.out.weight" in file.keys()  # noqa: SIM118 - it is not a mapping
    with raises_code("checkpoint-damaged", CheckpointError):
        read_whole(tmp_path, "policy", {"nothing": torch.zeros(1)})


def _without_reference(directory: Path) -> Path:
    for path in (directory / "reference").iterdir():
        path.unlink()
    (directory / "reference").rmdir()
    return directory
