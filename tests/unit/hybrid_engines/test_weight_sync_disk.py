"""Weight sync by disk: what a version looks like, what is damaged, and what stays."""

import errno
import json
import os
import shutil
import zlib

import pytest
import torch
from expect import raises_code
from safetensors.torch import load_file
from sync_parts import ADAPTERS, Net, by_disk, same, weights

from embodrl.errors import IncompleteSyncError, WeightChecksumError, WeightSyncError, WeightVersionError
from embodrl.hybrid_engines.weight_sync import disk
from embodrl.hybrid_engines.weight_sync.buckets import unpacked
from embodrl.hybrid_engines.weight_sync.disk import DiskSender


def version_dir(tmp_path, version):
    return tmp_path / f"v{version:06d}"


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def test_a_version_is_safetensors_with_a_manifest(tmp_path):
    sender, _, _ = by_disk(tmp_path)
    sender.send(weights(12), 12)
    path = tmp_path / "v000012"
    manifest = json.loads((path / "manifest.json").read_text())
    stored = {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}
    wanted = dict(weights(12))
    assert stored.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(stored[name], tensor) and stored[name].dtype == tensor.dtype
    files = {file.name: file.read_bytes() for file in path.glob("*.safetensors")}
    assert manifest["files"] == {n: {"num_bytes": len(b), "crc32": zlib.crc32(b)} for n, b in files.items()}
    assert (path / "STABLE").is_file() and len(files) == 5


@pytest.mark.parametrize(
    ("spoil", "error", "names"),
    [
        (
            lambda p: truncate(p / "bucket_00001.safetensors"),
            IncompleteSyncError,
            ["bucket_00001.safetensors"],
        ),
        (
            lambda p: (p / "bucket_00002.safetensors").unlink(),
            IncompleteSyncError,
            ["bucket_00002.safetensors"],
        ),
        (lambda p: flip(p / "bucket_00001.safetensors"), WeightChecksumError, ["bucket_00001.safetensors"]),
        (lambda p: flip(p / "manifest.json", 40), IncompleteSyncError, ["manifest.json", "STABLE"]),
        (lambda p: (p / "manifest.json").unlink(), IncompleteSyncError, ["manifest.json", "No such file"]),
        (lambda p: os.truncate(p / "STABLE", 20), IncompleteSyncError, ["STABLE", "JSON"]),
    ],
)
def test_a_damaged_version_leaves_the_old_one(tmp_path, spoil, error, names):
    sender, receiver, target = by_disk(tmp_path)
    sender.send(weights(0), 0)
    receiver.receive()
    sender.send(weights(1), 1)
    spoil(version_dir(tmp_path, 1))
    for _ in range(2):  # as often as one asks
        with raises_code(error.code, error, *names):
            receiver.receive()
    assert same(target, 0)
    sender.send(weights(2), 2)
    assert receiver.receive().version == 2 and same(target, 2)


def test_what_is_not_marked_stable_is_not_there(tmp_path):
    sender, receiver, target = by_disk(tmp_path)
    sender.send(weights(0), 0)
    receiver.receive()
    sender.send(weights(1), 1)
    (version_dir(tmp_path, 1) / "STABLE").unlink()
    assert receiver.receive() is None and same(target, 0)
    again = DiskSender(tmp_path)  # a trainer that was killed before it could mark it
    again.send(weights(1), 1)
    assert receiver.receive().version == 1 and same(target, 1)


def test_a_reader_skips_versions_that_it_was_too_slow_for(tmp_path):
    sender, receiver, target = by_disk(tmp_path)
    for version in range(4):
        sender.send(weights(version), version)
    assert receiver.receive().version == 3 and same(target, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000002", "v000003"]


def test_a_full_version_stays_while_others_build_on_it(tmp_path):
    sender, receiver, target = by_disk(tmp_path, ADAPTERS)
    for version in range(5):
        sender.send(weights(version), version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000000", "v000003", "v000004"]
    report = receiver.receive()  # a late one takes both over at once
    assert (report.version, report.num_tensors) == (4, len(weights(0)))
    assert target.net.sums() == Net().become(0).become(4, ADAPTERS).sums()
    sender.send(weights(5), 5, full=True)
    sender.send(weights(6), 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000005", "v000006"]
    assert receiver.receive().version == 6
    assert target.net.sums() == Net().become(5).become(6, ADAPTERS).sums()


def test_a_version_whose_base_is_gone_is_refused(tmp_path):
    sender, receiver, target = by_disk(tmp_path, ADAPTERS)
    sender.send(weights(0), 0)
    sender.send(weights(1), 1)
    (version_dir(tmp_path, 0) / "STABLE").unlink()
    with raises_code("weight-version", WeightVersionError, "1", "0"):
        receiver.receive()
    assert same(target, -1)


def test_storage_that_fails_leaves_the_old_version(tmp_path, monkeypatch):
    sender, receiver, target = by_disk(tmp_path)
    sender.send(weights(0), 0)
    receiver.receive()
    sender.send(weights(1), 1)

    def fail(content, what):
        if fail.left == 0:
            raise OSError(errno.EIO, "storage is gone")
        fail.left -= 1
        return unpacked(content, what)

    fail.left = 3
    with monkeypatch.context() as patch:
        patch.setattr(disk, "unpacked", fail)
        with raises_code("incomplete-sync", IncompleteSyncError, "storage is gone"):
            receiver.receive()
    assert same(target, 0)
    assert receiver.receive().version == 1 and same(target, 1)


def test_a_version_that_is_removed_while_it_is_read_is_read_to_the_end(tmp_path, monkeypatch):
    sender, receiver, target = by_disk(tmp_path)
    sender.send(weights(1), 1)

    def remove(content, what):
        shutil.rmtree(version_dir(tmp_path, 1), ignore_errors=True)
        return unpacked(content, what)

    monkeypatch.setattr(disk, "unpacked", remove)
    assert receiver.receive().version == 1 and same(target, 1)


def test_versions_after_the_checkpoint_that_a_run_continues_from_go(tmp_path):
    sender, receiver, target = by_disk(tmp_path, keep=3)
    for version in (1, 2, 3):
        sender.send(weights(version), version)
    receiver.receive()
    again = DiskSender(tmp_path)
    with raises_code("weight-version", WeightVersionError, "2", "3"):
        again.send(weights(2), 2)
    again.drop_newer(1)
    again.send(weights(2), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000001", "v000002"]
    with raises_code("weight-version", WeightVersionError, "2", "3"):
        receiver.receive()
    assert same(target, 3)


def test_a_directory_that_can_not_be_written_is_reported(tmp_path):
    (tmp_path / "weights").write_text("a file")
    with raises_code("weight-sync", WeightSyncError, "0") as caught:
        DiskSender(tmp_path / "weights").send(weights(0), 0)
    assert "is a file" in caught.value.hint and "disk space" not in caught.value.hint
