"""LeRobot datasets of other software: what they say about themselves is used, honoured, or refused by name."""

import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from expect import raises_code

pytest.importorskip("pyarrow")
pytest.importorskip("imageio_ffmpeg")
pytest.importorskip("PIL")

from lerobot_files import FPS, KEY, LENGTH, build, columns_of, pictures, put_table
from PIL import EpsImagePlugin, Image

from embodrl.data.facts import read_facts
from embodrl.data.imitation import load_configured_demos
from embodrl.data.lerobot_episodes import Located, of_the_train_split
from embodrl.data.lerobot_info import read_info
from embodrl.data.load import load_demos
from embodrl.learners.imitation_policy import check_instructions
from embodrl.pipelines.load import load_config
from embodrl.workers.policy import build_policy

REAL = Path(__file__).resolve().parents[4] / "shared/real_fixtures/gr1_picknplace"
WANTED = np.concatenate([pictures(0), pictures(1)])


def seen(root: Path, **options: object) -> np.ndarray:
    return load_demos(root, **options).images[:, 0]  # pyright: ignore[reportArgumentType]


# -- frames by their times ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_frames_are_those_of_the_rows_times_whatever_the_rate_of_the_file(tmp_path: Path, version: str) -> None:
    build(tmp_path, version=version, shoot=lambda e: (np.repeat(pictures(e), 3, axis=0), 30))
    np.testing.assert_array_equal(seen(tmp_path), WANTED)
    np.testing.assert_array_equal(seen(tmp_path, max_episodes=1), pictures(0))


def test_without_timestamps_the_times_are_those_of_frame_index(tmp_path: Path) -> None:
    build(tmp_path, columns=lambda c: c.pop("timestamp"), shoot=lambda e: (np.repeat(pictures(e), 2, axis=0), 20))
    np.testing.assert_array_equal(seen(tmp_path), WANTED)


def test_a_frame_a_row_fits_whenever_the_clock_was_started(tmp_path: Path) -> None:
    build(tmp_path, columns=lambda c: c.update(timestamp=c["timestamp"] + np.float32(1 / FPS)))
    np.testing.assert_array_equal(seen(tmp_path), WANTED)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_row_without_a_frame_at_its_time_is_refused(tmp_path: Path, version: str) -> None:
    build(tmp_path, version=version, shoot=lambda e: (np.repeat(pictures(e), 3, axis=0), 29))
    with raises_code("dataset-frame-times") as refused:
        load_demos(tmp_path)
    assert "episode 0, frame" in refused.value.message


def test_times_that_go_back_are_refused(tmp_path: Path) -> None:
    build(tmp_path, columns=lambda c: c.update(timestamp=c["timestamp"][::-1].copy()))
    with raises_code("dataset-frame-times") as refused:
        load_demos(tmp_path)
    assert "episode 0, frame 1 is 1.0000 s, and 1.1000 s" in refused.value.message


def test_a_file_that_lacks_the_frames_of_an_episode_does_not_show_another_one(tmp_path: Path) -> None:
    def shoot(episode: int) -> tuple[np.ndarray, float]:
        return (pictures(0), FPS) if episode == 0 else (pictures(1)[:0], FPS)

    build(tmp_path, version="v3.0", shoot=shoot, info=lambda i: i.update(splits={"train": "1:2"}))
    with raises_code("file-damaged"):
        load_demos(tmp_path)


def test_milliseconds_are_no_damage(tmp_path: Path) -> None:
    def in_milliseconds(columns: dict[str, np.ndarray]) -> None:
        columns["timestamp"] = (columns["timestamp"] * 1000).astype(np.int64)

    build(tmp_path, columns=in_milliseconds)
    with raises_code("dataset-frame-times"):
        load_demos(tmp_path)


def test_a_time_that_is_no_number_is_refused(tmp_path: Path) -> None:
    def unknown(columns: dict[str, np.ndarray]) -> None:
        columns["timestamp"] = columns["timestamp"].copy()
        columns["timestamp"][5] = np.nan

    build(tmp_path, columns=unknown)
    with raises_code("dataset-frame-times") as refused:
        load_demos(tmp_path)
    assert "episode 0, frame 5" in refused.value.message


