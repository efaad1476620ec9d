import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from embodrl.data.demos import DemoWriter, Episode
from embodrl.data.load import load_demos
from embodrl.errors import EmbodrlError, OutputError


def episode(number: int, length: int, success: bool = True) -> Episode:
    images = np.full((length, 1, 4, 4, 3), number, np.uint8)
    images[:, 0, 0, 0, 0] = np.arange(length)
    actions = (np.arange(length * 2, dtype=np.float32) + 100 * number).reshape(length, 2)
    state = np.stack([np.arange(length), np.full(length, number), np.ones(length)], axis=1).astype(np.float32)
    return Episode(images, state, actions, f"do {number}", f"task-{number % 2}", 10 + number, success)


def write(directory, lengths=(3, 1, 4), shard_episodes=2):
    writer = DemoWriter(directory, shard_episodes)
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
    assert demos.instructions == ["do 0", "do 1", "do 2"] and demos.tasks == ["task-0", "task-1", "task-0"]
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["meta"] == {"made": "by a test"}
    assert [entry["seed"] for entry in index["episodes"]] == [10, 11, 12]


def test_only_the_first_episodes_if_asked(tmp_path):
    write(tmp_path)
    assert load_demos(tmp_path, 2).actions.shape == (4, 2)


def test_demonstrations_from_before_there_were_states_load(tmp_path):
    write(tmp_path)
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


def test_incomplete_foreign_and_full_directories_are_refused(tmp_path):
    writer = DemoWriter(tmp_path, 1)
    writer.add(episode(0, 3))  # a shard, and no index: a run that was killed
    with pytest.raises(EmbodrlError, match="holds no demonstrations") as refused:
        load_demos(tmp_path)
    assert "embodrl collect" in refused.value.hint
    writer.close({})
    assert len(load_demos(tmp_path).actions) == 3
    with pytest.raises(EmbodrlError, match="holds demonstrations already"):
        DemoWriter(tmp_path)
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"format": 99, "episodes": []}))
    with pytest.raises(EmbodrlError, match="format 99"):
        load_demos(tmp_path)
    index.write_text(json.dumps({"format": 1, "meta": {}, "episodes": []}))
    with pytest.raises(EmbodrlError, match="no episodes"):
        load_demos(tmp_path)


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
    elif kind == "episodes of another kind":
        index.write_text(json.dumps(content | {"episodes": [3]}))


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
        ("episodes of another kind", "index"),
    ],
)
def test_damaged_demonstrations_are_named(tmp_path, kind, name):
    write(tmp_path)
    damage(tmp_path, kind)
    with pytest.raises(EmbodrlError, match=f"{name}.* is damaged") as refused:
        load_demos(tmp_path)
    assert "re-collect the demonstrations" in refused.value.hint


def test_what_a_killed_collection_left_is_refused_and_not_mixed_in(tmp_path):
    killed = DemoWriter(tmp_path, 1)
    killed.add(episode(0, 3))
    with pytest.raises(EmbodrlError, match="was killed") as refused:
        DemoWriter(tmp_path)
    assert f"rm {tmp_path}/shard_" in refused.value.hint
    (tmp_path / "shard_0000.safetensors").unlink()
    (tmp_path / ".shard_0000.partial.safetensors").write_bytes(b"torn")
    write(tmp_path)
    assert len(load_demos(tmp_path).actions) == 8


def test_a_directory_that_can_not_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="can't be written") as refused:
        DemoWriter(tmp_path / "file" / "demos")
    assert "set collect.output_dir" in refused.value.hint


def test_a_disk_that_fails_later_is_told(tmp_path):
    writer = DemoWriter(tmp_path, 1)
    (tmp_path / "shard_0000.safetensors").mkdir()
    with pytest.raises(OutputError, match="can't be written"):
        writer.add(episode(0, 3))
    assert not (tmp_path / ".shard_0000.partial.safetensors").exists()
