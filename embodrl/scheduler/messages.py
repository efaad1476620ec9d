"""Values to a description and raw memory, and back. Nothing in it can carry code.

What can be sent: None, bool, int, float, str, bytes, lists, tuples, dictionaries with text or integer keys, numpy
arrays, tensors, ``Batch`` and ``TrajectoryBatch``, the records of ``embodrl.types``, a ``Deployment`` and a whole
``Config``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl import types
from embodrl.config.schema import Config
from embodrl.data.batch import Batch
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.deployment import Deployment, Gpu, ProcessPlace, Topology
from embodrl.errors import MessageError
from embodrl.storage.files import raw_bytes

Blob = NDArray[np.uint8]
_ARRAY_KINDS = "biufU"
_BATCHES: dict[str, type[Batch]] = {"Batch": Batch, "TrajectoryBatch": TrajectoryBatch}
_RECORDS: dict[str, type[Any]] = {
    name: found for name, found in vars(types).items() if isinstance(found, type) and dataclasses.is_dataclass(found)
} | {found.__name__: found for found in (Deployment, Gpu, ProcessPlace, Topology)}


def pack(value: Any) -> tuple[bytes, list[Blob]]:
    """Return the description of a value as JSON, and the memory of its arrays and tensors, not copied where it can be.

    Tensors lose their gradient, and those of a GPU come to the CPU.

    Raises:
        MessageError: a part of it is of another type; says where.
    """
    blobs: list[Blob] = []
    return json.dumps(_describe(value, blobs, "the value")).encode(), blobs


def unpack(description: bytes | memoryview, blobs: list[memoryview]) -> Any:
    """Return the value; its tensors and arrays share the memory of the blobs.

    Raises:
        MessageError: the bytes are no description of a value.
    """
    try:
        return _restore(json.loads(bytes(description)), blobs)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise MessageError(f"a message can't be read: {error}", "run the same version of embodrl everywhere") from error


def copied(value: Any) -> Any:
    """Return what would arrive if the value were sent.

    Raises:
        MessageError: it can't be sent.
    """
    description, blobs = pack(value)
    return unpack(description, owned(blobs))


def owned(blobs: Iterable[Any]) -> list[memoryview]:
    """Return copies of blobs that may be written to."""
    return [memoryview(bytearray(blob)) for blob in blobs]


def _describe(value: Any, blobs: list[Blob], where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_describe(item, blobs, f"{where}[{i}]") for i, item in enumerate(cast(list[Any], value))]
    for kind, describe in _DESCRIBERS:
        if isinstance(value, kind):
            return describe(value, blobs, where)
    if type(value).__name__ in _RECORDS and type(value) is _RECORDS[type(value).__name__]:
        names = [item.name for item in dataclasses.fields(value)]
        fields = {name: _describe(getattr(value, name), blobs, f"{where}.{name}") for name in names}
        return {"record": type(value).__name__, "fields": fields}
    raise MessageError(
        f"{where} is a {type(value).__name__}, which can't be sent to a worker",
        "send plain values, arrays, tensors, batches, records of embodrl.types, or the configuration",
    )


def _blob(array: Blob, blobs: list[Blob]) -> int:
    blobs.append(array)
    return len(blobs) - 1


def _describe_tensor(value: Tensor, blobs: list[Blob], where: str) -> Any:
    if value.layout != torch.strided or value.is_quantized:
        raise MessageError(f"{where} is a {value.layout} tensor", "send a dense tensor")
    raw = np.frombuffer(raw_bytes(value), np.uint8)
    return {"tensor": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "blob": _blob(raw, blobs)}


def _describe_array(value: NDArray[Any], blobs: list[Blob], where: str) -> Any:
    shape = list(value.shape)
    if value.dtype.kind == "O":
        return {"objects": _describe(value.ravel().tolist(), blobs, where), "shape": shape}
    if value.dtype.kind not in _ARRAY_KINDS:
        raise MessageError(f"{where} is an array of {value.dtype}", "send numbers, truth values or text")
    raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return {"array": value.dtype.str, "shape": shape, "blob": _blob(raw, blobs)}


def _describe_dict(value: dict[Any, Any], blobs: list[Blob], where: str) -> Any:
    for key in value:
        if type(key) not in (str, int):
            raise MessageError(f"{where} has a key of type {type(key).__name__}", "use text or integers as keys")
    return {"dict": [[key, _describe(item, blobs, f"{where}[{key!r}]")] for key, item in value.items()]}


def _describe_batch(value: Batch, blobs: list[Blob], where: str) -> Any:
    name = type(value).__name__
    if _BATCHES.get(name) is not type(value):
        raise MessageError(f"{where} is a batch of the class {name}", f"send one of {', '.join(_BATCHES)}")
    parts = {"columns": value.tensors.to_dict(), "objects": value.objects, "meta": value.meta}
    described = {key: _describe(part, blobs, f"{where}.{key}") for key, part in parts.items()}
    return {"batch": name, "size": list(value.batch_size), **described}


_DESCRIBERS: tuple[tuple[type, Callable[[Any, list[Blob], str], Any]], ...] = (
    (Tensor, _describe_tensor),
    (np.ndarray, _describe_array),
    (np.generic, lambda value, blobs, where: _describe_array(np.asarray(value), blobs, where) | {"scalar": True}),
    (Batch, _describe_batch),
    (bytes, lambda value, blobs, where: {"bytes": _blob(np.frombuffer(value, np.uint8), blobs)}),
    (
        tuple,
        lambda value, blobs, where: {"tuple": [_describe(v, blobs, f"{where}[{i}]") for i, v in enumerate(value)]},
    ),
    (dict, _describe_dict),
    (Config, lambda value, blobs, where: {"config": value.model_dump_json()}),
)


def _restore(node: Any, blobs: list[memoryview]) -> Any:
    if isinstance(node, list):
        return [_restore(item, blobs) for item in cast(list[Any], node)]
    if not isinstance(node, dict):
        return node
    item = cast(dict[str, Any], node)
    kind = next(iter(item))
    if kind == "tensor":
        dtype = getattr(torch, item["tensor"])
        raw = blobs[item["blob"]]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"no dtype {item['tensor']}")
        flat = torch.frombuffer(raw, dtype=torch.uint8) if len(raw) else torch.empty(0, dtype=torch.uint8)
        return flat.view(dtype).reshape(item["shape"])
    if kind == "array":
        array = np.frombuffer(blobs[item["blob"]], np.uint8).view(_array_dtype(item["array"])).reshape(item["shape"])
        return array[()] if item.get("scalar") else array
    if kind == "objects":
        things = _restore(item["objects"], blobs)
        array = np.empty(len(things), dtype=object)
        for index, thing in enumerate(things):
            array[index] = thing
        return array.reshape(item["shape"])
    return _RESTORERS[kind](item, blobs)


def _array_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"array of dtype {name} refused")
    return dtype


def _restore_batch(item: dict[str, Any], blobs: list[memoryview]) -> Batch:
    parts = (_restore(item[key], blobs) for key in ("columns", "objects", "meta"))
    return _BATCHES[item["batch"]](*parts, batch_size=item["size"])


def _restore_record(item: dict[str, Any], blobs: list[memoryview]) -> Any:
    return _RECORDS[item["record"]](**{name: _restore(part, blobs) for name, part in item["fields"].items()})


_RESTORERS: dict[str, Callable[[dict[str, Any], list[memoryview]], Any]] = {
    "dict": lambda item, blobs: {key: _restore(part, blobs) for key, part in item["dict"]},
    "tuple": lambda item, blobs: tuple(_restore(part, blobs) for part in item["tuple"]),
    "bytes": lambda item, blobs: bytes(blobs[item["bytes"]]),
    "batch": _restore_batch,
    "record": _restore_record,
    "config": lambda item, blobs: Config.model_validate_json(item["config"]),
}
