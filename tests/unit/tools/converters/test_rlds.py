"""RLDS datasets, read without TensorFlow: records and their checksums, features, cameras, splits, damage."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tfrecord_files as files
from expect import raises_code

from embodrl.data.load import load_demos
from embodrl.data.raw import RawWriter
from embodrl.errors import EmbodrlError, FileDamagedError
from embodrl.tools.converters.rlds import Rlds, RldsChoice
from embodrl.tools.converters.tfrecord import Example, crc32c, masked_crc, records

BRIDGE = Path(__file__).resolve().parents[5] / "shared/bridge_sample"
EVERYTHING = RldsChoice()
TRAIN = "toy-train.tfrecord-00000-of-00001"


def converted(source: Path, output: Path, choice: RldsChoice = EVERYTHING) -> tuple[tuple[int, int], list[str]]:
    lines: list[str] = []
    data = Rlds(source, choice, lines.append)
    return data.convert(lambda: RawWriter(output)), lines


def test_checksums_are_castagnoli_s():
    assert crc32c(b"123456789") == 0xE3069283  # of RFC 3720
    data = np.random.default_rng(0).bytes(70_001)
    for length in (0, 1, 3, 4, 5, 255, 256, 257, 511, 512, 1025, 70_001):
        assert masked_crc(data[:length]) == files.crc(data[:length]), length


def test_an_example_is_read_as_it_was_written(tmp_path: Path):
    numbers = np.array([0, 1, -1, 300, 2**62, -(2**63)])
    content = {"f": np.array([0.5, -2.0], np.float32), "i": numbers, "b": [b"", b"\xff\x00"], "none": []}
    (tmp_path / "x").write_bytes(files.record(files.example(content)) * 2)
    (offset, data), (second, _) = records(tmp_path / "x")
    assert (offset, second) == (0, len(data) + 16)
    found = Example(data, tmp_path / "x", 0)
    np.testing.assert_array_equal(found["f"], content["f"])
    np.testing.assert_array_equal(found["i"], numbers)
    assert found["b"] == content["b"] and found["none"] == [] and "steps" not in found
    single = files.piece(1, files.piece(1, files.piece(1, b"i") + files.piece(2, files.piece(3, b"\x08\x07\x08\x02"))))
    np.testing.assert_array_equal(Example(single, tmp_path, 0)["i"], [7, 2])  # not packed


def test_episodes_come_with_pictures_state_words_and_rewards(tmp_path: Path):
    first = files.episode(0, 4)
    source = files.write(tmp_path / "1.0.0", {TRAIN: [first, files.episode(1, 3, ["push it"])]})
    counts, lines = converted(source, tmp_path / "out")
    assert counts == (2, 7)
    assert any("dark is blank" in line for line in lines) and any("depth" in line for line in lines)
    demos = load_demos(tmp_path / "out")
    assert demos.images.shape == (7, 1, 6, 8, 3) and demos.instruction_table == ["lift the cup", "push it"]
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(demos.actions[:4], first["steps/action"])
    np.testing.assert_array_equal(demos.state[:4], first["steps/observation/state"])
    _ = rng.normal(size=(4, 3)), rng.normal(size=(4, 2)), rng.integers(-5, 5, (4,))
    np.testing.assert_array_equal(demos.images[0, 0], rng.integers(0, 256, (6, 8, 3), np.uint8))
    assert demos.outcomes is not None and demos.success == [True, True]
    assert demos.outcomes.terminated.tolist() == demos.outcomes.rewards.astype(bool).tolist()
    assert np.flatnonzero(demos.outcomes.terminated).tolist() == [3, 6]


def test_names_are_honoured(tmp_path: Path):
    source = files.write(tmp_path / "1.0.0", {TRAIN: [files.episode(0, 4)]})
    state = ("extra", "observation/state")
    converted(source, tmp_path / "out", RldsChoice(("dark", "top"), ("action", "extra"), state, instruction="go"))
    demos = load_demos(tmp_path / "out")
    assert demos.images.shape[1] == 2 and not demos.images[:, 0].any() and demos.instruction_table == ["go"]
    assert demos.actions.shape == (4, 4) and (demos.state[:, 0] == demos.actions[:, 3]).all()
    for wrong in (RldsChoice(("depth",)), RldsChoice(action=("top",)), RldsChoice(state=("language_instruction",))):
        with raises_code("rlds-feature"):
            converted(source, tmp_path / "none", wrong)


def test_an_episode_is_split_where_its_instruction_changes(tmp_path: Path):
    source = files.write(tmp_path / "1.0.0", {TRAIN: [files.episode(0, 5, ["a", "a", "b"])]})
    assert converted(source, tmp_path / "out")[0] == (2, 5)
    demos = load_demos(tmp_path / "out")
    assert demos.said(slice(None)) == ["a", "a", "b", "b", "b"] and demos.success == [None, True]


def test_a_split_is_chosen_and_its_missing_files_are_named(tmp_path: Path):
    shards = {"toy-train.tfrecord-00000-of-00002": [files.episode(0, 2)], "toy-val.tfrecord": [files.episode(1, 3)]}
    source = files.write(tmp_path / "1.0.0", shards)
    counts, lines = converted(source, tmp_path / "train")
    assert counts == (1, 2) and any("1 of 2 files" in line for line in lines) and any("val" in line for line in lines)
    assert converted(source, tmp_path / "val", RldsChoice(split="val"))[0] == (1, 3)
    with raises_code("rlds-split", EmbodrlError, "train, val"):
        converted(source, tmp_path / "none", RldsChoice(split="test"))
    with raises_code("rlds-no-dataset", EmbodrlError, "1.0.0"):
        converted(tmp_path, tmp_path / "none")


@pytest.mark.parametrize("place", ["length", "data", "end"])
def test_a_damaged_record_is_named_by_file_and_offset(tmp_path: Path, place: str):
    source = files.write(tmp_path / "1.0.0", {TRAIN: [files.episode(0, 2), files.episode(1, 2)]})
    content = bytearray((source / TRAIN).read_bytes())
    second = len(files.record(files.example(files.episode(0, 2))))
    if place == "end":
        del content[-9:]
    else:
        content[second + (3 if place == "length" else 40)] ^= 1
    (source / TRAIN).write_bytes(content)
    with raises_code("file-damaged", FileDamagedError, TRAIN, f"byte {second}"):
        converted(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_lost_record_is_noticed(tmp_path: Path):
    source = files.write(tmp_path / "1.0.0", {TRAIN: [files.episode(0, 2)]})
    info = {"fileFormat": "tfrecord", "splits": [{"name": "train", "shardLengths": ["2"]}]}
    (source / "dataset_info.json").write_text(json.dumps(info))
    with raises_code("file-damaged", FileDamagedError, "1 records", "2"):
        converted(source, tmp_path / "out")


@pytest.mark.parametrize("change", ["picture", "size", "length", "missing"])
def test_what_features_json_does_not_say_is_refused(tmp_path: Path, change: str):
    one = files.episode(0, 2)
    if change == "missing":
        del one["steps/observation/state"]
    elif change == "length":
        one["steps/action"] = one["steps/action"][:1]
    else:
        picture = b"no picture" if change == "picture" else files.encoded(np.ones((9, 9, 3), np.uint8))
        one["steps/observation/top"] = [picture] * 2
    source = files.write(tmp_path / "1.0.0", {TRAIN: [one]})
    with raises_code("file-damaged", FileDamagedError, TRAIN):
        converted(source, tmp_path / "out")


def test_no_bytes_of_a_record_end_in_another_error(tmp_path: Path):
    content = files.example({"steps/x": np.arange(5), "steps/y": np.zeros(3, np.float32), "steps/z": [b"abc"]})
    rng = np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(content)
        changed[rng.integers(len(changed))] = rng.integers(256)
        try:
            found = Example(bytes(changed), tmp_path, 0)
            _ = [found[name] for name in ("steps/x", "steps/y", "steps/z") if name in found]
        except FileDamagedError:
            continue


def test_real_episodes_of_bridge(tmp_path: Path):
    if not BRIDGE.is_dir():
        pytest.skip(f"no {BRIDGE}")
    counts, lines = converted(BRIDGE, tmp_path / "out")
    assert counts == (25, 250) and any("image_3 is blank" in line for line in lines)
    demos = load_demos(tmp_path / "out")
    assert demos.images.shape == (250, 3, 64, 64, 3) and demos.state.shape == demos.actions.shape == (250, 7)
    assert len(demos.instruction_table) == 4 and set(demos.success) == {None}
    assert np.abs(demos.actions[:, 6] - 0.5).max() < 0.6  # a gripper, 1 is open