def test_two_rows_with_one_frame_are_refused(tmp_path: Path) -> None:
    build(tmp_path, version="v3.0", episodes=lambda c: c.update({f"videos/{KEY}top/from_timestamp": [0.0, 0.0]}))
    with raises_code("dataset-frame-times") as refused:
        load_demos(tmp_path)
    assert "episode 0, frame 0 and episode 1, frame 0" in refused.value.message


def test_frames_after_the_last_row_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(tmp_path, shoot=lambda e: (np.concatenate([pictures(e), pictures(e)[:4]]), 10))
    np.testing.assert_array_equal(seen(tmp_path), WANTED)
    assert "2 video files have frames after the last row" in caplog.text and "episode_000000.mp4 (4)" in caplog.text


def since_1970(columns: dict[str, np.ndarray]) -> None:
    begun_s = 1.7e9 + 100 * int(columns["episode_index"][0])
    columns["timestamp"] = begun_s + np.asarray(columns["timestamp"], np.float64)


def as_timestamps(columns: dict[str, np.ndarray]) -> None:
    since_1970(columns)
    columns["timestamp"] = (columns["timestamp"] * 1e6).round().astype("datetime64[us]")


@pytest.mark.parametrize("version", [pytest.param("v2.1", marks=pytest.mark.long), "v3.0"])
@pytest.mark.parametrize("clock", [since_1970, as_timestamps])
@pytest.mark.parametrize("frames", [1, 3])
def test_seconds_since_1970_are_counted_from_the_episode_s_first_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: str, clock: Callable[..., None], frames: int
) -> None:
    build(
        tmp_path, version=version, columns=clock, shoot=lambda e: (np.repeat(pictures(e), frames, axis=0), FPS * frames)
    )
    np.testing.assert_array_equal(seen(tmp_path), WANTED)
    np.testing.assert_array_equal(seen(tmp_path, max_episodes=1), pictures(0))
    assert ("timestamp of 2 episodes comes from a clock" in caplog.text) == (clock is since_1970)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize("unit", [np.float32, np.int64])
def test_clocks_that_do_not_resolve_frames_are_refused(tmp_path: Path, version: str, unit: type) -> None:
    build(tmp_path, version=version, columns=lambda c: c.update(timestamp=(1.7e9 + c["timestamp"]).astype(unit)))
    with raises_code("dataset-frame-times"):
        load_demos(tmp_path)


def test_times_at_which_the_file_shows_another_episode_are_refused(tmp_path: Path) -> None:
    def late(columns: dict[str, np.ndarray]) -> None:
        columns["timestamp"] = columns["timestamp"] + 0.2 * (columns["episode_index"][0] == 0)

    ends = {f"videos/{KEY}top/to_timestamp": [LENGTH / FPS, 2 * LENGTH / FPS]}
    build(tmp_path, version="v3.0", columns=late, episodes=lambda c: c.update(ends))
    with raises_code("dataset-frame-times") as refused:
        load_demos(tmp_path, max_episodes=1)
    assert "episode 0, frame 11 is 1.3000 s, but its images end at 1.2000 s" in refused.value.message


@pytest.mark.parametrize("end", [None, 99.0])
@pytest.mark.parametrize(
    ("shifts", "split", "named"),
    [
        ((0.0, -0.3), "1:2", "episode 1, frame 0"),
        ((0.0, -0.3), "0:2", "episode 1, frame 0"),
        ((0.1, 0.0), "0:1", "episode 0, frame 11"),
        ((1.2, -1.2), "0:2", "episode 0, frame 11"),
    ],
)
def test_the_pictures_of_the_episodes_beside_it_in_the_file_are_never_shown(
    tmp_path: Path, end: float | None, shifts: tuple[float, float], split: str, named: str
) -> None:
    build(
        tmp_path,
        version="v3.0",
        columns=lambda c: c.update(timestamp=c["timestamp"] + np.float32(shifts[c["episode_index"][0]])),
        episodes=lambda c: c.update({f"videos/{KEY}top/to_timestamp": [end, end]}),
        info=lambda i: i.update(splits={"train": split}),
    )
    with raises_code("dataset-frame-times") as refused:
        load_demos(tmp_path)
    assert named in refused.value.message


