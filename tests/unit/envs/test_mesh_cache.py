"""Meshes on disk: by content, whole or not at all, from any number of processes."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from embodrl.envs import mesh_cache
from embodrl.envs.mesh_cache import cache_directory, cached

INPUT = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(mesh_cache, "_in_process", {})
    return tmp_path / "embodrl" / "meshes"


def forget() -> None:
    mesh_cache._in_process.clear()


def double(calls: list[int]) -> tuple[np.ndarray, ...]:
    calls.append(1)
    return INPUT * 2, np.zeros((0, 2), np.float32)


def test_what_was_computed_is_read_back_bit_exactly(directory: Path) -> None:
    calls: list[int] = []
    for _ in range(2):
        points, empty = cached("a", (INPUT,), lambda: double(calls))
        np.testing.assert_array_equal(points, INPUT * 2)
        assert points.dtype == np.float32 and empty.shape == (0, 2)
        forget()
    assert len(calls) == 1 and cache_directory() == directory
    assert [path.suffix for path in directory.iterdir()] == [".mesh"]


@pytest.mark.parametrize(
    ("algorithm", "inputs"),
    [
        ("b", (INPUT,)),
        ("a", (INPUT + 1,)),
        ("a", (INPUT.reshape(3, 4),)),
        ("a", (INPUT.astype(np.float64),)),
        ("a", (INPUT, INPUT)),
    ],
)
def test_everything_that_matters_is_in_the_key(algorithm: str, inputs: tuple[np.ndarray, ...]) -> None:
    calls: list[int] = []
    cached("a", (INPUT,), lambda: double(calls))
    cached(algorithm, inputs, lambda: double(calls))
    assert len(calls) == 2


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "header"])
def test_a_damaged_file_is_replaced(damage: str, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    cached("a", (INPUT,), lambda: double([]))
    (path,) = directory.iterdir()
    whole = path.read_bytes()
    flip = {"flipped": -1, "header": 0}.get(damage, 0)
    flipped = bytearray(whole)
    flipped[flip] ^= 4
    path.write_bytes({"truncated": whole[:50], "empty": b""}.get(damage, bytes(flipped)))
    forget()
    calls: list[int] = []
    np.testing.assert_array_equal(cached("a", (INPUT,), lambda: double(calls))[0], INPUT * 2)
    assert calls and "damaged" in caplog.text and path.read_bytes() == whole


def test_where_nothing_can_be_kept_the_mesh_is_as_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    np.testing.assert_array_equal(cached("a", (INPUT,), lambda: double([]))[0], INPUT * 2)
    assert "can't be cached" in caplog.text


def _work(number: int, folder: str, barrier: object) -> None:
    import os

    os.environ["XDG_CACHE_HOME"] = folder
    barrier.wait()  # type: ignore[attr-defined]
    for round_ in range(50):
        mesh_cache._in_process.clear()
        expected = np.full((2000, 3), round_, np.float64)
        found = cached("a", (np.array([round_]),), lambda expected=expected: (expected,))
        assert (found[0] == expected).all(), number


def test_processes_that_write_at_the_same_time_leave_whole_files(tmp_path: Path, directory: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    workers = [context.Process(target=_work, args=(number, str(tmp_path), barrier)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(list(directory.iterdir())) == 50
    for round_ in range(50):
        forget()
        found = cached("a", (np.array([round_]),), lambda: pytest.fail("it should be there"))
        assert (found[0] == round_).all()
