"""Files and directories appear complete or not at all, with the modes of the umask."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from embodrl.errors import OutputError
from embodrl.storage.atomic import atomic_directory, atomic_file, output_error, publish_directory
from embodrl.storage.files import write_safetensors


@pytest.fixture(params=[0o022, 0o002, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_modes_follow_the_umask(umask: int, tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "policy") as staging:
        write_safetensors(staging / "model.safetensors", {"w": torch.ones(2)}, {"format": "pt"})
    assert mode(tmp_path / "policy" / "model.safetensors") == 0o666 & ~umask
    assert mode(tmp_path / "policy") == 0o777 & ~umask
    with atomic_file(tmp_path / "batch.safetensors") as partial:
        write_safetensors(partial, {"w": torch.ones(2)})
    assert mode(tmp_path / "batch.safetensors") == 0o666 & ~umask


def test_tensors_that_share_memory_come_back(tmp_path: Path) -> None:
    one = torch.arange(6.0).reshape(2, 3)
    write_safetensors(tmp_path / "x.safetensors", {"a": one, "b": one.T, "c": one[1:]})
    found = load_file(tmp_path / "x.safetensors")
    assert found["b"].equal(one.T) and found["c"].tolist() == [[3, 4, 5]] and found["a"].equal(one)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("no JSON"), KeyboardInterrupt()])
def test_an_error_leaves_what_was_there(error: BaseException, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "old").write_text("old")
    expected = OutputError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as raised, atomic_file(tmp_path / "file") as partial:
        partial.write_text("new")
        raise error
    with pytest.raises(expected), atomic_directory(tmp_path / "directory") as staging:
        (staging / "new").write_text("new")
        raise error
    if isinstance(raised.value, OutputError):
        assert "No space left on device" in raised.value.message and "iB free)" in raised.value.message
        assert raised.value.hint.startswith("free disk space, or")
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["directory", "directory/old", "file"] and (tmp_path / "file").read_text() == "old"


def replace_killed_at(kill_at: int, target: Path) -> None:
    """Replace a directory in a child that is killed at its n-th file-system change of publishing."""
    child = os.fork()
    if child == 0:
        calls = 0

        def counted(original: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **kwargs: object) -> object:
                nonlocal calls
                calls += 1
                if calls == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            return call

        try:
            with atomic_directory(target) as staging:
                (staging / "new").write_text("")
                for name in ("rename", "fsync", "unlink", "rmdir"):
                    setattr(os, name, counted(getattr(os, name)))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


def test_a_killed_writer_never_leaves_a_mixture(tmp_path: Path) -> None:
    for kill_at in range(1, 9):  # two syncs, an unlink, two renames, a sync, and the removal of the old one
        target = tmp_path / str(kill_at) / "policy"
        target.mkdir(parents=True)
        (target / "old").write_text("")
        replace_killed_at(kill_at, target)
        if target.exists():
            assert [path.name for path in target.iterdir()] in (["old"], ["new"])
        else:  # between the two renames: the next writer finds the old one again, even if it fails itself
            with pytest.raises(ValueError, match="fails"), atomic_directory(target):
                raise ValueError("fails")
            assert [path.name for path in target.iterdir()] == ["old"]
        with atomic_directory(target) as staging:
            (staging / "newest").write_text("")
        assert [path.name for path in target.iterdir()] == ["newest"]
        assert [path.name for path in target.parent.iterdir()] == ["policy"]


def test_everything_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("fsync", "rename", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, _n=name, _o=original: (calls.append(_n), _o(*args))[1])
    with atomic_directory(tmp_path / "d") as staging:
        (staging / "sub").mkdir()
        for path in (staging / "a", staging / "sub" / "b"):
            path.write_text("x")
    assert calls == ["fsync"] * 4 + ["rename", "fsync"]
    calls.clear()
    with atomic_file(tmp_path / "f") as partial:
        partial.write_text("x")
    assert calls == ["fsync", "replace", "fsync"]


def test_a_directory_that_reads_back_differently_is_withdrawn(tmp_path: Path) -> None:
    for name in ("target", "staging"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    with pytest.raises(OSError, match="reads back differently: torn"):
        publish_directory(tmp_path / "staging", tmp_path / "target", find_problem=lambda _: "torn")
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["target"]


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (28, "free disk space"),
        (122, "quota"),
        (30, "read-only"),
        (13, "permission"),
        (5, "I/O errors"),
        (2, "no new files"),
    ],
)
def test_the_hint_fits_the_cause(number: int, hint: str, tmp_path: Path) -> None:
    error = output_error("x can't be written", tmp_path / "a" / "b", OSError(number, os.strerror(number)), "move")
    assert hint in error.hint and error.hint.endswith("move") and os.strerror(number) in error.message
    assert ("free)" in error.message) == (number in (28, 122))  # elsewhere space is not what is missing


def test_a_place_that_takes_no_files_is_not_called_full() -> None:
    """On Linux's process table, which has no space at all, the mode would allow the superuser to write."""
    with pytest.raises(OutputError) as raised, atomic_directory(Path("/proc/embodrl-x")):
        pass
    text = raised.value.message + raised.value.hint
    assert "free" not in text and "/proc/embodrl-x can't be written" in text and "choose a writable directory" in text


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    """The nested staging directories are those of earlier versions."""
    for name in (".policy.partial", "..policy.partial.partial", "..policy.partial.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x")
    (tmp_path / "..policy_best.partial.partial").mkdir()
    with atomic_directory(tmp_path / "policy") as staging:
        (staging / "new").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["..policy_best.partial.partial", "policy"]
