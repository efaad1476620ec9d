"""Weight sync through a directory: between machines that share storage, and for processes that come and go.

``DIR/v000012/`` holds safetensors files, ``manifest.json`` (file, place, dtype, shape and CRC-32 of every tensor) and,
written last, ``STABLE`` with the SHA-256 of the manifest: a version without it does not exist for readers.
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
from embodrl.fields import Fields, parse_fields, read_fields
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
    as_tensor,
    buckets,
    checksum,
    dtype_name,
    num_bytes,
    shape_of,
    trained_names,
)
from embodrl.models.base import VLAPolicy
from embodrl.storage.atomic import atomic_directory, write_file
from embodrl.storage.files import safetensors_bytes
from embodrl.storage.json_file import write_json_file

logger = logging.getLogger(__name__)

VERSIONS_KEPT = 2
FORMAT = 1
MANIFEST, STABLE = "manifest.json", "STABLE"
_NAME = re.compile(r"v(\d{6,18})")
_POLL_S = 0.05


def version_path(directory: Path, version: int) -> Path:
    """Return the directory of a version."""
    return directory / f"v{version:06d}"


def versions_in(directory: Path, stable: bool = True) -> list[int]:
    """Return the versions in a directory, the newest first; unfinished ones only with ``stable=False``."""
    if not directory.is_dir():
        return []
    found = [(int(m[1]), path) for path in directory.iterdir() if (m := _NAME.fullmatch(path.name))]
    return sorted((version for version, path in found if not stable or (path / STABLE).is_file()), reverse=True)


class DiskSender(WeightSender):
    """Writes each version under a temporary name, renames it, and marks it STABLE last; removes old ones.

    Only one sender may write to a directory at a time. It continues after the newest version that it finds there.

    Args:
        directory: of the versions; created if missing.
        trained, bucket_bytes: see WeightSender; the first version is full, and a bucket is a file.
        keep: newest versions kept; those that they build on are kept, too.
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
            raise WeightSyncError(f"weight sync by disk keeps {keep} versions", "keep at least 1")
        self.directory, self.keep = Path(directory), keep
        self.version = next(iter(versions_in(self.directory)), None)

    def drop_newer(self, version: int) -> None:
        """Remove versions above this one, which a run wrote after the checkpoint that it is resumed from."""
        for other in versions_in(self.directory, stable=False):
            if other > version:
                self._remove(other)
        self.version, self.base = next(iter(versions_in(self.directory)), None), None

    def _send(self, header: Header, stream: Iterator[Named], check: Check) -> None:
        final = version_path(self.directory, header.version)
        try:
            for left in self.directory.glob(".v*.partial"):  # by a sender that was killed
                shutil.rmtree(left)
            # A directory of this version that was never marked STABLE is replaced.
            with atomic_directory(final) as staging:
                sha256 = self._write(header, stream, staging)
            write_json_file(final / STABLE, {"version": header.version, "manifest_sha256": sha256})
        except (OSError, OutputError) as error:
            problem = error.message if isinstance(error, OutputError) else error.strerror
            raise WeightSyncError(
                f"weights of version {header.version} could not be written to {self.directory}: {problem}",
                "free disk space, or sync through another directory; readers keep the previous version",
            ) from error
        self._prune()

    def _write(self, header: Header, stream: Iterator[Named], directory: Path) -> str:
        """Write a version without its mark; return the SHA-256 of its manifest."""
        tensors: dict[str, dict[str, object]] = {}
        files: dict[str, int] = {}
        for bucket in buckets(stream, self.bucket_bytes):
            name = f"bucket_{len(files):05d}.safetensors"
            files[name] = write_file(directory / name, _recorded(dict(bucket), name, tensors))
        content = {"format": FORMAT, "version": header.version, "base": header.base, "files": files, "tensors": tensors}
        manifest = json.dumps(content, indent=1).encode()
        write_file(directory / MANIFEST, iter([manifest]))
        return hashlib.sha256(manifest).hexdigest()

    def _prune(self) -> None:
        """Remove old versions, except those that a kept one builds on."""
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
            (path / STABLE).unlink(missing_ok=True)  # first, so that no reader takes the rest for a whole version
            shutil.rmtree(path)
        except OSError as error:
            logger.warning("old weights %s could not be removed: %s", path, error)


