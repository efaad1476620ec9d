"""Through a directory: also between machines that share storage, and for processes that come and go."""

from __future__ import annotations

import json
import logging
import shutil
import time
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from embodrl.errors import TornSyncError, WeightSyncError, WeightVersionError
from embodrl.hybrid_engines.weight_sync.base import Header, SyncReport, WeightReceiver, WeightSender, WeightTarget
from embodrl.hybrid_engines.weight_sync.buckets import (
    DEFAULT_BUCKET_BYTES,
    Layout,
    Named,
    buckets,
    dtype_name,
    num_bytes,
)
from embodrl.hybrid_engines.weight_sync.versions import (
    MANIFEST,
    STABLE,
    StoredVersion,
    make_manifest,
    read_header,
    version_path,
    versions_in,
)
from embodrl.storage.atomic import sync_directory, write_file
from embodrl.storage.files import safetensors_bytes

logger = logging.getLogger(__name__)

VERSIONS_KEPT = 2
_STAGING = ".writing_"
_POLL_S = 0.05


class DiskSender(WeightSender):
    """Writes each version under a temporary name, renames it, and marks it STABLE last; removes old ones.

    One sender writes to a directory at a time. It goes on after the newest version that it finds there.

    Args:
        directory: of the versions; made if missing.
        trained: see WeightSender; the first version that a sender writes is full.
        bucket_bytes: see WeightSender; a bucket is a file.
        keep: newest versions kept; those that they build on stay, too.
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
        """Remove what a run wrote after the checkpoint that it now continues from.

        Args:
            version: updates that the weights of the checkpoint have seen.
        """
        for other in versions_in(self.directory, stable=False):
            if other > version:
                self._remove(version_path(self.directory, other))
        self.version, self.base = next(iter(versions_in(self.directory)), None), None

    def _send(self, header: Header, stream: Iterator[Named]) -> None:
        final = version_path(self.directory, header.version)
        staging = self.directory / f"{_STAGING}{final.name}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for left in self.directory.glob(f"{_STAGING}*"):  # by a sender that was killed
                shutil.rmtree(left)
            if final.exists():  # never marked STABLE
                shutil.rmtree(final)
            staging.mkdir()
            self._write(header, stream, staging, final)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise WeightSyncError(
                f"weights of version {header.version} could not be written to {self.directory}: {error.strerror}",
                "free some room, or sync through another directory; readers keep the version before",
            ) from error
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        self._prune()

    def _write(self, header: Header, stream: Iterator[Named], staging: Path, final: Path) -> None:
        tensors: dict[str, dict[str, Any]] = {}
        files: dict[str, int] = {}
        for bucket in buckets(stream, self.bucket_bytes):
            name = f"bucket_{len(files):05d}.safetensors"
            files[name] = write_file(staging / name, _noting(dict(bucket), name, tensors))
        manifest, stable = make_manifest(header, tensors, files)
        write_file(staging / MANIFEST, iter([manifest]))
        sync_directory(staging)
        staging.rename(final)
        sync_directory(self.directory)
        # Not atomic_file: the temporary name must not be taken for a file of the version, and OSErrors are
        # reported as failures of weight sync.
        hidden = final / f".{STABLE}"
        write_file(hidden, iter([stable]))
        hidden.rename(final / STABLE)
        sync_directory(final)

    def _prune(self) -> None:
        """Remove old versions, but none that a kept one builds on."""
        kept = versions_in(self.directory)[: self.keep]
        try:
            kept += [read_header(self.directory, version).base for version in kept]
        except TornSyncError as error:
            logger.warning("no old weights are removed: %s", error)
            return
        for version in versions_in(self.directory, stable=False):
            if version not in kept:
                self._remove(version_path(self.directory, version))

    def _remove(self, path: Path) -> None:
        try:
            (path / STABLE).unlink(missing_ok=True)  # first, so that nobody takes what is left for a whole version
            shutil.rmtree(path)
        except OSError as error:
            logger.warning("old weights %s could not be removed: %s", path, error)


def _noting(bucket: dict[str, Any], file: str, tensors: dict[str, dict[str, Any]]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file, and note where each tensor lies in it and its checksum."""
    pieces = safetensors_bytes(bucket)
    header = bytes(next(pieces))
    yield header
    places: dict[str, Any] = json.loads(header[8:])
    for name, place in places.items():
        tensor = bucket[name]
        facts = {"file": file, "offset": len(header) + place["data_offsets"][0], "num_bytes": num_bytes(tensor)}
        tensors[name] = facts | {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "crc32": 0}
        if tensor.numel():
            piece = next(pieces)
            tensors[name]["crc32"] = zlib.crc32(piece)
            yield piece


