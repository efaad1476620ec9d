"""Checkpoints while the process is killed, the disk fills up, and bytes rot."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from expect import raises_code

from embodrl.errors import OutputError
from embodrl.storage.checkpoint import Checkpoint, CheckpointManager, preflight
from embodrl.storage.files import write_file

FS_CALLS = ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir")


def content(tag: int) -> dict[str, Any]:
    return {
        "tensors": {
            "policy": {"weight": torch.full((7,), float(tag))},
            "optimizer": {"step.weight": torch.tensor(tag)},
        },
        "state": {"tag": tag},
        "blobs": {"env": bytes([tag]) * 11},
        "write_shards": lambda directory: write_shard(directory, tag),
    }


def write_shard(directory: Path, tag: int) -> dict[str, dict[str, Any]]:
    """Write what a training process would."""
    (directory / "optimizer").mkdir()
    data = bytes([tag]) * 13
    num_bytes = write_file(directory / "optimizer" / "shard", iter([data]))
    return {"optimizer/shard": {"num_bytes": num_bytes, "sha256": hashlib.sha256(data).hexdigest()}}


def tag_of(checkpoint: Checkpoint | None) -> int:
    """The tag of a checkpoint, after checking that all its parts have the same one."""
    assert checkpoint is not None
    tag = checkpoint.state.integer("tag")
    assert checkpoint.tensors("policy")["weight"].tolist() == [tag] * 7
    assert checkpoint.tensors("optimizer")["step.weight"].item() == tag
    assert checkpoint.blob("env") == bytes([tag]) * 11
    assert (checkpoint.path / "optimizer" / "shard").read_bytes() == bytes([tag]) * 13
    return tag


def intercept_fs(before: Callable[[str, tuple[Any, ...]], None], setattr_: Callable[..., None]) -> None:
    """Run ``before`` ahead of every call that changes the file system."""
    for name in FS_CALLS:
        original = getattr(os, name)

        def call(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            before(_name, args)
            return _original(*args, **kwargs)

        setattr_(os, name, call)


def save_in_child(directory: Path, step: int, tag: int, keep_last_n: int, kill_at: int | None) -> int | None:
    """Save in a forked process, killed at a file-system call; return how many calls there were, None if killed."""
    reader, writer = os.pipe()
    raw_write = os.write
    child = os.fork()
    if child == 0:
        status = 1
        try:
            calls = 0

            def before(name: str, args: tuple[Any, ...]) -> None:
                nonlocal calls
                calls += 1
                if calls == kill_at:
                    if name == "write":
                        raw_write(args[0], bytes(args[1][: len(args[1]) // 2]))
                    os.kill(os.getpid(), signal.SIGKILL)

            intercept_fs(before, setattr)
            CheckpointManager(directory, keep_last_n).save(step, **content(tag))
            raw_write(writer, str(calls).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if kill_at is not None and not answer:
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        return None
    assert os.waitstatus_to_exitcode(status) == 0
    return int(answer)


@pytest.mark.parametrize(
    ("step", "keep_last_n"),
    [
        pytest.param(2, 1, id="prune"),
        pytest.param(2, 2, id="keep", marks=pytest.mark.long),
        pytest.param(1, 1, id="replace", marks=pytest.mark.long),
    ],
)
def test_killed_at_every_file_system_call_of_a_save(tmp_path: Path, step: int, keep_last_n: int) -> None:
    rehearsal = tmp_path / "rehearsal"
    CheckpointManager(rehearsal, keep_last_n).save(1, **content(1))
    calls = save_in_child(rehearsal, step, 2, keep_last_n, kill_at=None)
    assert calls is not None and calls >= 25
    survivors: list[int] = []
    for kill_at in range(1, calls + 1):
        directory = tmp_path / str(kill_at)
        CheckpointManager(directory, keep_last_n).save(1, **content(1))
        assert save_in_child(directory, step, 2, keep_last_n, kill_at) is None
        manager = CheckpointManager(directory, keep_last_n)
        checkpoint, problems = manager.latest_good()
        assert problems == [], kill_at
        survivors.append(tag_of(checkpoint))
        assert all(path.name.startswith("step_") for path in (directory / "checkpoints").iterdir())
        manager.save(3, **content(3))
        assert tag_of(manager.latest_good()[0]) == 3
    # Once the new one is there it stays there.
    assert survivors == sorted(survivors) and set(survivors) == {1, 2}


def test_everything_is_synced_before_it_becomes_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoints").mkdir()
    calls: list[str] = []
    intercept_fs(lambda name, _args: calls.append(name), monkeypatch.setattr)
    path = CheckpointManager(tmp_path, 1).save(1, **content(1))
    monkeypatch.undo()
    made_visible = calls.index("rename")
    num_entries = len(list(path.rglob("*")))
    assert num_entries == 7  # with the directory of shards
    assert calls[:made_visible].count("fsync") == num_entries + 1  # and their own directory
    assert "fsync" in calls[made_visible:]  # the directory that holds the name


def test_a_flipped_bit_anywhere_is_detected_and_the_one_before_used(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, 2)
    manager.save(1, **content(1))
    newest = manager.save(2, **content(2))
    flips = 0
    for path in sorted(p for p in newest.rglob("*") if p.is_file()):
        intact = path.read_bytes()
        for index in range(0, len(intact), 5):
            damaged = bytearray(intact)
            damaged[index] ^= 1 << (flips % 8)
            path.write_bytes(damaged)
            checkpoint, problems = CheckpointManager(tmp_path, 2).latest_good()
            assert tag_of(checkpoint) == 1, (path.name, index)
            assert len(problems) == 1 and "step_2" in problems[0]
            flips += 1
        path.write_bytes(intact)
    assert flips > 150
    assert tag_of(CheckpointManager(tmp_path, 2).latest_good()[0]) == 2


@pytest.mark.parametrize(
    "damage",
    [
        "truncated",
        "longer",
        "missing",
        "empty manifest",
        "no manifest",
        "list manifest",
        "missing shard",
        "stray shard",
    ],
)
def test_torn_checkpoints_are_detected_and_named(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    manager = CheckpointManager(tmp_path, 3)
    manager.save(1, **content(1))
    newest = manager.save(2, **content(2))
    weights, manifest = newest / "policy.safetensors", newest / "manifest.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "longer":
        weights.write_bytes(weights.read_bytes() + b"\0")
    elif damage == "missing":
        weights.unlink()
    elif damage == "empty manifest":
        manifest.write_bytes(b"")
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "missing shard":
        (newest / "optimizer" / "shard").unlink()
    elif damage == "stray shard":
        (newest / "optimizer" / "stray_shard").write_bytes(b"?")
    else:
        manifest.write_text("[]")
    checkpoint, problems = manager.latest_good()
    assert tag_of(checkpoint) == 1
    assert len(problems) == 1
    assert "manifest" in damage or ("shard" if "shard" in damage else "policy.safetensors") in problems[0]
    assert str(newest) in caplog.text


def test_retention_does_not_count_damaged_checkpoints(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, 2)
    for step in (1, 2):
        manager.save(step, **content(step))
    (tmp_path / "checkpoints/step_2/state.json").write_text("{}")
    resumed = CheckpointManager(tmp_path, 2)
    assert tag_of(resumed.latest_good()[0]) == 1
    resumed.save(3, **content(3))
    # step_2 is gone and step_1, good, takes its place among the two kept
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_1", "step_3"}


def test_when_all_are_damaged_all_are_reported(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, 2)
    for step in (1, 2):
        (manager.save(step, **content(step)) / "env.bin").write_bytes(b"?")
    checkpoint, problems = manager.latest_good()
    assert checkpoint is None and len(problems) == 2


@pytest.mark.parametrize(
    ("call", "number", "hint"),
    [
        ("write", errno.ENOSPC, "free disk space"),
        ("fsync", errno.EIO, "disk reports I/O errors"),
        ("rename", errno.EROFS, ""),
    ],
)
@pytest.mark.parametrize("step", [2, 1])
def test_an_error_at_any_call_keeps_the_old_checkpoint(
    tmp_path: Path, call: str, number: int, hint: str, step: int
) -> None:
    manager = CheckpointManager(tmp_path, 2)
    manager.save(1, **content(1))
    failures = 0
    for fail_at in range(1, 50):
        count = 0

        def before(name: str, _args: tuple[Any, ...], fail_at: int = fail_at) -> None:
            nonlocal count
            count += name == call
            if name == call and count == fail_at:
                raise OSError(number, os.strerror(number))

        with pytest.MonkeyPatch.context() as patch:
            intercept_fs(before, patch.setattr)
            try:
                manager.save(step, **content(2))
            except OutputError as error:
                failures += 1
                assert (" free)" in error.message) == (number == errno.ENOSPC) and hint in error.hint
            else:
                break
        assert not list((tmp_path / "checkpoints").glob(".staging_*"))
        kept, problems = CheckpointManager(tmp_path, 2).latest_good()
        assert problems == []
        if call == "fsync" and tag_of(kept) == 2:
            continue  # the rename was done and only its sync failed: the new one is whole
        assert tag_of(kept) == 1
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]
    assert failures >= 1
    assert tag_of(manager.latest_good()[0]) == 2


def test_writes_that_take_only_a_part_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: original(descriptor, bytes(data[:3])))
    manager = CheckpointManager(tmp_path, 1)
    manager.save(1, **content(1))
    monkeypatch.undo()
    assert tag_of(manager.latest_good()[0]) == 1


def test_a_disk_that_returns_other_bytes_is_noticed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(tmp_path, 1)
    manager.save(1, **content(1))
    original = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: original(descriptor, bytes(len(data))))
    with raises_code("output", OutputError):
        manager.save(2, **content(2))
    monkeypatch.undo()
    assert tag_of(manager.latest_good()[0]) == 1


@pytest.fixture
def mount_tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a file system of its own, with options; skips where that is not allowed."""
    target = tmp_path / "mount"
    target.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(target)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"tmpfs can't be mounted: {done.stderr.strip()}")
        return target

    yield mount
    subprocess.run(["umount", str(target)], capture_output=True, check=False)


def test_a_disk_that_is_really_full(mount_tmpfs: Callable[[str], Path]) -> None:
    directory = mount_tmpfs("size=512k")
    manager = CheckpointManager(directory, 1)
    manager.save(1, **content(1))
    big = content(2)
    big["tensors"]["policy"]["big"] = torch.zeros(1 << 18)
    with raises_code("output", OutputError):
        manager.save(2, **big)
    assert tag_of(manager.latest_good()[0]) == 1
    manager.save(2, **content(2))
    assert tag_of(manager.latest_good()[0]) == 2
    with raises_code("disk-space", OutputError):
        preflight(directory, 1 << 20)


def test_a_disk_that_is_really_read_only(mount_tmpfs: Callable[[str], Path]) -> None:
    directory = mount_tmpfs("size=512k,ro")
    with raises_code("output", OutputError) as caught:
        preflight(directory, 0)
    assert "runner.output_dir" in caught.value.hint
    with raises_code("output", OutputError):
        CheckpointManager(directory, 1).save(1, **content(1))
