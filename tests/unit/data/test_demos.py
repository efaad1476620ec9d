import json

import numpy as np
import pytest
from expect import raises_code
from safetensors.numpy import load_file, save_file

from embodrl.config.schema import SftConfig
from embodrl.data.demos import DemoEpisode, Demos
from embodrl.data.facts import read_facts
from embodrl.data.imitation import DemoDraws, FrameBatches
from embodrl.data.load import load_demos
from embodrl.data.raw import RawWriter
from embodrl.errors import FileDamagedError, FileFormatError


def episode(number: int, length: int, success: bool = True) -> DemoEpisode:
    images = np.full((length, 1, 4, 4, 3), number, np.uint8)
    images[:, 0, 0, 0, 0] = np.arange(length)
    actions = (np.arange(length * 2, dtype=np.float32) + 100 * number).reshape(length, 2)
    state = np.stack([np.arange(length), np.full(length, number), np.ones(length)], axis=1).astype(np.float32)
    return DemoEpisode(images, state, actions, f"do {number}", f"task-{number % 2}", 10 + number, success)


def write(directory, lengths=(3, 1, 4), shard_episodes=2):
    writer = RawWriter(directory, shard_episodes)
    for number, length in enumerate(lengths):
        writer.add(episode(number, length))
    writer.close({"made": "by a test"})


def test_what_is_written_comes_back(tmp_path):
    write(tmp_path)
    assert len(list(tmp_path.glob("shard_*.safetensors"))) == 2
    demos = load_demos(tmp_path)
    assert demos.images.shape == (8, 1, 4, 4, 3) and demos.images.dtype == np.uint8
    np.testing.assert_array_equal(
        demos.actions, np.concatenate([episode(i, n).actions for i, n in ((0, 3), (1, 1), (2, 4))])
    )
    np.testing.assert_array_equal(demos.images[:, 0, 1, 1, 0], [0, 0, 0, 1, 2, 2, 2, 2])
    np.testing.assert_array_equal(demos.state[:, 0], [0, 1, 2, 0, 0, 1, 2, 3])
    np.testing.assert_array_equal(demos.state[:, 1], [0, 0, 0, 1, 2, 2, 2, 2])
    assert demos.state.shape == (8, 3) and demos.state.dtype == np.float32
    np.testing.assert_array_equal(demos.episode, [0, 0, 0, 1, 2, 2, 2, 2])
    np.testing.assert_array_equal(demos.last, [2, 2, 2, 3, 7, 7, 7, 7])
    assert demos.said(demos.last[[0, 3, 4]]) == ["do 0", "do 1", "do 2"] and demos.tasks == [
        "task-0",
        "task-1",
        "task-0",
    ]
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["meta"] == {"made": "by a test"}
    assert [entry["seed"] for entry in index["episodes"]] == [10, 11, 12]


def test_only_the_first_episodes_if_asked(tmp_path):
    write(tmp_path)
    assert load_demos(tmp_path, 2).actions.shape == (4, 2)


def test_demonstrations_from_before_there_were_states_load(tmp_path):
    write(tmp_path)
    without_checksums(tmp_path)
    for shard in tmp_path.glob("shard_*.safetensors"):
        save_file({name: array for name, array in load_file(shard).items() if name != "state"}, shard)
    demos = load_demos(tmp_path)
    assert demos.state.shape == (8, 0) and demos.state.dtype == np.float32 and demos.actions.shape == (8, 2)


def test_chunks_end_with_their_episode(tmp_path):
    write(tmp_path)
    actions, inside = load_demos(tmp_path).action_chunks(np.array([1, 3, 4]), 3)
    np.testing.assert_array_equal(inside, [[True, True, False], [True, False, False], [True, True, True]])
    np.testing.assert_array_equal(actions[0], [[2, 3], [4, 5], [4, 5]])  # the last action is repeated
    np.testing.assert_array_equal(actions[1], [[100, 101]] * 3)
    np.testing.assert_array_equal(actions[2], [[200, 201], [202, 203], [204, 205]])


def test_instructions_change_within_an_episode():
    columns = {"images": np.zeros((5, 1, 2, 2, 3)), "state": np.zeros((5, 0)), "actions": np.zeros((5, 1))}
    said = ["open", "open", "close", "close", "push"]
    demos = Demos.of_episodes(columns, [3, 2], said, ["a", "b"])
    assert demos.said(slice(None)) == said and demos.num_episodes == 2
    assert demos.select([1]).said(slice(None)) == ["close", "push"]
    assert Demos.concat([demos.select([1]), demos]).said(slice(None)) == [*said[3:], *said]
    batches = FrameBatches(demos, SftConfig(batch_size=5), 1, 0)
    batches.demos.actions[:, 0] = np.arange(5)
    for seen, actions, _ in (batches.next(), DemoDraws(demos, 9, 1, 0).next()):
        assert list(seen.instruction) == [said[int(number)] for number in actions[:, 0, 0]]
    same = Demos.of_episodes(columns, [3, 2], ["open", "close"], ["a", "b"])
    assert same.checksum != demos.checksum


