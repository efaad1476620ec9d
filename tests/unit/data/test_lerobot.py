"""LeRobot datasets: what is written comes back, and others' datasets are read."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from expect import raises_code

pytest.importorskip("pyarrow")
pytest.importorskip("imageio_ffmpeg")

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from embodrl.data import lerobot, parquet
from embodrl.data.demos import DemoEpisode
from embodrl.data.lerobot_stats import PixelStats, vector_stats
from embodrl.data.lerobot_writer import LeRobotWriter
from embodrl.data.load import camera_names, load_demos
from embodrl.data.raw import RawWriter
from embodrl.data.video_file import VideoEncoder, read_video
from embodrl.errors import FileDamagedError, MissingDependencyError, OutputError

CAMERAS = ("front", "wrist")
HEIGHT, WIDTH = 10, 14


def episode(number: int, length: int, state_dim: int = 3, action_dim: int = 2) -> DemoEpisode:
    rng = np.random.default_rng(number)
    return DemoEpisode(
        images=rng.integers(0, 256, (length, len(CAMERAS), HEIGHT, WIDTH, 3), dtype=np.uint8),
        state=rng.normal(size=(length, state_dim)).astype(np.float32),
        actions=rng.normal(size=(length, action_dim)).astype(np.float32),
        instruction=f"do {number % 2}",
        task=f"task-{number % 2}",
        seed=100 + number,
        success=number != 1,
    )


EPISODES = ((0, 3), (1, 1), (2, 4))


def write(directory: Path, crf: int = 0, **options: int) -> list[DemoEpisode]:
    writer = LeRobotWriter(directory, CAMERAS, 20, crf, "panda")
    episodes = [episode(number, length, **options) for number, length in EPISODES]
    for each in episodes:
        writer.add(each)
    assert writer.num_frames == 8
    writer.close({"how": "by hand"})
    return episodes


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, only to be copied."""
    directory = tmp_path_factory.mktemp("written") / "data"
    write(directory)
    return directory


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "data")


def joined(episodes: list[DemoEpisode], field: str) -> np.ndarray:
    return np.concatenate([getattr(each, field) for each in episodes])


def test_what_is_written_comes_back_bit_exactly(tmp_path: Path) -> None:
    episodes = write(tmp_path / "data")
    demos = load_demos(tmp_path / "data")
    for field in ("images", "state", "actions"):
        found = getattr(demos, field)
        np.testing.assert_array_equal(found, joined(episodes, field))
        assert found.dtype == getattr(episodes[0], field).dtype
    np.testing.assert_array_equal(demos.episode, [0, 0, 0, 1, 2, 2, 2, 2])
    np.testing.assert_array_equal(demos.last, [2, 2, 2, 3, 7, 7, 7, 7])
    assert demos.said(demos.last) == ["do 0"] * 3 + ["do 1"] + ["do 0"] * 4 and demos.tasks == [
        "task-0",
        "task-1",
        "task-0",
    ]
    assert not list(tmp_path.glob(".*"))