@pytest.mark.parametrize("shift", [-5.0, -0.3, 0.3, 5000.0])
def test_one_offset_of_all_the_rows_of_a_file_is_its_clock_s(tmp_path: Path, shift: float) -> None:
    build(
        tmp_path,
        version="v3.0",
        columns=lambda c: c.update(timestamp=c["timestamp"].astype(np.float64) + shift),
        episodes=lambda c: c.update({f"videos/{KEY}top/to_timestamp": [LENGTH / FPS, 2 * LENGTH / FPS]}),
    )
    np.testing.assert_array_equal(seen(tmp_path), WANTED)


@pytest.mark.parametrize("stated", [None, 0.4, LENGTH / FPS])
def test_a_stale_end_of_the_pictures_refuses_nothing(tmp_path: Path, stated: float | None) -> None:
    ends = {f"videos/{KEY}top/to_timestamp": [stated, stated]}
    build(tmp_path, version="v3.0", episodes=lambda c: c.update(ends))
    np.testing.assert_array_equal(seen(tmp_path, max_episodes=1), pictures(0))
    np.testing.assert_array_equal(seen(tmp_path), WANTED)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_video_that_names_another_file_is_refused(tmp_path: Path, version: str) -> None:
    build(tmp_path, version=version)
    (video, *_) = sorted(tmp_path.glob("videos/**/*.mp4"))
    video.rename(video.with_name("other.mp4"))
    video.write_text("ffconcat version 1.0\nfile other.mp4\n")
    with raises_code("dataset-video-format"):
        load_demos(tmp_path)


def test_a_picture_starts_no_other_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = io.BytesIO()
    Image.new("RGB", (48, 32)).save(encoded, "EPS")
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started"))
    build(
        tmp_path,
        columns=lambda c: c.update({f"{KEY}top": [{"bytes": encoded.getvalue()}] * LENGTH}),
        info=lambda i: i["features"][f"{KEY}top"].update(dtype="image"),
    )
    with raises_code("file-damaged"):
        load_demos(tmp_path)


# -- metadata that change the meaning -------------------------------------------------------------------------------


def depth_flag(place: str, key: str) -> dict[str, dict[str, bool]]:
    return {place: {key: True}}


@pytest.mark.parametrize(("place", "key"), [("info", "is_depth_map"), ("video_info", "video.is_depth_map")])
def test_depth_is_no_colour(tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str, key: str) -> None:
    build(
        tmp_path, cameras=("top", "depth"), info=lambda i: i["features"][f"{KEY}depth"].update(depth_flag(place, key))
    )
    assert list(read_facts(tmp_path).cameras) == ["top"]
    assert load_demos(tmp_path).images.shape[1] == 1
    assert "camera depth is left out: it holds depth" in caplog.text
    with raises_code("sft-camera-missing") as refused:
        load_demos(tmp_path, cameras=("depth",))
    assert "is_depth_map" in refused.value.message


def test_height_and_width_are_found_by_their_names(tmp_path: Path) -> None:
    named = {"shape": [48, 32, 3], "names": ["width", "height", "channels"]}
    build(tmp_path, info=lambda i: i["features"][f"{KEY}top"].update(named))
    assert read_facts(tmp_path).cameras == {"top": (32, 48)}
    np.testing.assert_array_equal(seen(tmp_path), WANTED)


def test_pictures_that_contradict_their_names_are_refused(tmp_path: Path) -> None:
    build(tmp_path, info=lambda i: i["features"][f"{KEY}top"].update(shape=[48, 32, 3]))
    with raises_code("dataset-picture-size") as refused:
        load_demos(tmp_path)
    assert "32 x 48 (height x width), and 48 x 32" in refused.value.message and "swapped" in refused.value.hint


def test_rotation_in_a_video_is_honoured_or_refused(tmp_path: Path) -> None:
    marked = [pictures(e) for e in range(2)]
    for each in marked:
        each[:, :4] = 255
    build(tmp_path / "turned", shoot=lambda e: (marked[e], 10), rotation=180)
    np.testing.assert_array_equal(seen(tmp_path / "turned"), np.concatenate(marked)[:, ::-1, ::-1])
    build(tmp_path / "lying", rotation=90)
    with raises_code("dataset-picture-size") as refused:
        load_demos(tmp_path / "lying")
    assert "rotated" in refused.value.hint