def _recorded(
    bucket: dict[str, Tensor], file: str, tensors: dict[str, dict[str, object]]
) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file, and record place and checksum of each of its tensors in ``tensors``."""
    pieces = safetensors_bytes(bucket)
    header = next(pieces)
    yield header
    offset = len(header)
    for name in parse_fields(bytes(header[8:]), file):  # in the order of the file
        tensor = bucket[name]
        piece = next(pieces) if tensor.numel() else b""
        facts = {"file": file, "offset": offset, "num_bytes": num_bytes(tensor), "dtype": dtype_name(tensor.dtype)}
        tensors[name] = facts | {"shape": list(tensor.shape), "crc32": zlib.crc32(piece)}
        offset += num_bytes(tensor)
        yield piece


@dataclass(frozen=True)
class _Place:
    """A tensor in a file of a version."""

    file: str
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]
    crc32: int

    @classmethod
    def read(cls, facts: Fields, files: dict[str, int]) -> _Place:
        """Return the place of a tensor; it must be within one of the files."""
        file, offset, size = facts.text("file"), facts.integer("offset"), facts.integer("num_bytes")
        if offset + size > files.get(file, -1):
            facts.refuse(f"bytes {offset} to {offset + size} are not in the file '{file}'")
        return cls(file, offset, size, facts.text("dtype"), shape_of(facts), facts.integer("crc32"))


@dataclass(frozen=True)
class StoredVersion:
    """A version on disk whose manifest is intact: sizes of its files, and places of its tensors, by name."""

    path: Path
    header: Header
    files: dict[str, int]
    tensors: dict[str, _Place]

    @classmethod
    def open(cls, directory: Path, version: int) -> StoredVersion:
        """Read a version's manifest.

        Raises:
            IncompleteSyncError: it is missing or damaged, or names a file outside of the version's directory.
        """
        path = version_path(directory, version)
        expected = read_fields(path / STABLE, IncompleteSyncError, HINT).text("manifest_sha256")
        try:
            encoded = (path / MANIFEST).read_bytes()
        except OSError as error:
            raise _incomplete(path, f"{MANIFEST} can't be read: {error.strerror}") from error
        if hashlib.sha256(encoded).hexdigest() != expected:
            raise _incomplete(path, f"{MANIFEST} is not the one that {STABLE} was written for")
        manifest = parse_fields(encoded, str(path / MANIFEST), IncompleteSyncError, HINT)
        header = Header(manifest.integer("version"), manifest.integer("base"))
        if (manifest.integer("format"), header.version) != (FORMAT, version):
            manifest.refuse(f"format {manifest.integer('format')} of version {header.version}")
        sizes, places = manifest.fields("files"), manifest.fields("tensors")
        files = {name: sizes.integer(name) for name in sizes}
        if outside := [name for name in files if name in ("", ".", "..") or "/" in name or "\0" in name]:
            sizes.refuse(f"{outside[0]!r} is not a file of this directory")
        return cls(path, header, files, {name: _Place.read(places.fields(name), files) for name in places})

    def read(self) -> dict[str, Tensor]:
        """Return all tensors, in host memory.

        Raises:
            IncompleteSyncError: a file is missing, has another size than it was written with, or cannot be read.
            WeightChecksumError: the bytes of a tensor are not those that were written.
        """
        tensors: dict[str, Tensor] = {}
        with ExitStack() as stack:
            try:
                # All are opened first: on a local disk they can then be read even if the sender removes the version.
                streams = {name: stack.enter_context((self.path / name).open("rb")) for name in self.files}
                for file, size in self.files.items():
                    if (found := os.fstat(streams[file].fileno()).st_size) != size:
                        raise _incomplete(self.path, f"{file} has {found} bytes instead of {size}")
                for name, place in self.tensors.items():
                    raw = torch.empty(place.num_bytes, dtype=torch.uint8)
                    streams[place.file].seek(place.offset)
                    if streams[place.file].readinto(raw.numpy().data) != len(raw):
                        raise _incomplete(self.path, f"{place.file} ends within '{name}'")
                    check_bytes(name, self.header.version, checksum(raw), place.crc32)
                    tensors[name] = as_tensor(raw, place.dtype, place.shape)
            except FileNotFoundError as error:
                raise _incomplete(self.path, f"{Path(error.filename).name} is missing") from error
            except OSError as error:
                raise _incomplete(self.path, f"it cannot be read: {error.strerror}") from error
        return tensors


def _incomplete(path: Path, problem: str) -> IncompleteSyncError:
    return IncompleteSyncError(f"weights in {path}: {problem}", HINT)


class DiskReceiver(WeightReceiver):
    """Accepts the newest STABLE version. It is read into host memory and compared with its checksums before.

    Args:
        target, layout: see WeightReceiver.
        directory: of the sender.
    """

    def __init__(self, target: WeightTarget, directory: Path, layout: Layout | None = None) -> None:
        super().__init__(target, layout)
        self.directory = Path(directory)

    def receive(self, timeout_s: float = 0.0) -> SyncReport | None:
        """Versions between the present and the newest one are skipped."""
        deadline = time.monotonic() + timeout_s
        while (version := next(iter(versions_in(self.directory)), None)) is None or version == self.version:
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)
        if self.version is not None and version < self.version:
            self._check_version(Header(version, version))
        stored = [StoredVersion.open(self.directory, version)]
        header = stored[0].header
        if header.base not in (version, self.base):
            try:
                stored.insert(0, StoredVersion.open(self.directory, header.base))
            except WeightSyncError as error:
                raise WeightVersionError(
                    f"version {version} holds only trained weights and builds on version {header.base}:"
                    f" {error.message}",
                    "send once with full=True",
                ) from error
        shapes = {name: place.shape for one in stored for name, place in one.tensors.items()}
        self._check_layout(version, shapes, stored[0].header.full)
        tensors: dict[str, Tensor] = {}
        for one in reversed(stored):  # the newer one first: the sender keeps what it builds on for longer
            tensors = one.read() | tensors
        return self._accept(header, tensors)


class WeightPublisher:
    """Writes every version to a directory for processes outside of the run: the first one whole, then trained weights.

    A full disk costs a version, not the run.

    Args:
        directory: of the versions.
        policy: that trains.
        version: number of updates behind its weights; versions that an earlier process wrote after it are removed.
    """

    def __init__(self, directory: Path, policy: VLAPolicy, version: int) -> None:
        self._sender = DiskSender(directory, trained_names(policy))
        self._sender.drop_newer(version - 1)
        self._failed = False

    def publish(self, weights: Iterable[Named], version: int) -> None:
        """Write a version unless it exists."""
        if self._sender.version is not None and version <= self._sender.version:
            return
        try:
            self._sender.send(weights, version, full=self._failed)
            self._failed = False
        except WeightSyncError as error:
            self._failed = True
            logger.error("%s", error)