def test_a_relative_directory_and_a_link_are_read(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(written)
    monkeypatch.chdir(written.parent)
    for directory in (Path(written.name), tmp_path / "link"):
        assert len(load_demos(directory).episode) == 8


def test_the_files_are_those_of_the_format(tmp_path: Path) -> None:
    write(tmp_path)
    info = json.loads((tmp_path / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0" and info["fps"] == 20 and info["robot_type"] == "panda"
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 8, 2)
    camera = info["features"]["observation.images.wrist"]
    assert camera["dtype"] == "video" and camera["shape"] == [HEIGHT, WIDTH, 3]
    rows = pq.read_table(tmp_path / info["data_path"].format(chunk_index=0, file_index=0))
    assert rows["index"].to_pylist() == list(range(8)) and rows["task_index"].to_pylist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert rows["frame_index"].to_pylist() == [0, 1, 2, 0, 0, 1, 2, 3]
    np.testing.assert_allclose(rows["timestamp"].to_numpy(), np.array([0, 1, 2, 0, 0, 1, 2, 3]) / 20, rtol=1e-6)
    assert rows["timestamp"].type == pa.float32() and rows["action"].type == pa.list_(pa.float32(), 2)
    episodes = pq.read_table(tmp_path / "meta/episodes/chunk-000/file-000.parquet")
    assert episodes["dataset_from_index"].to_pylist() == [0, 3, 4]
    assert episodes["dataset_to_index"].to_pylist() == [3, 4, 8]
    assert episodes["videos/observation.images.front/from_timestamp"].to_pylist() == [0.0, 0.15, 0.2]
    assert episodes["videos/observation.images.front/to_timestamp"].to_pylist() == [0.15, 0.2, 0.4]
    assert episodes["embodrl/seed"].to_pylist() == [100, 101, 102]
    assert episodes["embodrl/success"].to_pylist() == [True, False, True]
    tasks = pq.read_table(tmp_path / "meta/tasks.parquet")
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["task"]
    assert json.loads((tmp_path / "meta/embodrl.json").read_text()) == {"how": "by hand"}


def test_the_statistics_are_of_all_frames(tmp_path: Path) -> None:
    episodes = write(tmp_path)
    stats = json.loads((tmp_path / "meta/stats.json").read_text())
    actions, pixels = joined(episodes, "actions").astype(np.float64), joined(episodes, "images")[:, 1] / 255
    np.testing.assert_allclose(stats["action"]["mean"], actions.mean(0))
    np.testing.assert_allclose(stats["action"]["std"], actions.std(0))
    np.testing.assert_allclose(stats["action"]["q99"], np.quantile(actions, 0.99, axis=0))
    assert stats["action"]["count"] == [8]
    wrist = stats["observation.images.wrist"]
    assert np.shape(wrist["mean"]) == (3, 1, 1) and wrist["count"] == [8]
    np.testing.assert_allclose(np.ravel(wrist["mean"]), pixels.mean((0, 1, 2)))
    np.testing.assert_allclose(np.ravel(wrist["std"]), pixels.std((0, 1, 2)))
    rows = pq.read_table(tmp_path / "meta/episodes/chunk-000/file-000.parquet")
    np.testing.assert_allclose(rows["stats/observation.state/max"].to_pylist()[2], episodes[2].state.max(0))


def test_statistics_by_hand() -> None:
    stats = vector_stats(np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [5.0, 1.0]]))
    assert stats["min"] == [0, 1] and stats["max"] == [5, 1] and stats["mean"] == [2, 1] and stats["count"] == [4]
    np.testing.assert_allclose(stats["std"], [np.sqrt(3.5), 0])  # (4 + 1 + 0 + 9) / 4
    np.testing.assert_allclose(stats["q50"], [1.5, 1])
    np.testing.assert_allclose(stats["q99"], [2 + 0.97 * 3, 1])  # rank 0.99 * 3 = 2.97, between 2 and 5
    assert vector_stats(np.array([3, 4]))["mean"] == [3.5]


def test_histograms_have_the_quantiles_of_the_pixels() -> None:
    frames = np.random.default_rng(0).integers(0, 40, (5, 3, 4, 3), dtype=np.uint8)
    pixels = PixelStats()
    pixels.add(frames[:2])
    other = PixelStats()
    other.add(frames[2:])
    pixels.merge(other)
    stats = pixels.stats()
    for name, q in (("q01", 0.01), ("q10", 0.1), ("q50", 0.5), ("q90", 0.9), ("q99", 0.99)):
        np.testing.assert_allclose(np.ravel(stats[name]), np.quantile(frames / 255, q, axis=(0, 1, 2)), atol=1e-12)
    assert np.ravel(stats["min"]).tolist() == (frames.min((0, 1, 2)) / 255).tolist()
    assert stats["count"] == [5]


def test_no_state_and_one_action(tmp_path: Path) -> None:
    episodes = write(tmp_path, state_dim=0, action_dim=1)
    demos = load_demos(tmp_path)
    assert demos.state.shape == (8, 0) and demos.state.dtype == np.float32
    np.testing.assert_array_equal(demos.actions, joined(episodes, "actions"))
    assert "observation.state" not in json.loads((tmp_path / "meta/info.json").read_text())["features"]
    # A feature of one dimension is a number, not a list, for readers of the format.
    assert pq.read_table(tmp_path / "data/chunk-000/file-000.parquet")["action"].type == pa.float32()


