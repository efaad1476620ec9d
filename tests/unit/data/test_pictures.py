"""Pictures in memory or on disk: the same rows, within a limit."""

import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import lerobot_files
import numpy as np
import pytest
from expect import raises_code
from numpy.typing import NDArray

from embodrl.config.schema import SftConfig
from embodrl.data import pictures
from embodrl.data.demos import DemoEpisode
from embodrl.data.imitation import FrameBatches
from embodrl.data.lerobot_writer import LeRobotWriter
from embodrl.data.load import load_demos
from embodrl.data.pictures import PictureStore, Place, Shape
from embodrl.data.raw import RawWriter
from embodrl.errors import EmbodrlError

KILOBYTE = 1e-6
"""In GB."""


def on_disk(directory: Path) -> PictureStore:
    """Return a store in which nothing fits in memory."""
    directory.mkdir(exist_ok=True)
    return PictureStore(1e-9, directory, lambda line: None)


def test_pictures_beyond_the_limit_are_on_disk_and_leave_nothing_there(tmp_path: Path) -> None:
    lines: list[str] = []
    store = PictureStore(KILOBYTE, tmp_path, lines.append)
    first, second, third = (store.place("data", (number, 1, 10, 10, 3)) for number in (2, 2, 1))
    assert (store.limit, store.held, store.on_disk) == (1000, 900, 600)
    assert "2 frames in data at 10 x 10 take 6e-07 GB, held in memory: 1e-06 GB are allowed" in lines[0]
    assert f"held on disk in {tmp_path}: 1e-06 GB are allowed (sft.memory_gb), 6e-07 GB are used" in lines[1]
    assert "held in memory" in lines[2]
    for images in (first, second, third):
        assert images.shape[1:] == (1, 10, 10, 3) and not images.any()
    second[[1, 0]] = np.arange(600, dtype=np.uint64).astype(np.uint8).reshape(2, 1, 10, 10, 3)
    np.testing.assert_array_equal(second[1].ravel()[:300], np.arange(300) % 256)
    assert not list(tmp_path.iterdir())


def test_the_limit_is_a_part_of_the_free_memory_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    store = PictureStore(None, tmp_path, lambda line: None)
    assert store.limit == 700
    store.place("data", (2, 1, 10, 10, 3))
    store.place("data", (1, 1, 10, 10, 3))
    assert (store.held, store.on_disk) == (600, 300)
    with raises_code("dataset-too-large", EmbodrlError, "memory_gb"):  # more than there is
        PictureStore(1.0, tmp_path, lambda line: None).place("data", (3, 1, 10, 10, 3))


def test_a_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    store = on_disk(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(pictures.shutil, "disk_usage", lambda path: SimpleNamespace(free=660))
        with raises_code("dataset-too-large", EmbodrlError, f"the disk of {tmp_path} has 6.6e-07 GB free"):
            store.place("data", (2, 1, 10, 10, 3))
    monkeypatch.setattr(pictures.os, "posix_fallocate", refuse)
    with raises_code("dataset-too-large", EmbodrlError, "No space left on device"):
        store.place("data", (2, 1, 10, 10, 3))
    assert store.on_disk == 0 and not list(tmp_path.iterdir())


def episode(number: int, length: int, side: int = 16) -> DemoEpisode:
    rng = np.random.default_rng(number)
    images = rng.integers(0, 256, (length, 2, side, side, 3), dtype=np.uint8)
    actions = rng.normal(size=(length, 2)).astype(np.float32)
    return DemoEpisode(images, actions, actions, f"do {number}", "task", number, True)


def write_raw(directory: Path, length: int = 5, side: int = 16) -> None:
    with RawWriter(directory, 2) as writer:
        for number in range(5):
            writer.add(episode(number, length, side))
        writer.close({})


def write_lerobot(directory: Path, length: int = 5, side: int = 16) -> None:
    with LeRobotWriter(directory, ["front", "wrist"], 20, 0, "toy") as writer:
        for number in range(5):
            writer.add(episode(number, length, side))
        writer.close({})


def write_v2(directory: Path) -> None:
    lerobot_files.build(directory, version="v2.1", cameras=("top", "wrist"))


@pytest.mark.parametrize("write", [write_raw, write_lerobot, write_v2])
def test_batches_are_those_of_pictures_in_memory(write: Callable[[Path], None], tmp_path: Path) -> None:
    data = tmp_path / "data"
    write(data)
    store = on_disk(tmp_path / "run")
    held, streamed = load_demos(data), load_demos(data, place=store.place)
    assert store.held == 0 and store.on_disk == held.images.nbytes
    assert held.checksum == streamed.checksum
    settings = SftConfig(batch_size=7, random_shift_px=2)
    first, second = (FrameBatches(demos.split(2)[0], settings, 2, seed=3) for demos in (held, streamed))
    for _ in range(6):
        (seen, actions, inside), (found, others, mask) = first.next(), second.next()
        np.testing.assert_array_equal(seen.images, found.images)
        assert actions.equal(others) and inside.equal(mask) and seen.instruction == found.instruction
    np.testing.assert_array_equal(held.split(2)[1].images, streamed.split(2)[1].images)


@pytest.mark.parametrize("write", [write_raw, write_lerobot])
def test_pictures_on_disk_take_no_memory(write: Callable[..., None], tmp_path: Path) -> None:
    """Arrays of numpy and frames from a decoder are counted by tracemalloc; mapped files are not."""
    data = tmp_path / "data"
    write(data, 40, 96)
    for name in ("checksums.json", "meta/stats.json"):  # a JSON file is read into a buffer larger than this dataset
        (data / name).unlink(missing_ok=True)
    limit = 2_000_000
    store = PictureStore(limit / pictures.GB, tmp_path, lambda line: None)
    size = load_demos(data).images.nbytes  # imports what a decoder needs, too
    assert size == 5 * 40 * 2 * 96 * 96 * 3 > 5 * limit
    peaks: list[int] = []
    for place in (pictures.in_memory, store.place):

        def placed(source: object, shape: Shape, place: Place = place) -> NDArray[np.uint8]:
            images = place(source, shape)
            tracemalloc.reset_peak()
            return images

        tracemalloc.start()
        try:
            batches = FrameBatches(load_demos(data, place=placed), SftConfig(batch_size=8), 1, seed=0)
            for _ in range(30):  # more than an epoch
                batches.next()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[0] > size, "the measure sees pictures in memory"
    assert peaks[1] < limit + size // 5, "besides one episode in transit"
    assert store.held == 0 and store.on_disk == size


def test_a_damaged_video_is_named_before_training(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_v2(data)
    video = sorted(data.glob("videos/**/*.mp4"))[-1]
    content = video.read_bytes()
    for wrong in (b"x", content[: len(content) // 2]):
        video.write_bytes(wrong)
        with raises_code("file-damaged", EmbodrlError, str(video)):
            load_demos(data, place=on_disk(tmp_path / "run").place)
    video.write_bytes(content)
    shutil.copyfile(sorted(data.glob("videos/**/*.mp4"))[0], video)
    assert load_demos(data, place=on_disk(tmp_path / "run").place).num_episodes == 2
