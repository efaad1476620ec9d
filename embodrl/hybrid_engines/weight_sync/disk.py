"""Weight sync through a directory: between machines that share storage, and for processes that come and go.

``DIR/v000012/`` holds safetensors files, ``manifest.json`` (size and CRC-32 of each) and, written last, ``STABLE`` with
the SHA-256 of the manifest: readers ignore a version without it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from embodrl.errors import IncompleteSyncError, OutputError, WeightSyncError, WeightVersionError
from embodrl.fields import MAX_JSON_BYTES, open_regular_file, parse_fields, read_fields, read_regular_file
from embodrl.hybrid_engines.weight_sync.base import (
    HINT,
    Check,
    Header,
    SyncReport,
    WeightReceiver,
    WeightSender,
    WeightTarget,
    check_bytes,
)
from embodrl.hybrid_engines.weight_sync.buckets import (
    DEFAULT_BUCKET_BYTES,
    Layout,
    Named,
    buckets,
    checksum,
    layout_of,
    trained_names,
    unpacked,
)
from embodrl.models.base import VLAPolicy
from embodrl.storage.atomic import atomic_directory, output_errors, write_file
from embodrl.storage.files import safetensors_bytes
from embodrl.storage.json_file import write_json_file

logger = logging.getLogger(__name__)

VERSIONS_KEPT = 2
FORMAT = 2
MANIFEST = "manifest.json"
STABLE = "STABLE"
_NAME = re.compile(r"v([0-9]{6,18})")
_ELSEWHERE = "sync through another directory"
_POLL_S = 0.05


def version_path(directory: Path, version: int) -> Path:
    """Return the directory of a version."""
    return directory / f"v{version:06d}"


def versions_in(directory: Path, stable: bool = True) -> list[int]:
    """Return the versions in a directory, newest first; unfinished ones only with ``stable=False``."""
    if not directory.is_dir():
        return []
    found = [(int(m[1]), path) for path in directory.iterdir() if (m := _NAME.fullmatch(path.name))]
    return sorted((version for version, path in found if not stable or (path / STABLE).is_file()), reverse=True)


class DiskSender(WeightSender):
    """Writes each version under a temporary name, renames it, and marks it STABLE last; removes old ones.

    Only one sender may write to a directory at a time. It continues after the newest version there.

    Args:
        directory: directory of the versions; created if missing.
        trained, bucket_bytes: see WeightSender; the first version is full, and a bucket is a file.
        keep: number of newest versions kept, plus the versions they build on.
    """

    def __init__(
        self,
        directory: Path,
        trained: Collection[str] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        keep: int = VERSIONS_KEPT,
    ) -> None:
        super().__init__(trained, bucket_bytes)
        if keep < 1:
            raise WeightSyncError(
                f"weight sync by disk keeps {keep} versions", "keep at least 1", code="weight-sync-settings"
            )
        self.directory = Path(directory)
        self.keep = keep
        self.version = next(iter(versions_in(self.directory)), None)

    def drop_newer(self, version: int) -> None:
        """Remove versions above this one, which a run wrote after the checkpoint it is resumed from."""
        for other in versions_in(self.directory, stable=False):
            if other > version:
                self._remove(other)
        self.version = next(iter(versions_in(self.directory)), None)
        self.base = None

    def _send(self, header: Header, stream: Iterator[Named], check: Check) -> None:
        final = version_path(self.directory, header.version)
        try:
            with output_errors(f"{final} can't be written", final, _ELSEWHERE):
                for left in self.directory.glob(".v*.partial"):  # by a killed sender
                    shutil.rmtree(left)
                # A directory of this version that was never marked STABLE is replaced.
                with atomic_directory(final, _ELSEWHERE) as staging:
                    sha256 = self._write(header, stream, staging)
                # After the rename: for readers only this mark makes a version exist.
                write_json_file(final / STABLE, {"version": header.version, "manifest_sha256": sha256})
        except OutputError as error:
            raise WeightSyncError(
                f"weights of version {header.version} are not sent: {error.message}",
                f"{error.hint}; readers keep the previous version",
            ) from error
        self._prune()

    def _write(self, header: Header, stream: Iterator[Named], directory: Path) -> str:
        """Write a version without its mark; return the SHA-256 of its manifest."""
        files: dict[str, dict[str, int]] = {}
        for bucket in buckets(stream, self.bucket_bytes):
            name = f"bucket_{len(files):05d}.safetensors"
            sums = [0]
            size = write_file(directory / name, _summed(safetensors_bytes(dict(bucket)), sums))
            files[name] = {"num_bytes": size, "crc32": sums[-1]}
        content = {"format": FORMAT, "version": header.version, "base": header.base, "files": files}
        manifest = json.dumps(content, indent=1).encode()
        write_file(directory / MANIFEST, iter([manifest]))
        return hashlib.sha256(manifest).hexdigest()

    def _prune(self) -> None:
        """Remove old versions, except ones that a kept version builds on."""
        kept = versions_in(self.directory)[: self.keep]
        try:
            kept += [StoredVersion.open(self.directory, version).header.base for version in kept]
        except IncompleteSyncError as error:
            logger.warning("no old weights are removed: %s", error)
            return
        for version in versions_in(self.directory, stable=False):
            if version not in kept:
                self._remove(version)

    def _remove(self, version: int) -> None:
        path = version_path(self.directory, version)
        try:
            (path / STABLE).unlink(missing_ok=True)  # first, so that no reader takes the rest for a complete version
            shutil.rmtree(path)
        except OSError as error:
            logger.warning("old weights %s could not be removed: %s", path, error)


def _summed(pieces: Iterator[bytes | memoryview], sums: list[int]) -> Iterator[bytes | memoryview]:
    """Yield pieces of a file; the last entry of ``sums`` is the CRC-32 so far."""
    for piece in pieces:
        sums.append(zlib.crc32(piece, sums[-1]))
        yield piece


@dataclass(frozen=True)
class StoredVersion:
    """A version on disk with an intact manifest: its SHA-256, and size and CRC-32 of its files, by name."""

    path: Path
    header: Header
    sha256: str
    files: dict[str, tuple[int, int]]

    @classmethod
    def open(cls, directory: Path, version: int) -> StoredVersion:
        """Read a version's manifest.

        Raises:
            IncompleteSyncError: the manifest is missing or damaged, or names a file outside the version's directory.
        """
        path = version_path(directory, version)
        expected = read_fields(path / STABLE, IncompleteSyncError, HINT).text("manifest_sha256")
        try:
            encoded = read_regular_file(path / MANIFEST, MAX_JSON_BYTES)
        except OSError as error:
            raise _incomplete(path, f"{MANIFEST} can't be read: {error.strerror}") from error
        if hashlib.sha256(encoded).hexdigest() != expected:
            raise _incomplete(path, f"{MANIFEST} is not the one that {STABLE} was written for")
        manifest = parse_fields(encoded, str(path / MANIFEST), IncompleteSyncError, HINT)
        header = Header(manifest.integer("version"), manifest.integer("base"))
        if (manifest.integer("format"), header.version) != (FORMAT, version):
            manifest.refuse(f"format {manifest.integer('format')} of version {header.version}")
        files = manifest.fields("files")
        # A damaged or hostile manifest must not make this process read other files.
        if outside := [name for name in files if name in ("", ".", "..") or "/" in name or "\0" in name]:
            files.refuse(f"{outside[0]!r} is not a file of this directory")
        facts = {name: files.fields(name) for name in files}
        return cls(
            path, header, expected, {name: (f.integer("num_bytes"), f.integer("crc32")) for name, f in facts.items()}
        )

    def read(self) -> dict[str, Tensor]:
        """Return all tensors, in host memory.

        Raises:
            IncompleteSyncError: a file is missing, has the wrong size, or is unreadable.
            WeightChecksumError: its bytes differ from the written ones.
        """
        tensors: dict[str, Tensor] = {}
        with ExitStack() as stack:
            try:
                # All are opened first: on a local disk they stay readable even if the sender removes the version.
                streams = {name: stack.enter_context(open_regular_file(self.path / name)) for name in self.files}
                for name, (size, crc32) in self.files.items():
                    if (found := os.fstat(streams[name].fileno()).st_size) != size:
                        raise _incomplete(self.path, f"{name} has {found} bytes instead of {size}")
                    content = torch.empty(size, dtype=torch.uint8)
                    if streams[name].readinto(content.numpy().data) != size:
                        raise _incomplete(self.path, f"{name} became shorter while it was read")
                    check_bytes(name, self.header.version, checksum(content), crc32)
                    tensors |= unpacked(content, str(self.path / name))
            except FileNotFoundError as error:
                raise _incomplete(self.path, f"{Path(error.filename).name} is missing") from error
            except OSError as error:
                raise _incomplete(self.path, f"cannot be read: {error.strerror}") from error
        return tensors


def _incomplete(path: Path, problem: str) -> IncompleteSyncError:
    return IncompleteSyncError(f"weights in {path}: {problem}", HINT)


class DiskReceiver(WeightReceiver):
    """Accepts the newest STABLE version, after reading it into host memory and verifying its checksums."""

    def __init__(self, target: WeightTarget, directory: Path, layout: Layout | None = None) -> None:
        super().__init__(target, layout)
        self.directory = Path(directory)
        self._sha256 = ""

    def receive(self, timeout_s: float = 0.0) -> SyncReport | None:
        """Accept the newest version; versions in between are skipped. One that was made again is taken again."""
        deadline = time.monotonic() + timeout_s
        while (version := next(iter(versions_in(self.directory)), None)) is None or self._has(version):
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)
        base = None if version == self.version else self.base
        # The run has gone back to an older checkpoint, which this check rejects.
        if self.version is not None and version < self.version:
            self._check_version(Header(version, version))
        stored = [StoredVersion.open(self.directory, version)]
        header = stored[0].header
        if header.base not in (version, base):
            try:
                stored.insert(0, StoredVersion.open(self.directory, header.base))
            except WeightSyncError as error:
                raise WeightVersionError(
                    f"version {version} holds only trained weights and builds on version {header.base}:"
                    f" {error.message}",
                    "send once with full=True",
                ) from error
        tensors: dict[str, Tensor] = {}
        for one in reversed(stored):  # the newer one first: the sender keeps its base for longer
            tensors = one.read() | tensors
        self._check_layout(version, layout_of(tensors), stored[0].header.full)
        report = self._accept(header, tensors)
        self._sha256 = stored[-1].sha256
        return report

    def _has(self, version: int) -> bool:
        if version != self.version:
            return False
        path = version_path(self.directory, version) / STABLE
        try:
            return read_fields(path, IncompleteSyncError, HINT).text("manifest_sha256") == self._sha256
        except IncompleteSyncError:  # it is being replaced, and is looked at again
            return True


class WeightPublisher:
    """Writes every version for processes outside the run: the first one full, then trained weights.

    A full disk costs a version, not the run. ``version`` is the policy's current one; later versions by an earlier
    process are removed.
    """

    def __init__(self, directory: Path, policy: VLAPolicy, version: int) -> None:
        self._sender = DiskSender(directory, trained_names(policy))
        # The current version, too: it is written again, in full, as the base of the following ones.
        self._sender.drop_newer(version - 1)
        self._failed = False

    def publish(self, weights: Iterable[Named], version: int) -> None:
        """Write a version unless it exists."""
        if self._sender.version is not None and version <= self._sender.version:
            return
        try:
            # After a failure, the base of partial versions may be missing.
            self._sender.send(weights, version, full=self._failed)
            self._failed = False
        except WeightSyncError as error:
            self._failed = True
            logger.error("%s", error)