def test_a_new_file_begins_when_one_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot, "DATA_FILE_MB", 1e-9)
    monkeypatch.setattr(lerobot, "CHUNKS_SIZE", 2)
    episodes = write(tmp_path)
    for name in ("chunk-000/file-000", "chunk-000/file-001", "chunk-001/file-000"):
        assert (tmp_path / f"data/{name}.parquet").is_file()
        assert (tmp_path / f"videos/observation.images.front/{name}.mp4").is_file()
    demos = load_demos(tmp_path)
    np.testing.assert_array_equal(demos.images, joined(episodes, "images"))
    np.testing.assert_array_equal(demos.actions, joined(episodes, "actions"))


def test_cameras_size_and_number_of_episodes_are_chosen(tmp_path: Path) -> None:
    episodes = write(tmp_path)
    assert camera_names(tmp_path) == ["observation.images.front", "observation.images.wrist"]
    demos = load_demos(tmp_path, 2, ("observation.images.wrist",), (5, 7))
    assert demos.images.shape == (4, 1, 5, 7, 3) and demos.num_episodes == 2
    first = Image.fromarray(episodes[0].images[0, 1]).resize((7, 5), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(demos.images[0, 0], np.asarray(first))
    swapped = load_demos(tmp_path, cameras=("wrist", "front"))
    np.testing.assert_array_equal(swapped.images, joined(episodes, "images")[:, ::-1])
    with raises_code("sft-camera-missing") as error:
        load_demos(tmp_path, cameras=("wirst",))
    assert "it has front, wrist" in error.value.message and error.value.hint == "set sft.cameras=[wrist]"


def test_lossy_videos_are_smaller_and_near(tmp_path: Path) -> None:
    rows, columns = np.mgrid[0:32, 0:32]
    frames = np.stack([np.stack([8 * rows, 8 * columns, 4 * (rows + columns) + k], -1) for k in range(5)])
    frames = frames.astype(np.uint8)
    sizes = []
    for crf in (0, 6):
        encoder = VideoEncoder(tmp_path / f"{crf}.mp4", 32, 32, 20, crf)
        encoder.add(frames[:2])
        encoder.add(frames[2:])
        encoder.close()
        found = np.stack(list(read_video(tmp_path / f"{crf}.mp4")))
        assert found.shape == frames.shape
        assert np.abs(found.astype(int) - frames).mean() <= (0 if crf == 0 else 2)
        sizes.append((tmp_path / f"{crf}.mp4").stat().st_size)
    assert len(list(read_video(tmp_path / "0.mp4", 3))) == 2


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "data")
    with raises_code("dataset-exists"):
        LeRobotWriter(tmp_path / "data", CAMERAS, 20)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    with raises_code("dataset-exists"):
        LeRobotWriter(tmp_path / "full", CAMERAS, 20)


def test_until_it_is_whole_the_data_set_is_not_there(tmp_path: Path) -> None:
    writer = LeRobotWriter(tmp_path / "data", CAMERAS, 20)
    writer.add(episode(0, 3))
    assert not (tmp_path / "data").exists()
    with raises_code("dataset-in-use"):
        LeRobotWriter(tmp_path / "data", CAMERAS, 20)
    writer.abort()
    assert not list(tmp_path.iterdir())
    writer.close({})
    assert not list(tmp_path.iterdir())


