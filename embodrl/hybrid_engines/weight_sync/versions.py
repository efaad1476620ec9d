"""Versions of weights in a directory.

``DIR/v000012/`` holds safetensors files, ``manifest.json`` (every tensor's file, place, dtype, shape and CRC-32) and,
written last, ``STABLE`` with the SHA-256 of the manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodrl.errors import TornSyncError
from embodrl.hybrid_engines.weight_sync.base import Header
from embodrl.hybrid_engines.weight_sync.buckets import Layout, Named, as_tensor, checksum
from embodrl.hybrid_engines.weight_sync.staging import HINT, check_bytes

FORMAT = 1
MANIFEST = "manifest.json"
STABLE = "STABLE"
_NAME = re.compile(r"v(\d{6,})")


def version_path(directory: Path, version: int) -> Path:
    """Return where a version lies."""
    return directory / f"v{version:06d}"


def versions_in(directory: Path, stable: bool = True) -> list[int]:
    """Return the versions in a directory, the newest first; those without a STABLE marker only if asked for."""
    if not directory.is_dir():
        return []
    found = [(int(m[1]), path) for path in directory.iterdir() if (m := _NAME.fullmatch(path.name))]
    return sorted((version for version, path in found if not stable or (path / STABLE).is_file()), reverse=True)


def read_header(directory: Path, version: int) -> Header:
    """Return which weights a version holds.

    Raises:
        TornSyncError: it can't be read.
    """
    content = _manifest(version_path(directory, version))
    return Header(int(content["version"]), int(content["base"]))


@dataclass
class StoredVersion:
    """A version whose files are open, so that it can be read even when its directory has been removed.

    Attributes:
        path: its directory.
        header: which weights.
        tensors: facts of each by name.
        files: file descriptors by name.
    """

    path: Path
    header: Header
    tensors: dict[str, dict[str, Any]]
    files: dict[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def open(cls, directory: Path, version: int) -> StoredVersion:
        """Open a version, without reading its tensors.

        Raises:
            TornSyncError: a file is missing or has another size than it was written with.
        """
        path = version_path(directory, version)
        content = _manifest(path)
        found = cls(path, Header(int(content["version"]), int(content["base"])), content["tensors"])
        try:
            if found.header.version != version:
                raise _torn(path, f"{MANIFEST} is of version {found.header.version}")
            for name, size in content["files"].items():
                found.files[name] = os.open(path / name, os.O_RDONLY)
                here = os.fstat(found.files[name]).st_size
                if here != size:
                    raise _torn(path, f"{name} has {here} bytes instead of {size}")
        except OSError as error:
            found.close()
            raise _torn(path, f"{Path(error.filename).name} is missing or can't be read") from error
        except TornSyncError:
            found.close()
            raise
        return found

    @property
    def shapes(self) -> Layout:
        """Of the tensors by name."""
        return {name: tuple(facts["shape"]) for name, facts in self.tensors.items()}

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(facts["num_bytes"] for facts in self.tensors.values())

    def verify(self) -> None:
        """Read every tensor, one at a time.

        Raises:
            WeightChecksumError: one has other bytes than it was written with.
            TornSyncError: one can't be read.
        """
        for _ in self.read():
            pass

    def read(self, without: Collection[str] = ()) -> Iterator[Named]:
        """Yield names and tensors, one in memory at a time, each compared with its checksum.

        Args:
            without: names that are left out.

        Raises:
            WeightChecksumError: one has other bytes than it was written with.
            TornSyncError: one can't be read.
        """
        for name, facts in self.tensors.items():
            if name not in without:
                yield name, self._read(name, facts)

    def _read(self, name: str, facts: dict[str, Any]) -> Tensor:
        size, offset = int(facts["num_bytes"]), int(facts["offset"])
        raw = torch.empty(size, dtype=torch.uint8)
        view, done = raw.numpy().data, 0
        while done < size:
            try:
                count = os.preadv(self.files[facts["file"]], [view[done:]], offset + done)
            except OSError as error:
                raise _torn(self.path, f"'{name}' can't be read: {error.strerror}") from error
            if not count:
                raise _torn(self.path, f"{facts['file']} ends within '{name}'")
            done += count
        check_bytes(name, self.header.version, checksum(raw), int(facts["crc32"]))
        return as_tensor(raw, facts["dtype"], facts["shape"])

    def close(self) -> None:
        """Close its files."""
        while self.files:
            os.close(self.files.popitem()[1])


def make_manifest(header: Header, tensors: dict[str, dict[str, Any]], files: dict[str, int]) -> tuple[bytes, bytes]:
    """Return the contents of the manifest and of the STABLE marker."""
    content = {"format": FORMAT, "version": header.version, "base": header.base, "files": files, "tensors": tensors}
    manifest = json.dumps(content, indent=1).encode()
    stable = {"version": header.version, "manifest_sha256": hashlib.sha256(manifest).hexdigest()}
    return manifest, json.dumps(stable).encode()


def _manifest(path: Path) -> dict[str, Any]:
    """Return what the manifest says, if it is the one that the marker vouches for."""
    try:
        manifest = (path / MANIFEST).read_bytes()
        stable: dict[str, Any] = json.loads((path / STABLE).read_bytes())
        if stable["manifest_sha256"] != hashlib.sha256(manifest).hexdigest():
            raise _torn(path, f"{MANIFEST} is not the one that {STABLE} was written for")
        content: dict[str, Any] = json.loads(manifest)
        if content["format"] != FORMAT:
            raise _torn(path, f"it has the format {content['format']}, and this version reads {FORMAT}")
    except FileNotFoundError as error:
        raise _torn(path, f"{Path(error.filename).name} is missing") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _torn(path, f"it can't be read: {error}") from error
    return content


def _torn(path: Path, problem: str) -> TornSyncError:
    return TornSyncError(f"weights in {path}: {problem}", HINT)
