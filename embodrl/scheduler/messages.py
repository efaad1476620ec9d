"""Types that can be sent to workers besides plain values: tensors, batches, records, ``Deployment``, ``Config``."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodrl import types
from embodrl.algorithms.advantages import Advantages
from embodrl.config.schema import Config
from embodrl.data.batch import Batch
from embodrl.data.shared_inputs import SharedColumns, SharedInputs
from embodrl.data.shared_rows import HeldInputs
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.deployment import Deployment, Gpu, ProcessPlace, Topology
from embodrl.errors import MessageError
from embodrl.hybrid_engines.training.schedule import LearningRates
from embodrl.hybrid_engines.training.state_shapes import StateShapes
from embodrl.processes.codec import Blobs, Codec, Extension, Read
from embodrl.processes.memory_file import MemoryFile
from embodrl.storage.files import raw_bytes

_BATCHES: dict[str, type[Batch]] = {"Batch": Batch, "TrajectoryBatch": TrajectoryBatch}
_RECORDS: dict[str, type[Any]] = {
    name: found for name, found in vars(types).items() if isinstance(found, type) and dataclasses.is_dataclass(found)
} | {
    found.__name__: found
    for found in (
        *(Advantages, Deployment, Gpu, LearningRates, ProcessPlace, StateShapes, Topology),
        *(HeldInputs, SharedColumns, SharedInputs),
    )
}
MAX_FILES = 128
"""Memory files in a message; the kernel passes at most 253 descriptors at once."""


def _describe_tensor(value: Tensor, _codec: Codec, blobs: Blobs, where: str) -> object:
    """Tensors lose their gradient, and GPU tensors move to the CPU."""
    if value.layout != torch.strided or value.is_quantized:
        raise MessageError(f"{where} is a {value.layout} tensor", "send a dense tensor")
    raw = np.frombuffer(raw_bytes(value), np.uint8)
    return [str(value.dtype).removeprefix("torch."), list(value.shape), blobs.add(raw), raw.nbytes]


def _restore_tensor(content: Any, _codec: Codec, read: Read) -> Tensor:
    name, shape, start, num_bytes = content
    dtype = getattr(torch, name)
    # The name comes from another process, and must not reach other attributes of torch.
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {name}")
    raw = read(start, num_bytes)
    # torch refuses an empty buffer.
    flat = torch.frombuffer(raw, dtype=torch.uint8) if len(raw) else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


def _describe_file(value: MemoryFile, _codec: Codec, blobs: Blobs, _where: str) -> object:
    blobs.files.append(value.descriptor)
    return len(blobs.files) - 1


def _restore_file(content: Any, _codec: Codec, read: Read) -> MemoryFile:
    return MemoryFile(os.dup(read.files[content]))


def _describe_batch(value: Batch, codec: Codec, blobs: Blobs, where: str) -> object:
    name = type(value).__name__
    # A subclass would arrive as its base class, without its additions.
    if _BATCHES.get(name) is not type(value):
        raise MessageError(f"{where} is a batch of the class {name}", f"send one of {', '.join(_BATCHES)}")
    parts = {"tree": value.tensors, "objects": value.objects, "meta": value.meta}
    return [name, codec.describe({**parts, "batch_size": list(value.batch_size)}, blobs, where)]


def _restore_batch(content: Any, codec: Codec, read: Read) -> Batch:
    name, parts = content
    parts = codec.restore(parts, read)
    return _BATCHES[name](parts.pop("tree"), **parts)


def _describe_record(value: Any, codec: Codec, blobs: Blobs, where: str) -> object:
    name = type(value).__name__
    # As for batches: a subclass would arrive as its base class.
    if _RECORDS.get(name) is not type(value):
        raise MessageError(f"{where} is a {name}, which can't be sent to a worker", "send a record of embodrl.types")
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return [name, codec.describe(fields, blobs, where)]


def _restore_record(content: Any, codec: Codec, read: Read) -> object:
    name, fields = content
    return _RECORDS[name](**codec.restore(fields, read))


def _restore_config(content: Any, *_: object) -> Config:
    for module in json.loads(content)["extensions"]:  # first: extensions define settings
        importlib.import_module(module)
    return Config.model_validate_json(content)


_RECORD = Extension("__record__", "records of embodrl.types", _describe_record, _restore_record)
CODEC = Codec(
    {
        Tensor: Extension("__tensor__", "tensors", _describe_tensor, _restore_tensor),
        Batch: Extension("__batch__", "batches", _describe_batch, _restore_batch),
        MemoryFile: Extension("__file__", "memory files", _describe_file, _restore_file),
        Config: Extension(
            "__config__",
            "the configuration",
            lambda value, *_: value.model_dump_json(),
            _restore_config,
        ),
        **dict.fromkeys(_RECORDS.values(), _RECORD),
    },
    MAX_FILES,
)