def test_a_killed_collection_continues_from_its_last_commit(tmp_path: Path) -> None:
    """The dataset that was interrupted differs from one that was not in its files only: it holds the same."""
    lengths = (3, 1, 4, 2)
    killed = LeRobotWriter(tmp_path / "data", CAMERAS, 20)
    for number in (0, 1):
        killed.add(episode(number, lengths[number]))
    killed.commit({"attempts": 7})
    killed.add(episode(9, 5))
    killed._stop()
    killed._unlock()
    writer = LeRobotWriter(tmp_path / "data", CAMERAS, None, resume=True)
    assert writer.progress is not None and writer.progress.integer("attempts") == 7
    assert writer.num_frames == 4 and writer.fps == 20
    whole = LeRobotWriter(tmp_path / "whole", CAMERAS, 20)
    for number in (0, 1):
        whole.add(episode(number, lengths[number]))
    for number in (2, 3):
        for each in (writer, whole):
            each.add(episode(number, lengths[number]))
    for each in (writer, whole):
        each.close({})
    for name in ("meta/stats.json", "meta/info.json", "meta/tasks.parquet"):
        assert (tmp_path / "data" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    found, expected = load_demos(tmp_path / "data"), load_demos(tmp_path / "whole")
    for field in ("images", "state", "actions", "episode", "last"):
        np.testing.assert_array_equal(getattr(found, field), getattr(expected, field))
    assert found.said(found.last) == expected.said(expected.last) and found.tasks == expected.tasks
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "whole"]


def test_a_collection_is_continued_with_the_same_features(tmp_path: Path) -> None:
    killed = LeRobotWriter(tmp_path / "data", CAMERAS, 20)
    killed.add(episode(0, 3))
    killed.commit({})
    killed._unlock()
    with raises_code("file-format"):
        LeRobotWriter(tmp_path / "data", ("front",), 20, resume=True)
    writer = LeRobotWriter(tmp_path / "data", CAMERAS, 20, resume=True)
    with raises_code("dataset-other-features"):
        writer.add(episode(1, 3, action_dim=5))


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LeRobotWriter(tmp_path / "data", CAMERAS, 20)
    writer.add(episode(0, 3))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "_write_meta", full)
    with raises_code("output", OutputError, "No space left on device"):
        writer.close({})
    assert not list(tmp_path.iterdir())


def test_an_encoder_that_died_is_reported(tmp_path: Path) -> None:
    writer = LeRobotWriter(tmp_path / "data", CAMERAS, 20)
    writer.add(episode(0, 3))
    encoder = writer._open.encoders["observation.images.front"]
    encoder._process.kill()
    encoder._process.wait()
    with raises_code("output", OutputError):
        writer.close({})
    assert not list(tmp_path.iterdir())


def test_ffmpeg_says_what_it_does_not_like(tmp_path: Path) -> None:
    encoder = VideoEncoder(tmp_path / "missing" / "x.mp4", 4, 4, 20, 0)
    with pytest.raises(OSError, match="No such file or directory"):
        for _ in range(10_000):  # until the pipe is found closed
            encoder.add(np.zeros((100, 4, 4, 3), np.uint8))
        encoder.close()


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with raises_code("video-packages-missing", MissingDependencyError, "pyarrow") as error:
        LeRobotWriter(tmp_path / "data", CAMERAS, 20)
    assert error.value.hint == "pip install 'embodrl[datasets]'"


def change_info(directory: Path, **changes: object) -> None:
    path = directory / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_feature(directory: Path, name: str, **changes: object) -> None:
    features = json.loads((directory / "meta/info.json").read_text())["features"]
    change_info(directory, features=features | {name: features[name] | changes})


def change_table(name: str, column: str, change) -> Callable[[Path], None]:
    """Rewrite a column of a parquet file; without values, drop it."""

    def damage(directory: Path) -> None:
        table = pq.read_table(directory / name, partitioning=None)
        at = table.column_names.index(column)
        values = change(table[column].to_pylist())
        table = table.remove_column(at)
        pq.write_table(table if values is None else table.append_column(column, pa.array(values)), directory / name)

    return damage


DATA, META = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
VIDEO = "videos/observation.images.wrist/chunk-000/file-000.mp4"


def at_5(value: object) -> Callable[[list], list]:
    """Another first number in the sixth row, which is frame 1 of episode 2."""
    return lambda rows: [[value, *row[1:]] if n == 5 else row for n, row in enumerate(rows)]