def test_only_the_train_split_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(tmp_path / "part", info=lambda i: i.update(splits={"train": "1:2", "test": "0:1"}))
    np.testing.assert_array_equal(seen(tmp_path / "part"), pictures(1))
    assert "1 of 2 episodes are left out: they are not in splits.train" in caplog.text
    build(tmp_path / "far", info=lambda i: i.update(splits={"train": "0:100"}))
    assert load_demos(tmp_path / "far").num_episodes == 2
    for name, stated in (("words", "most"), ("none", "2:5")):
        build(tmp_path / name, info=lambda i, stated=stated: i.update(splits={"train": stated}))
        with raises_code("dataset-layout"):
            load_demos(tmp_path / name)


@pytest.mark.parametrize("stated", [["1:2"], ["1:2", "5:9"], [1], "1:"])
def test_a_split_may_be_a_list(tmp_path: Path, stated: object) -> None:
    build(tmp_path, info=lambda i: i.update(splits={"train": stated}))
    np.testing.assert_array_equal(seen(tmp_path), pictures(1))


@pytest.mark.parametrize(
    "splits",
    [{"train": [0, 2]}, {"train": {"from": 0}}, {"train": [0.5]}, {"train": [[0, 1]]}, {"train": True}, ["0:2"]],
)
def test_a_split_that_is_not_understood_is_refused_by_its_name(tmp_path: Path, splits: object) -> None:
    build(tmp_path, info=lambda i: i.update(splits=splits))
    with raises_code("dataset-layout") as refused:
        load_demos(tmp_path)
    assert "splits.train" in refused.value.message


def test_a_long_list_of_episodes_is_read_once(tmp_path: Path) -> None:
    class Ranges(tuple[tuple[int, int], ...]):
        read = 0

        def __iter__(self) -> Iterator[tuple[int, int]]:
            Ranges.read += 1
            return super().__iter__()

    ranges = Ranges([(7, 9), (0, 4), (1, 2), (3, 5), (6, 6), (8, 10)])
    build(tmp_path)
    info = replace(read_info(tmp_path), train=ranges)
    episodes = [Located(number, 1, tmp_path, {}) for number in range(12)]
    kept, _ = of_the_train_split(info, episodes)
    assert [episode.number for episode in kept] == [0, 1, 2, 3, 4, 7, 8, 9]
    assert Ranges.read == 1


def test_episodes_are_told_apart_by_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path)
    monkeypatch.setattr(Located, "__eq__", lambda *_: pytest.fail("each was compared with each"))
    np.testing.assert_array_equal(seen(tmp_path, max_episodes=1), pictures(0))


def test_instructions_may_change_within_an_episode(tmp_path: Path) -> None:
    tasks = ("open the drawer", "put the cup in")
    build(tmp_path, tasks=tasks, columns=lambda c: c.update(task_index=[0] * 6 + [1] * 6))
    assert load_demos(tmp_path).said(slice(None)) == ([tasks[0]] * 6 + [tasks[1]] * 6) * 2


# -- what is not needed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", [("frame_index",), ("frame_index", "index"), ("frame_index", "index", "timestamp")])
def test_frame_index_is_derived(tmp_path: Path, without: tuple[str, ...]) -> None:
    def drop(columns: dict[str, object]) -> None:
        for name in without:
            del columns[name]
        if without == ("frame_index",):  # rows in another order
            columns.update({name: values[::-1] for name, values in columns.items()})  # pyright: ignore

    expected = load_demos(build(tmp_path / "whole"))
    found = load_demos(build(tmp_path / "data", columns=drop))
    np.testing.assert_array_equal(found.actions, expected.actions)
    np.testing.assert_array_equal(found.images, expected.images)


def test_a_set_with_one_task_needs_no_task_index(tmp_path: Path) -> None:
    build(tmp_path / "one", columns=lambda c: c.pop("task_index"))
    assert load_demos(tmp_path / "one").instruction_table == ["pick up the cup"]
    build(tmp_path / "two", tasks=("a", "b"), columns=lambda c: c.pop("task_index"))
    with raises_code("dataset-layout"):
        load_demos(tmp_path / "two")


