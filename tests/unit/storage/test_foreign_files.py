"""Files that somebody else has made: pipes, tensors that lie about themselves, and bytes that claim to be gigabytes."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path

import pytest
import torch
from expect import raises_code

from embodrl.data.rng import capture_rng, generator_state, restore_generator, restore_rng
from embodrl.errors import CheckpointError
from embodrl.fields import read_regular_file, unpack
from embodrl.storage.checkpoint import Checkpoint, CheckpointManager, newest_checkpoint, open_checkpoint
from embodrl.storage.files import write_safetensors
from embodrl.storage.json_file import write_json_file, write_json_result
from embodrl.storage.tensor_files import load_arrays, load_tensors, open_tensors

HEADERS: dict[str, bytes] = {
    "no JSON": b"{",
    "another type": b'{"a": {"dtype": "Q7", "shape": [1], "data_offsets": [0, 4]}}',
    "another size": b'{"a": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4]}}',
    "beyond the end": b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [400, 404]}}',
    "no place": b'{"a": {"dtype": "F32", "shape": [1]}}',
    "a list": b"[]",
}


def lying(path: Path, header: bytes) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return path


def checkpoint_with(run: Path, content: bytes) -> Checkpoint:
    """Return a checkpoint whose group ``policy`` is wrong; of its checksums, only what ``open_checkpoint`` has seen."""
    saved = open_checkpoint(CheckpointManager(run, 1).save(1, {"policy": {}}, {"iteration": 1}))
    (saved.path / "policy.safetensors").write_bytes(content)
    return saved


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_tensors_that_lie_are_one_kind_of_error(tmp_path: Path, header: bytes) -> None:
    path = lying(tmp_path / "a.safetensors", header)
    for load in (load_tensors, load_arrays):
        with pytest.raises(OSError, match="not an intact safetensors file"):
            load(path)
    with pytest.raises(OSError, match="not an intact safetensors file"), open_tensors(path) as reader:
        reader.get_tensor("a")
    with raises_code("checkpoint-damaged", CheckpointError):
        checkpoint_with(tmp_path / "run", path.read_bytes()).tensors("policy")


def test_tensors_are_read_through_the_door(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"a": torch.arange(3.0)})
    assert load_tensors(path)["a"].tolist() == load_arrays(path)["a"].tolist() == [0, 1, 2]
    with open_tensors(path) as reader:
        assert reader.get_tensor("a").tolist() == [0, 1, 2]


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for load in (load_tensors, load_arrays, lambda path: read_regular_file(path, 9)):
        with pytest.raises(OSError, match="regular file"):
            load(pipe)
    with pytest.raises(OSError, match="regular file"), open_tensors(pipe):
        pass


def test_what_is_unpacked_has_a_limit() -> None:
    packed = zlib.compress(bytes(2**20))
    assert unpack(packed, 2**20) == bytes(2**20)
    for wrong, limit in ((packed, 2**20 - 1), (packed[:-1], 2**20), (b"junk", 9)):
        with pytest.raises(ValueError, match=r"damaged|limit|cut off|Error"):
            unpack(wrong, limit)


def test_files_of_a_run_replace_pipes_and_results_are_written_into_them(tmp_path: Path) -> None:
    pipe = tmp_path / "config.yaml"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_json_result(pipe, {"a": 1})
        assert json.loads(os.read(reading, 99)) == {"a": 1} and pipe.is_fifo()
    finally:
        os.close(reading)
    write_json_file(pipe, {"a": 2})
    assert pipe.is_file() and json.loads(pipe.read_text()) == {"a": 2}


def test_thousands_of_empty_checkpoints_are_told_in_a_few_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(300):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
    manager = CheckpointManager(tmp_path, 1)
    checkpoint, problems = manager.latest_good()
    assert checkpoint is None and len(problems) == len(caplog.records) == 6 and "295 more" in problems[-1]
    with raises_code("checkpoint-missing", CheckpointError) as caught:
        newest_checkpoint(tmp_path)
    assert len(caught.value.message) < 2000
    good = manager.save(400, {}, {"iteration": 400})
    assert newest_checkpoint(tmp_path).path == good


@pytest.mark.parametrize("change", ["python", "numpy", "torch", "cuda", "words"])
def test_junk_for_random_states_is_refused(change: str) -> None:
    state = capture_rng()
    junk = {"python": 3, "numpy": ["MT", 1], "torch": "?", "words": [3, ["x"], None]}
    with raises_code("checkpoint-damaged", CheckpointError):
        restore_rng({**state, "python" if change == "words" else change: junk.get(change, 7)})
    restore_rng(state)


def test_junk_for_one_generator_is_refused() -> None:
    generator = torch.Generator()
    kept = generator_state(generator)
    for junk in ("", "AAAA", "no base64!"):
        with raises_code("checkpoint-damaged", CheckpointError):
            restore_generator(generator, junk)
    restore_generator(generator, kept)