def test_missing_foreign_and_full_directories_are_refused(tmp_path):
    with raises_code("dataset-missing") as refused:
        load_demos(tmp_path)
    assert "embodrl collect" in refused.value.hint
    write(tmp_path)
    with raises_code("dataset-exists"):
        RawWriter(tmp_path)
    without_checksums(tmp_path)
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"format": 99, "episodes": []}))
    with raises_code("dataset-version"):
        load_demos(tmp_path)
    index.write_text(json.dumps({"format": 1, "meta": {}, "episodes": []}))
    with raises_code("dataset-empty"):
        load_demos(tmp_path)


def without_checksums(directory):
    """As a dataset from elsewhere."""
    (directory / "checksums.json").unlink()


def test_each_flipped_byte_is_found(tmp_path):
    write(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        content = path.read_bytes()
        for at in range(0, len(content), max(1, len(content) // 60)):
            path.write_bytes(content[:at] + bytes([content[at] ^ 0x20]) + content[at + 1 :])
            if path.name != "checksums.json":
                with raises_code("file-damaged") as refused:
                    load_demos(tmp_path)
                assert path.name in refused.value.message
            else:  # a letter of another case in a name or a key, at most
                with pytest.raises((FileDamagedError, FileFormatError)):
                    load_demos(tmp_path)
        path.write_bytes(content)
    assert len(load_demos(tmp_path).actions) == 8


def damage(directory, kind):
    index, shard = directory / "index.json", directory / "shard_0001.safetensors"
    content = json.loads(index.read_text())
    if kind == "truncated shard":
        shard.write_bytes(shard.read_bytes()[:-10])
    elif kind == "empty shard":
        shard.write_bytes(b"")
    elif kind == "missing shard":
        shard.unlink()
    elif kind == "shard of another collection":
        save_file({name: array[:2] for name, array in load_file(shard).items()}, shard)
    elif kind == "shard without actions":
        save_file({"images": load_file(shard)["images"]}, shard)
    elif kind == "shard without some states":
        save_file({name: array[:2] if name == "state" else array for name, array in load_file(shard).items()}, shard)
    elif kind == "torn index":
        index.write_text(index.read_text()[:50])
    elif kind == "index of another kind":
        index.write_text("[1, 2]")
    elif kind == "no episodes":
        index.write_text(json.dumps({"format": 1, "meta": {}}))
    elif kind == "episode without a length":
        del content["episodes"][0]["length"]
        index.write_text(json.dumps(content))
    elif kind == "another name of a shard":
        content["episodes"][-1]["shard"] = "xhard_0001.safetensors"
        index.write_text(json.dumps(content))
    elif kind == "episodes of another kind":
        index.write_text(json.dumps(content | {"episodes": [3]}))


def test_what_is_read_first_of_all_is_checked_first(tmp_path):
    write(tmp_path)
    index = tmp_path / "index.json"
    index.write_text(index.read_text().replace("shard_0001", "shard_0002"))
    with raises_code("file-damaged") as refused:
        read_facts(tmp_path)
    assert "index.json: the content differs" in refused.value.message


def test_without_checksums_an_index_is_named_with_the_shard_that_it_names(tmp_path):
    write(tmp_path)
    without_checksums(tmp_path)
    index = tmp_path / "index.json"
    index.write_text(index.read_text().replace("shard_0000", "xhard_0000"))
    with raises_code("file-damaged") as refused:
        read_facts(tmp_path)
    assert "index.json" in refused.value.message and "xhard_0000" in refused.value.message


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("truncated shard", "shard_0001"),
        ("empty shard", "shard_0001"),
        ("missing shard", "shard_0001"),
        ("shard of another collection", "shard_0001"),
        ("shard without actions", "shard_0001"),
        ("shard without some states", "shard_0001"),
        ("torn index", "index"),
        ("index of another kind", "index"),
        ("no episodes", "index"),
        ("episode without a length", "index"),
        ("another name of a shard", "index.json"),
        ("episodes of another kind", "index"),
    ],
)
def test_damaged_demonstrations_are_named(tmp_path, kind, name, has_checksums):
    write(tmp_path)
    if not has_checksums:
        without_checksums(tmp_path)
    damage(tmp_path, kind)
    with raises_code("file-damaged") as refused:
        load_demos(tmp_path)
    assert name in refused.value.message


@pytest.mark.parametrize(("value", "shown"), [(np.nan, "nan"), (-np.inf, "-inf"), (1e30, "1e+30")])
@pytest.mark.parametrize("column", ["actions", "state"])
def test_numbers_that_are_not_of_a_robot_are_named(tmp_path, column, value, shown):
    broken = episode(1, 3)
    getattr(broken, column)[2, 1] = value
    writer = RawWriter(tmp_path / "data")
    for each in (episode(0, 3), broken):
        writer.add(each)
    writer.close({})
    with raises_code("file-damaged") as refused:
        load_demos(tmp_path / "data")
    assert f"shard_0000.safetensors is damaged: episode 1, frame 2: {column}[1] is {shown}" in refused.value.message


@pytest.mark.parametrize("shard", ["../shard_0000.safetensors", "/etc/shadow", "a/b"])
def test_an_index_does_not_lead_out_of_its_directory(tmp_path, shard):
    write(tmp_path / "data")
    without_checksums(tmp_path / "data")
    index = tmp_path / "data/index.json"
    content = json.loads(index.read_text())
    content["episodes"][1]["shard"] = shard
    index.write_text(json.dumps(content))
    with raises_code("file-damaged") as refused:
        load_demos(tmp_path / "data")
    assert shard in refused.value.message


def kill(writer):
    """Leave what a killed process leaves: its files, without its lock."""
    writer._stop()
    writer._unlock()


def test_a_killed_collection_continues_from_its_last_commit(tmp_path):
    killed = RawWriter(tmp_path / "data", 2)
    for number, length in ((0, 3), (1, 1), (2, 4)):
        killed.add(episode(number, length))
    killed.commit({"attempts": 5})
    for number in (3, 4):
        killed.add(episode(number, 2))
    with raises_code("dataset-in-use"):
        RawWriter(tmp_path / "data", 2, resume=True)
    kill(killed)
    with raises_code("dataset-interrupted"):
        RawWriter(tmp_path / "data", 2)
    writer = RawWriter(tmp_path / "data", 2, resume=True)
    assert writer.progress is not None and writer.progress.integer("attempts") == 5 and writer.num_frames == 8
    writer.add(episode(5, 2))
    writer.close({})
    demos = load_demos(tmp_path / "data")
    assert demos.instruction_table == ["do 0", "do 1", "do 2", "do 5"] and len(demos.actions) == 10
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_collection_killed_before_its_first_commit_is_not_in_the_way(tmp_path):
    killed = RawWriter(tmp_path / "data", 1)
    killed.add(episode(0, 3))
    kill(killed)
    write(tmp_path / "data")
    assert len(load_demos(tmp_path / "data").actions) == 8
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_commit_of_another_format_or_with_a_lost_file_is_refused(tmp_path):
    writer = RawWriter(tmp_path / "data", 1)
    writer.add(episode(0, 3))
    writer.commit({})
    kill(writer)
    commit = tmp_path / ".data.commit.json"
    content = commit.read_text()
    commit.write_text(content.replace('"raw"', '"lerobot"'))
    with raises_code("file-format"):
        RawWriter(tmp_path / "data", resume=True)
    commit.write_text(content)
    (writer.staging / "shard_0000.safetensors").unlink()
    with raises_code("file-format") as refused:
        RawWriter(tmp_path / "data", resume=True)
    assert "shard_0000.safetensors is missing" in refused.value.message and "rm -r" in refused.value.hint


def test_a_directory_that_can_not_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with raises_code("output") as refused:
        RawWriter(tmp_path / "file" / "demos")
    assert "set collect.output_dir" in refused.value.hint


def test_a_disk_that_fails_later_keeps_what_was_committed(tmp_path):
    for committed in (False, True):
        writer = RawWriter(tmp_path / "data", 1, resume=True)
        if committed:
            writer.add(episode(0, 3))
            writer.commit({})
        (writer.staging / f"shard_000{int(committed)}.safetensors").mkdir()
        with raises_code("output") as refused:
            writer.add(episode(1, 3))
        assert writer.staging.exists() == committed and ("continues" in refused.value.hint) == committed
        writer.close({})
        assert not (tmp_path / "data").exists()
    (writer.staging / "shard_0001.safetensors").rmdir()
    writer = RawWriter(tmp_path / "data", 1, resume=True)
    writer.close({})
    assert len(load_demos(tmp_path / "data").actions) == 3