def replaced(value: object) -> Callable[[list], list]:
    return lambda rows: [value, *rows[1:]]


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (lambda d: (d / "meta/info.json").write_text("{"), "file-damaged", "info.json is not valid JSON"),
        (lambda d: (d / "meta/info.json").write_text("[" * 10**5), "file-damaged", "nested too deeply"),
        (lambda d: change_info(d, codebase_version="v9.0"), "dataset-version", "is of version v9.0"),
        (lambda d: change_info(d, fps="20"), "file-damaged", "'fps' is \"20\", not a number"),
        (lambda d: change_info(d, fps=0), "file-damaged", "'fps' is 0"),
        (lambda d: change_info(d, total_frames=9), "file-damaged", "states 9 frames; meta/episodes has 8"),
        (lambda d: change_info(d, total_episodes=4), "file-damaged", "states 4 episodes; meta/episodes has 3"),
        (lambda d: change_info(d, video_path="../{video_key}.mp4"), "dataset-path", "leads outside the dataset"),
        (lambda d: change_info(d, data_path="/etc/shadow"), "dataset-path", "leads outside the dataset"),
        (lambda d: change_info(d, data_path="{chunk_index.__class__}"), "file-damaged", "is not a path template"),
        (lambda d: change_info(d, data_path="{file_index:999999999d}"), "file-damaged", "is not a path template"),
        (lambda d: change_info(d, data_path="{"), "file-damaged", "is not a path template"),
        (lambda d: change_feature(d, "action", shape=[3]), "dataset-layout", "action has 2 numbers per row, and 3"),
        (lambda d: change_feature(d, "action", shape="2"), "file-damaged", "'shape' is \"2\", not a list"),
        (
            lambda d: change_feature(d, "observation.images.wrist", shape=[10**9, 10**9, 3]),
            "file-damaged",
            "sizes must be 1 to 16384",
        ),
        (
            lambda d: [change_feature(d, f"observation.images.{name}", shape=[10, 12, 3]) for name in CAMERAS],
            "dataset-picture-size",
            "a frame is 10 x 14 (height x width), and 10 x 12 by info.json",
        ),
        (lambda d: (d / DATA).unlink(), "file-damaged", "file-000.parquet is damaged: it is missing"),
        (lambda d: (d / DATA).write_bytes(b"x"), "file-damaged", "file-000.parquet is damaged"),
        (change_table(DATA, "action", lambda _: None), "dataset-layout", "file-000.parquet: it has no column action"),
        (change_table(DATA, "action", at_5(np.nan)), "file-damaged", "episode 2, frame 1: action[0] is nan"),
        (
            change_table(DATA, "observation.state", at_5(-1e30)),
            "file-damaged",
            "frame 1: observation.state[0] is -1e+30",
        ),
        (change_table(DATA, "action", replaced([1.0])), "dataset-layout", "the lists of action differ in length"),
        (change_table(DATA, "action", replaced(None)), "dataset-layout", "the lists of action differ in length"),
        (
            change_table(DATA, "action", lambda r: [["a", "b"]] * len(r)),
            "dataset-layout",
            "action is string, not numbers",
        ),
        (change_table(DATA, "frame_index", replaced(1)), "file-damaged", "frame_index of episode 0 is not 0 to 2"),
        (change_table(DATA, "episode_index", replaced(7)), "file-damaged", "episode 0 has 2 rows, and 3 by"),
        (change_table(DATA, "episode_index", replaced(None)), "dataset-layout", "episode_index is int64 with 1 nulls"),
        (change_table(DATA, "task_index", replaced(5)), "file-damaged", "episode 0 has task_index 5"),
        (change_table(META, "length", replaced(-1)), "file-damaged", "row 0: 'length' is -1"),
        (change_table(META, "length", replaced(2**40)), "file-damaged", "row 0: 'length' is 1099511627776"),
        (change_table(META, "episode_index", replaced(1)), "file-damaged", "an episode_index appears twice"),
        (change_table(META, "data/file_index", replaced(-3)), "file-damaged", "'data/file_index' is -3"),
        (
            change_table(META, "videos/observation.images.wrist/from_timestamp", replaced(float("nan"))),
            "file-damaged",
            "from_timestamp' is NaN",
        ),
        (lambda d: (d / META).write_bytes(b"x"), "file-damaged", "file-000.parquet is damaged"),
        (lambda d: (d / "meta/tasks.parquet").unlink(), "file-damaged", "tasks.parquet is damaged: it is missing"),
        (change_table("meta/tasks.parquet", "task", replaced(None)), "dataset-layout", "task holds None, not a string"),
        (change_table("meta/tasks.parquet", "task_index", replaced(1)), "file-damaged", "a task_index appears twice"),
        (lambda d: [path.unlink() for path in d.glob("videos/*/*/*")], "file-damaged", "it is missing"),
        (lambda d: (d / VIDEO).write_bytes(b"x"), "file-damaged", "file-000.mp4 is damaged"),
        (lambda d: (d / VIDEO).write_bytes(short_video(d)), "file-damaged", "ends after 2 frames"),
    ],
)
def test_damage_is_named(copied: Path, damage, code: str, words: str) -> None:
    """Without checksums, as in a dataset from elsewhere."""
    (copied / "checksums.json").unlink()
    damage(copied)
    with raises_code(code) as refused:
        load_demos(copied)
    assert words in refused.value.message