def declare(info: dict) -> None:
    info["features"][f"{KEY}wrist"] = info["features"][f"{KEY}top"]


def test_a_camera_without_files_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(tmp_path, info=declare)
    assert list(read_facts(tmp_path).cameras) == ["top"]
    assert load_demos(tmp_path).images.shape[1] == 1
    assert "camera wrist is left out: info.json declares it, but it has no file" in caplog.text
    with raises_code("sft-camera-missing"):
        load_demos(tmp_path, cameras=("top", "wrist"))


def test_a_camera_that_lacks_one_file_is_damaged(tmp_path: Path) -> None:
    build(tmp_path, cameras=("top", "wrist"))
    (tmp_path / f"videos/chunk-000/{KEY}wrist/episode_000001.mp4").unlink()
    with raises_code("file-damaged"):
        load_demos(tmp_path)


@pytest.mark.parametrize("stats", ["[]", "{", '{"action": {}}', '{"action": {"min": [NaN], "max": null}}'])
def test_statistics_that_nobody_reads_refuse_nothing(tmp_path: Path, stats: str) -> None:
    build(tmp_path)
    (tmp_path / "meta/stats.json").write_text(stats)
    assert load_demos(tmp_path).num_episodes == 2


def rename(columns: dict) -> None:
    columns["actions"] = columns.pop("action")
    columns["state"] = columns.pop("observation.state")


def rename_features(info: dict) -> None:
    names = {"action": "actions", "observation.state": "state", f"{KEY}top": "image"}
    info["features"] = {names.get(name, name): value for name, value in info["features"].items()}


def move_videos(root: Path) -> Path:
    (root / f"videos/chunk-000/{KEY}top").rename(root / "videos/chunk-000/image")
    return root


KEYS = {"action": "actions", "state": "state", "images.top": "image"}