class DiskReceiver(WeightReceiver):
    """Takes over the newest STABLE version. It is read twice, a tensor at a time: whole, to compare every checksum,
    and then into the policy. Its files stay open meanwhile, so that removing it does no harm on a local disk. Should
    storage fail between the two readings, the version before is read back.

    Args:
        target: see WeightReceiver.
        directory: of the sender.
        layout: see WeightReceiver.

    Attributes:
        intact: False if storage failed while the policy was written and there was no version to go back to.
    """

    def __init__(self, target: WeightTarget, directory: Path, layout: Layout | None = None) -> None:
        super().__init__(target, layout)
        self.directory, self.intact = Path(directory), True
        self._serving: list[StoredVersion] = []  # a full version, and perhaps one that builds on it

    def receive(self, timeout_s: float = 0.0) -> SyncReport | None:
        """See WeightReceiver; a version is taken over once, and those in between are passed over."""
        deadline = time.monotonic() + timeout_s
        while (version := self._newest()) is None:
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)
        clock = time.perf_counter()
        stored = self._open(version)
        try:
            header = stored[-1].header
            shapes = {name: shape for one in stored for name, shape in one.shapes.items()}
            self._check_layout(Header(version, version) if len(stored) > 1 else header, shapes)
            for one in stored:
                one.verify()
            moved = self._take(stored, header)
        except BaseException:
            self._close(stored)
            raise
        return SyncReport(version, header.full, *moved, time.perf_counter() - clock)

    def _newest(self) -> int | None:
        """Return the newest version if it is not the one that acts.

        Raises:
            WeightVersionError: it is older.
        """
        newest = next(iter(versions_in(self.directory)), None)
        if newest is not None and self.version is not None and newest < self.version:
            self._check_version(Header(newest, newest))
        return None if newest == self.version else newest

    def _open(self, version: int) -> list[StoredVersion]:
        """Open a version, and what it builds on where that is not in the policy already."""
        found = [StoredVersion.open(self.directory, version)]
        base = found[0].header.base
        if base not in (version, self.base):
            try:
                found.insert(0, StoredVersion.open(self.directory, base))
            except WeightSyncError as error:
                self._close(found)
                raise WeightVersionError(
                    f"version {version} holds only what trains and builds on version {base}: {error.message}",
                    "send once with full=True",
                ) from error
        return found

    def _take(self, stored: list[StoredVersion], header: Header) -> tuple[int, int]:
        """Copy versions that have been verified into the policy; return the number of tensors and bytes."""
        try:
            self.target.update_weights(_chain(stored), header.version)
        except Exception as error:
            self.intact = bool(self._serving) and self.version is not None
            if self.intact and self.version is not None:
                self.target.update_weights(_chain(self._serving), self.version)
            else:
                error.add_note("the policy holds parts of two versions: it must not act until a full sync succeeds")
            raise
        self.intact = True
        full = stored[0].header.full
        kept = [] if full else self._serving[:1]
        self._close([one for one in self._serving if one not in kept])
        self._serving = kept + stored
        self._took(header)
        return sum(len(one.tensors) for one in stored), sum(one.num_bytes for one in stored)

    def _close(self, stored: list[StoredVersion]) -> None:
        for one in stored:
            one.close()

    def close(self) -> None:
        """Close the files of the version that acts."""
        self._close(self._serving)
        self._serving = []


def _chain(stored: list[StoredVersion]) -> Iterator[Named]:
    """Yield the tensors of a full version and of one that builds on it, each name once, the newest."""
    newer = stored[-1].tensors if len(stored) > 1 else {}
    for one in stored:
        yield from one.read(without=newer if one is not stored[-1] else ())
