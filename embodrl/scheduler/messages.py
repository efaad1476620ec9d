"""What workers can be sent beside plain values: tensors, batches, records, a ``Deployment``, and a ``Config``."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodrl import types
from embodrl.config.schema import Config
from embodrl.data.batch import Batch
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.deployment import Deployment, Gpu, ProcessPlace, Topology
from embodrl.errors import MessageError
from embodrl.processes.codec import Codec, Extension, Packer, Unpacker
from embodrl.storage.files import raw_bytes

_BATCHES: dict[str, type[Batch]] = {"Batch": Batch, "TrajectoryBatch": TrajectoryBatch}
_RECORDS: dict[str, type[Any]] = {
    name: found for name, found in vars(types).items() if isinstance(found, type) and dataclasses.is_dataclass(found)
} | {found.__name__: found for found in (Deployment, Gpu, ProcessPlace, Topology)}


def _describe_tensor(value: Tensor, packer: Packer, where: str) -> Any:
    """Tensors lose their gradient, and those of a GPU come to the CPU."""
    if value.layout != torch.strided or value.is_quantized:
        raise MessageError(f"{where} is a {value.layout} tensor", "send a dense tensor")
    raw = np.frombuffer(raw_bytes(value), np.uint8)
    return [str(value.dtype).removeprefix("torch."), list(value.shape), packer.blob(raw), raw.nbytes]


def _restore_tensor(content: Any, unpacker: Unpacker) -> Tensor:
    name, shape, start, num_bytes = content
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {name}")
    raw = unpacker.read(start, num_bytes)
    flat = torch.frombuffer(raw, dtype=torch.uint8) if len(raw) else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


def _describe_batch(value: Batch, packer: Packer, where: str) -> Any:
    name = type(value).__name__
    if _BATCHES.get(name) is not type(value):
        raise MessageError(f"{where} is a batch of the class {name}", f"send one of {', '.join(_BATCHES)}")
    parts = {"columns": value.tensors.to_dict(), "objects": value.objects, "meta": value.meta}
    return [name, list(value.batch_size), *(packer.describe(part, f"{where}.{key}") for key, part in parts.items())]


def _restore_batch(content: Any, unpacker: Unpacker) -> Batch:
    name, size, *parts = content
    return _BATCHES[name](*(unpacker.restore(part) for part in parts), batch_size=size)


def _describe_record(value: Any, packer: Packer, where: str) -> Any:
    names = [item.name for item in dataclasses.fields(value)]
    return [type(value).__name__, [[name, packer.describe(getattr(value, name), f"{where}.{name}")] for name in names]]


def _restore_record(content: Any, unpacker: Unpacker) -> Any:
    name, parts = content
    return _RECORDS[name](**{field: unpacker.restore(part) for field, part in parts})


CODEC = Codec(
    (
        Extension("__tensor__", Tensor, _describe_tensor, _restore_tensor, "tensors"),
        Extension("__batch__", Batch, _describe_batch, _restore_batch, "batches"),
        Extension(
            "__config__",
            Config,
            lambda value, _packer, _where: value.model_dump_json(),
            lambda content, _unpacker: Config.model_validate_json(content),
            "the configuration",
        ),
        *(
            Extension("__record__", record, _describe_record, _restore_record, "records of embodrl.types", False)
            for record in _RECORDS.values()
        ),
    )
)