def test_features_are_mapped_by_keys(tmp_path: Path) -> None:
    expected = load_demos(build(tmp_path / "ours"))
    other = move_videos(build(tmp_path / "theirs", columns=rename, info=rename_features))
    facts = read_facts(other, KEYS)
    assert (list(facts.cameras), facts.action_dim, facts.state_dim) == (["top"], 7, 8)
    found = load_demos(other, cameras=("top",), keys=KEYS)
    for name in ("images", "actions", "state"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert load_demos(other, keys={"action": "actions", "state": "state"}).images.shape[1] == 1
    with raises_code("dataset-no-actions") as refused:
        load_demos(other)
    assert "it has actions, state, image" in refused.value.message
    assert "sft.keys={action: actions, state: state}" in refused.value.hint


def test_keys_of_the_command_line_name_cameras(tmp_path: Path) -> None:
    other = move_videos(build(tmp_path / "theirs", columns=rename, info=rename_features))
    given = "sft.keys={action: actions, state: state, images.top: image}"
    config = load_config(["env=dataset", f"sft.data_dir={other}", given], verb="sft").config
    assert config.sft.keys == KEYS and [camera.name for camera in config.env.cameras] == ["top"]
    assert load_configured_demos(config).state.shape == (24, 8)


TWICE = {"images.a": "image", "images.b": "image"}


@pytest.mark.parametrize("keys", [{"actions": "actions"}, {"action": "acton"}, TWICE])
def test_keys_that_name_nothing_are_refused(tmp_path: Path, keys: dict[str, str]) -> None:
    build(tmp_path, columns=rename, info=rename_features)
    with raises_code("sft-keys"):
        load_demos(tmp_path, keys=keys)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_rows_are_found_in_other_files_than_the_stated_one(tmp_path: Path, version: str) -> None:
    build(tmp_path, version=version)
    if version == "v3.0":
        import pyarrow.parquet as pq

        table = pq.read_table(tmp_path / "data/chunk-000/file-000.parquet")
        pq.write_table(table.slice(0, LENGTH), tmp_path / "data/chunk-000/file-000.parquet")
        pq.write_table(table.slice(LENGTH), tmp_path / "data/chunk-000/file-001.parquet")
    else:
        (tmp_path / "data/chunk-005").mkdir()
        (tmp_path / "data/chunk-000/episode_000001.parquet").rename(tmp_path / "data/chunk-005/episode_000001.parquet")
    demos = load_demos(tmp_path)
    assert demos.num_episodes == 2
    np.testing.assert_array_equal(demos.images[:, 0], WANTED)


def test_whole_floats_are_integers(tmp_path: Path) -> None:
    def floats(columns: dict) -> None:
        columns.update({n: [float(v) for v in values] for n, values in columns.items() if "timestamp" not in n})

    def of_rows(columns: dict) -> None:
        columns.update({n: np.asarray(columns[n], np.float64) for n in ("frame_index", "episode_index", "task_index")})

    build(tmp_path / "data", version="v3.0", episodes=floats, columns=of_rows)
    np.testing.assert_array_equal(seen(tmp_path / "data"), WANTED)
    build(tmp_path / "half", version="v3.0", episodes=lambda c: c.update(length=[12.5, 11.5]))
    with raises_code("file-damaged"):
        load_demos(tmp_path / "half")


def grow(root: Path) -> None:
    """Add rows of a third episode to the file of the second."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = sorted((root / "data").glob("*/*.parquet"))[-1]
    put_table(root / "more.parquet", columns_of(2))
    pq.write_table(pa.concat_tables([pq.read_table(path), pq.read_table(root / "more.parquet")]), path)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_rows_of_episodes_that_are_not_listed_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    grow(build(tmp_path, version=version))
    np.testing.assert_array_equal(seen(tmp_path), WANTED)
    assert "12 rows are left out: meta/episodes does not list their episodes" in caplog.text


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_stale_totals_refuse_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, version: str) -> None:
    build(tmp_path, version=version, info=lambda i: i.update(total_episodes=1, total_frames=LENGTH))
    np.testing.assert_array_equal(seen(tmp_path), WANTED)
    assert "states 1 episodes; meta/episodes has 2, which are read" in caplog.text


def test_more_rows_of_an_episode_than_are_stated_are_no_damage(tmp_path: Path) -> None:
    build(tmp_path)
    rows = {name: [*values, *values[:2]] for name, values in columns_of(1).items()}
    put_table(tmp_path / "data/chunk-000/episode_000001.parquet", rows)
    with raises_code("dataset-layout") as refused:
        load_demos(tmp_path)
    assert "14 rows, and 12 by meta/episodes" in refused.value.message and "damaged" not in refused.value.message


def test_nothing_says_re_collect_of_the_data_of_others(tmp_path: Path) -> None:
    build(tmp_path)
    rows = {name: values[:-1] for name, values in columns_of(1).items()}
    put_table(tmp_path / "data/chunk-000/episode_000001.parquet", rows)
    with raises_code("file-damaged") as refused:
        load_demos(tmp_path)
    assert "collect" not in refused.value.hint


def test_the_demo_set_of_gr00t_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if not REAL.is_dir():
        pytest.skip(f"no {REAL}")
    root = shutil.copytree(REAL, tmp_path / "gr1", copy_function=shutil.copyfile)
    lines = (root / "meta/episodes.jsonl").read_text().splitlines()[:2]
    (root / "meta/episodes.jsonl").write_text("\n".join(lines) + "\n")
    info = json.loads((root / "meta/info.json").read_text()) | {"total_episodes": 2, "total_frames": 416 + 470}
    (root / "meta/info.json").write_text(json.dumps(info))
    demos = load_demos(root, size=(32, 32))
    assert demos.images.shape == (886, 1, 32, 32, 3) and demos.state.shape == demos.actions.shape == (886, 44)
    assert "camera egoview is left out" in caplog.text
    assert all(demos.images[::50].std(axis=(1, 2, 3, 4)) > 5)


def test_instructions_that_do_not_fit_are_refused_before_training(tmp_path: Path) -> None:
    words = " ".join(["move the cup to the left of the plate and then"] * 12)
    tasks = ("pick up the cup", words)
    build(tmp_path / "data", tasks=tasks, columns=lambda c: c.update(task_index=[0] * 11 + [1]))
    arguments = ["env=dataset", "model=smolvla", "model.warm_start=null", f"sft.data_dir={tmp_path / 'data'}"]
    config = load_config(arguments, verb="sft").config
    with raises_code("prompt-too-long") as refused:
        check_instructions(build_policy(config), load_configured_demos(config))
    assert len(refused.value.message) < 300
