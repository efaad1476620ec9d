"""Checkpoints on a healthy disk; tests/faults has the unhealthy ones."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import raises_code
from safetensors.torch import load_file, save_file

from embodrl.data.rng import capture_rng, generator_state, restore_generator, restore_rng
from embodrl.errors import CheckpointError, OutputError
from embodrl.storage.checkpoint import CheckpointManager, open_checkpoint, preflight

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def names(directory: Path) -> set[str]:
    return {path.name for path in (directory / "checkpoints").iterdir()}


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.arange(5).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "transposed": torch.arange(6.0).view(2, 3).t()}
    state = {"iteration": 3, "nested": {"list": [1, None, 0.1]}, "text": "ü"}
    manager = CheckpointManager(tmp_path, 2)
    path = manager.save(3, {"policy": tensors, "optimizer": {}}, state, {"env": b"\x00\xff" * 9})
    assert path == tmp_path / "checkpoints" / "step_3"
    checkpoint, problems = CheckpointManager(tmp_path, 2).latest_good()
    assert checkpoint is not None and problems == []
    assert (checkpoint.step, checkpoint.path, checkpoint.state.content) == (3, path, state)
    loaded = checkpoint.tensors("policy")
    assert loaded.keys() == tensors.keys() and checkpoint.tensors("optimizer") == {}
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)
    assert checkpoint.blob("env") == b"\x00\xff" * 9


def test_tensor_files_are_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 2), "a": torch.randn(4), "half": torch.randn(3).half(), "flag": torch.tensor([True])}
    path = CheckpointManager(tmp_path, 1).save(1, {"policy": tensors}, {}) / "policy.safetensors"
    save_file(tensors, tmp_path / "library.safetensors")
    ours, library = path.read_bytes(), (tmp_path / "library.safetensors").read_bytes()
    header = int.from_bytes(ours[:8], "little")
    library_header = int.from_bytes(library[:8], "little")
    assert json.loads(ours[8 : 8 + header]) == json.loads(library[8 : 8 + library_header])
    assert ours[8 + header :] == library[8 + library_header :]


def test_tensors_that_share_memory_are_stored_apart(tmp_path: Path) -> None:
    weight = torch.randn(2, 2)
    path = CheckpointManager(tmp_path, 1).save(1, {"policy": {"a": weight, "tied": weight}}, {})
    loaded = load_file(path / "policy.safetensors")
    assert torch.equal(loaded["a"], weight) and torch.equal(loaded["tied"], weight)


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, 2)
    for step in (2, 9, 10, 11):
        manager.save(step, {}, {"step": step})
    assert names(tmp_path) == {"step_10", "step_11"}


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, 2)
    manager.save(1, {}, {"value": "old"})
    manager.save(1, {}, {"value": "new"})
    checkpoint, _ = manager.latest_good()
    assert checkpoint is not None and checkpoint.state.content == {"value": "new"}
    assert names(tmp_path) == {"step_1"}


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert CheckpointManager(tmp_path, 2).latest_good() == (None, [])


def test_a_checkpoint_that_does_not_exist_is_not_called_damaged(tmp_path: Path) -> None:
    kept = CheckpointManager(tmp_path, 2).save(3, {}, {})
    with raises_code("checkpoint-not-found", CheckpointError) as refused:
        open_checkpoint(kept.with_name("step_2"))
    assert refused.value.hint == "the run has step_3"
    assert open_checkpoint(kept).path == kept


def test_asking_for_a_missing_part_names_the_file(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, 2)
    manager.save(1, {}, {})
    checkpoint, _ = manager.latest_good()
    assert checkpoint is not None
    with raises_code("checkpoint-damaged", CheckpointError, "policy.safetensors"):
        checkpoint.tensors("policy")
    with raises_code("checkpoint-damaged", CheckpointError, "env.bin"):
        checkpoint.blob("env")


def test_a_state_that_is_no_json_fails_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        CheckpointManager(tmp_path, 2).save(1, {}, {"bad": object()})
    assert not (tmp_path / "checkpoints").exists()


def test_preflight(tmp_path: Path) -> None:
    preflight(tmp_path / "new" / "run", 1000)
    assert list((tmp_path / "new" / "run").iterdir()) == []
    with raises_code("disk-space", OutputError) as caught:
        preflight(tmp_path, 2**62)
    assert "runner.output_dir" in caught.value.hint
    (tmp_path / "file").write_text("")
    with raises_code("output", OutputError):
        preflight(tmp_path / "file" / "run", 0)


def test_random_states_survive_json() -> None:
    generator = torch.Generator().manual_seed(5)
    torch.randn(3, generator=generator)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    random.gauss(0, 1)  # leaves half a pair behind, in Python's and in numpy's generator
    np.random.randn()
    saved = json.loads(json.dumps({"global": capture_rng(), "generator": generator_state(generator)}))

    def draw() -> list[float]:
        numbers = [random.random(), random.gauss(0, 1), float(np.random.randn()), float(np.random.rand())]
        return [*numbers, *torch.randn(5).tolist(), *torch.randn(5, generator=generator).tolist()]

    expected = draw()
    assert draw() != expected
    restore_rng(saved["global"])
    restore_generator(generator, saved["generator"])
    assert draw() == expected


def test_the_checkpoint_just_written_stays_though_others_have_higher_steps(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, 2)
    for step in (50, 60):
        manager.save(step, {}, {})
    manager.save(1, {}, {})
    assert names(tmp_path) == {"step_1", "step_60"}


def test_what_a_killed_preflight_left_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / ".write_probe").write_bytes(b"")
    preflight(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_the_best_checkpoint_outlives_newer_ones_and_is_linked(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last_n=1)
    root = tmp_path / "checkpoints"
    steps = lambda: sorted(path.name for path in root.iterdir())  # noqa: E731
    manager.keep_best(1)  # before it is saved, as the training loop does
    assert not root.exists()
    manager.save(1, {}, {})
    assert (root / "best").readlink() == Path("step_1")
    manager.save(2, {}, {})
    manager.save(3, {}, {})
    assert steps() == ["best", "step_1", "step_3"]
    # A later process knows it, and resumes from the newest anyway.
    again = CheckpointManager(tmp_path, keep_last_n=1)
    found, _ = again.latest_good()
    assert found is not None and found.step == 3
    again.keep_best(4)
    assert steps() == ["step_1", "step_3"]  # no checkpoint of iteration 4 yet
    again.save(4, {}, {})
    assert steps() == ["best", "step_4"] and (root / "best").readlink() == Path("step_4")
