"""A training state on disk in shards: every process writes its part, and any number of processes can read it.

``torch.distributed.checkpoint`` with its safetensors storage: a directory per section, one file per process and bucket,
whose header maps its tensors into the whole. Nothing is pickled on disk, nothing is gathered, and each process needs
extra memory for its share of one bucket.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from embodrl.errors import CheckpointError
from embodrl.hybrid_engines.base import FileFacts
from embodrl.hybrid_engines.training.sharding import held
from embodrl.hybrid_engines.training.state_shapes import StateShapes, buckets, check_fit, num_bytes_of

SECTIONS = ("policy", "optimizer", "reference")
_RESTORE = "resume from an older checkpoint, or restore the file"
BUCKET_BYTES = 1 << 30
"""Bytes of whole tensors written or read at a time."""


class ShardedState(Protocol):
    """A training state held in parts by several processes; ``HeldState`` documents the methods."""

    @property
    def is_shared(self) -> bool: ...

    def inventory(self) -> dict[str, dict[str, int]]: ...
    def parts(self, section: str, names: Iterable[str]) -> dict[str, Tensor]: ...
    def shapes(self) -> StateShapes: ...
    def start_load(self) -> None: ...
    def room(self, section: str, saved: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
    def load_parts(self, section: str, parts: Mapping[str, Tensor]) -> None: ...
    def set_counters(self, state: Mapping[str, int]) -> None: ...


def save_state(state: ShardedState, directory: Path) -> FileFacts:
    """Write this process's part of an engine's state; a collective call. Return the files of this process.

    ``directory`` is new, on a file system that all processes see. All files are synced; checksums are of the memory.

    Raises:
        OSError: a process could not write; all of them raise.
        CheckpointError: another failure.
    """
    facts: FileFacts = {}
    for section, sizes in state.inventory().items():
        groups = list(buckets(sizes, BUCKET_BYTES))
        # The library writes tensors with the same number into one file.
        file_numbers = {name: number for number, names in enumerate(groups, 1) for name in names}
        files = _HashedFiles()
        for names in groups:
            writer = HuggingFaceStorageWriter(str(directory / section), file_numbers, save_distributed=True)
            # The library's own file system keeps no checksums.
            writer.fs = files
            parts = _without_shared_memory(state.parts(section, names))
            _collective(save, parts, storage_writer=writer, no_dist=not state.is_shared)
        facts |= {f"{section}/{name}": fact for name, fact in files.facts.items()}
    return facts


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that share no memory, as the safetensors library requires; copies only where needed."""
    seen = set[int]()
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        pointer = held(tensor).untyped_storage().data_ptr()
        found[name] = tensor.detach().clone() if pointer in seen else tensor
        seen.add(pointer)
    return found


def load_state(state: ShardedState, directory: Path, counters: Mapping[str, int]) -> None:
    """Read this process's part of a ``save_state`` result, possibly from another number of processes.

    A collective call of all processes that share the state. Weights are read in place.

    Raises:
        CheckpointError: it belongs to another policy, or is unreadable.
    """
    index = read_index(directory)
    check_fit(index, state.shapes(), counters)
    state.start_load()
    for section, saved in index.items():
        reader = _Reader(str(directory / section))
        for names in buckets(num_bytes_of(saved), BUCKET_BYTES):
            targets = state.room(section, {name: saved[name] for name in names})
            _read(targets, reader, alone=not state.is_shared)
            state.load_parts(section, targets)
    state.set_counters(counters)


def read_index(directory: Path) -> dict[str, dict[str, Tensor]]:
    """Return shapes and dtypes of all tensors of a state on disk, by section, as tensors without contents."""
    return {
        section: {
            name: torch.empty(found.size, dtype=found.properties.dtype, device="meta")
            for name, found in _Reader(str(directory / section)).read_metadata().state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }
        for section in SECTIONS
        if (directory / section).is_dir()
    }


def read_whole(directory: Path, section: str, targets: Mapping[str, Tensor]) -> None:
    """Read whole tensors of a section in place, without other processes.

    Raises:
        CheckpointError: one is missing or unreadable.
    """
    _read(targets, _Reader(str(directory / section)), alone=True)


def _read(targets: Mapping[str, Tensor], reader: _Reader, alone: bool) -> None:
    try:
        _collective(load, dict(targets), storage_reader=reader, no_dist=alone)
    except OSError as error:
        raise CheckpointError(
            f"{reader.path} can't be read: {error}",
            "all processes need access to the directory",
            code="checkpoint-damaged",
        ) from error


def _collective(function: Callable[..., object], *args: object, **kwargs: object) -> None:
    """Call a function of DCP, which reports the failure of one process to all."""
    try:
        with warnings.catch_warnings():
            # Also raised for no_dist, which is intended.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            function(*args, **kwargs)
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        cause = next((found for found in causes if isinstance(found, OSError)), None)
        # A full disk must reach the caller as OSError: the run continues without this checkpoint.
        if cause is not None:
            raise OSError(cause.errno, cause.strerror or str(cause)) from error
        rank, first = next(iter(error.failures.items()))
        raise CheckpointError(f"process {rank}: {first[0]!r}", "see its log", code="checkpoint-damaged") from error


class _Reader(HuggingFaceStorageReader):
    """Reads the headers of all files once."""

    _metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._metadata is None:
            try:
                # The library bounds header sizes; header contents are only used if they fit the policy.
                self._metadata = super().read_metadata()
            except (SafetensorError, ValueError, LookupError, TypeError, RecursionError, OSError) as error:
                raise CheckpointError(
                    f"{self.path} can't be read: {error}", _RESTORE, code="checkpoint-damaged"
                ) from error
        return self._metadata


class _HashedFiles(FileSystem):
    """Records size and SHA-256 of written files."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: FileFacts = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            hashed = _HashedStream(stream)
            yield cast(io.IOBase, hashed)
        self.facts[Path(path).name] = {"num_bytes": hashed.num_bytes, "sha256": hashed.digest.hexdigest()}


class _HashedStream:
    """A writable stream that hashes its data."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.num_bytes += len(data)
        written = self._stream.write(data)
        self._stream.flush()  # DCP syncs the file before it closes the stream
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