@pytest.mark.parametrize("name", [DATA, META, VIDEO, "meta/info.json", "meta/stats.json", "meta/tasks.parquet"])
def test_a_flipped_byte_in_our_own_data_set_is_found(copied: Path, name: str) -> None:
    content = (copied / name).read_bytes()
    for at in (0, len(content) // 2, len(content) - 1):
        (copied / name).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with raises_code("file-damaged") as refused:
            load_demos(copied)
        assert f"{name}: the content differs from what was written" in refused.value.message
    (copied / name).unlink()
    with raises_code("file-damaged", FileDamagedError, "meta/episodes" if name == META else name):
        load_demos(copied)


def test_only_files_that_are_used_are_hashed(copied: Path) -> None:
    (copied / VIDEO).write_bytes(b"x")
    assert load_demos(copied, cameras=("front",)).images.shape[1] == 1


def test_values_outside_the_stated_range_are_reported(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    (copied / "checksums.json").unlink()
    change_table(DATA, "action", at_5(50.0))(copied)
    load_demos(copied)
    assert "action of 1 frames is outside the range" in caplog.text
    assert "frame 5, action[0] is 50" in caplog.text


def short_video(directory: Path) -> bytes:
    path = directory / "short.mp4"
    encoder = VideoEncoder(path, HEIGHT, WIDTH, 20, 0)
    encoder.add(np.zeros((2, HEIGHT, WIDTH, 3), np.uint8))
    encoder.close()
    return path.read_bytes()


def test_more_pictures_than_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    memory = type("Memory", (), {"available": 100})
    monkeypatch.setattr(parquet.psutil, "virtual_memory", lambda: memory)
    with raises_code("dataset-too-large") as refused:  # already the rows
        load_demos(tmp_path)
    assert "of rows" in refused.value.message
    memory.available = 9_000
    monkeypatch.setattr(parquet.Table, "_check_size", lambda *_: None)
    with raises_code("dataset-too-large") as refused:
        load_demos(tmp_path)
    assert "at 10 x 14 take 0.0 GB of memory" in refused.value.message


def png(value: int) -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.full((6, 8, 3), value, np.uint8)).save(data, "png")
    return data.getvalue()


def foreign(directory: Path) -> None:
    """A dataset as others write it: pictures in the table, channels first, rows of another order, an unnamed index."""
    features = {
        "observation.image": {"dtype": "image", "shape": [3, 6, 8], "names": ["channels", "height", "width"]},
        "action": {"dtype": "float32", "shape": [2], "names": ["x", "y"]},
        "next.reward": {"dtype": "float32", "shape": [1], "names": None},
    }
    for name in ("data/chunk-000", "meta/episodes/chunk-000"):
        (directory / name).mkdir(parents=True)
    info = {"codebase_version": "v3.0", "fps": 10, "chunks_size": 1000, "features": features}
    info |= {"data_path": lerobot.DATA_PATH, "video_path": None}
    (directory / "meta/info.json").write_text(json.dumps(info))
    rows = [(1, 1, 3), (1, 0, 2), (0, 0, 1)]
    table = pa.table(
        {
            "observation.image": [{"bytes": png(10 * v), "path": "x.png"} for _, _, v in rows],
            "action": [[float(v), -float(v)] for _, _, v in rows],
            "next.reward": [0.0] * 3,
            "episode_index": [e for e, _, _ in rows],
            "frame_index": [f for _, f, _ in rows],
            "task_index": [1 - e for e, _, _ in rows],
        }
    )
    pq.write_table(table, directory / "data/chunk-000/file-000.parquet")
    episodes = {"episode_index": [1, 0], "length": [2, 1], "data/chunk_index": [0, 0], "data/file_index": [0, 0]}
    pq.write_table(pa.table(episodes), directory / "meta/episodes/chunk-000/file-000.parquet")
    tasks = {"task_index": [0, 1], "__index_level_0__": ["open", "close"]}
    pq.write_table(pa.table(tasks), directory / "meta/tasks.parquet")


def test_a_data_set_of_someone_else(tmp_path: Path) -> None:
    foreign(tmp_path)
    demos = load_demos(tmp_path)
    np.testing.assert_array_equal(demos.actions, [[1, -1], [2, -2], [3, -3]])
    np.testing.assert_array_equal(demos.images[:, 0, 0, 0, 0], [10, 20, 30])
    assert demos.images.shape == (3, 1, 6, 8, 3) and demos.state.shape == (3, 0)
    assert demos.said(demos.last) == ["close", "open", "open"] and demos.tasks == ["close", "open"]


def test_version_2_has_a_file_an_episode(tmp_path: Path) -> None:
    frames = [np.random.default_rng(n).integers(0, 256, (2, 4, 6, 3), dtype=np.uint8) for n in range(3)]
    data_path = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    video_path = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    features = {
        "observation.images.top": {"dtype": "video", "shape": [4, 6, 3]},
        "observation.state": {"dtype": "float32", "shape": [2]},
        "action": {"dtype": "float32", "shape": [2]},
    }
    info = {"codebase_version": "v2.1", "fps": 30, "chunks_size": 2, "features": features}
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/info.json").write_text(json.dumps(info | {"data_path": data_path, "video_path": video_path}))
    (tmp_path / "meta/tasks.jsonl").write_text('{"task_index": 0, "task": "stack"}\n')
    lines = [json.dumps({"episode_index": n, "tasks": ["stack"], "length": 2}) for n in range(3)]
    (tmp_path / "meta/episodes.jsonl").write_text("\n".join(lines) + "\n")
    for n, images in enumerate(frames):
        at = {"episode_chunk": n // 2, "episode_index": n}
        video = tmp_path / video_path.format(**at, video_key="observation.images.top")
        video.parent.mkdir(parents=True, exist_ok=True)
        encoder = VideoEncoder(video, 4, 6, 30, 0)
        encoder.add(images)
        encoder.close()
        path = tmp_path / data_path.format(**at)
        path.parent.mkdir(parents=True, exist_ok=True)
        numbers = [[float(n), 0.0], [float(n), 1.0]]
        columns = {"action": numbers, "observation.state": numbers, "episode_index": [n] * 2}
        pq.write_table(pa.table(columns | {"frame_index": [0, 1], "task_index": [0, 0]}), path)
    demos = load_demos(tmp_path)
    np.testing.assert_array_equal(demos.images[:, 0], np.concatenate(frames))
    np.testing.assert_array_equal(demos.actions, [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]])
    np.testing.assert_array_equal(demos.state, demos.actions)
    assert demos.said(demos.last) == ["stack"] * 6


def test_the_raw_format_leaves_nothing_when_aborted(tmp_path: Path) -> None:
    writer = RawWriter(tmp_path / "raw", shard_episodes=1)
    writer.add(episode(0, 3))
    assert list((tmp_path / ".raw.partial").iterdir())
    writer.abort()
    assert not list(tmp_path.iterdir())
