"""Batches on disk: one safetensors file, whole or not there, whose header carries the rest as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import BatchError
from embodrl.storage.atomic import atomic_file
from embodrl.storage.files import write_safetensors

FORMAT = 1
HEADER = "embodrl_batch"


def save_batch(batch: TrajectoryBatch, path: Path) -> None:
    """Write a batch; a file that was there before stays until the new one is whole.

    Raises:
        BatchError: objects or meta are nothing that JSON can hold, such as a tuple, or a key that is no text.
        OutputError: the file can't be written; nothing half-written is left.
    """
    columns = [list(column) for column, _ in batch.leaves()]
    tensors = {str(number): tensor for number, (_, tensor) in enumerate(batch.leaves())}
    header = {
        "format": FORMAT,
        "batch_size": list(batch.batch_size),
        "columns": columns,
        "groups": _groups(batch.tensors.to_dict(), []),
        "objects": {name: _encode(name, values) for name, values in batch.objects.items()},
        "meta": _checked(batch.meta, "meta"),
    }
    with atomic_file(Path(path)) as partial:
        write_safetensors(partial, tensors, {HEADER: json.dumps(header)})


def load_batch(path: Path) -> TrajectoryBatch:
    """Read what ``save_batch`` wrote, onto the CPU.

    Raises:
        BatchError: there is no such file, or it is damaged or of another kind.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})[HEADER])
            if header["format"] != FORMAT:
                raise BatchError(f"{path} has format {header['format']}, not {FORMAT}", "save the batch anew")
            tree: dict[str, Any] = {}
            for group in header["groups"]:
                _node(tree, group)
            for number, column in enumerate(header["columns"]):
                _node(tree, column[:-1])[column[-1]] = file.get_tensor(str(number))
        objects = {name: _decode(encoded) for name, encoded in header["objects"].items()}
        return TrajectoryBatch(tree, objects, header["meta"], header["batch_size"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise BatchError(f"{path} holds no batch: {error}", "name a file that save_batch wrote") from error


def batch_to_tensors(batch: TrajectoryBatch) -> dict[str, Tensor]:
    """Return the columns under names that ``batch_from_tensors`` can read, for files that hold more than a batch.

    Raises:
        BatchError: the batch has objects, which are no tensors.
    """
    if batch.objects:
        raise BatchError(f"objects {', '.join(batch.objects)} are no tensors", "use save_batch")
    return {json.dumps(list(path)): tensor for path, tensor in batch.leaves()}


def batch_from_tensors(tensors: dict[str, Tensor], batch_size: list[int], meta: dict[str, Any]) -> TrajectoryBatch:
    """Return the batch of ``batch_to_tensors``.

    Args:
        tensors: what it returned.
        batch_size: ``[N]`` or ``[T,N]``.
        meta: of the batch.

    Raises:
        BatchError: these are no tensors of a batch.
    """
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        try:
            path = json.loads(name)
            _node(tree, path[:-1])[path[-1]] = tensor
        except (ValueError, TypeError, IndexError) as error:
            raise BatchError(f"'{name}' is no column of a batch", "read what batch_to_tensors wrote") from error
    return TrajectoryBatch(tree, None, meta, batch_size)


def _groups(node: dict[str, Any], path: list[str]) -> list[list[str]]:
    """Return the paths of the groups of columns, of the empty ones too."""
    found: list[list[str]] = []
    for name, child in node.items():
        if isinstance(child, dict):
            found += [[*path, name], *_groups(child, [*path, name])]
    return found


def _node(tree: dict[str, Any], path: list[str]) -> dict[str, Any]:
    for name in path:
        tree = tree.setdefault(name, {})
    return tree


def _encode(name: str, values: NDArray[Any]) -> dict[str, Any]:
    if values.dtype.kind not in "OUbiuf":
        raise BatchError(f"objects '{name}' of type {values.dtype} can't be saved", "make them text or numbers")
    things = values.ravel().tolist()
    return {"dtype": values.dtype.str, "shape": list(values.shape), "values": _checked(things, f"objects '{name}'")}


def _decode(encoded: dict[str, Any]) -> NDArray[Any]:
    dtype = np.dtype(encoded["dtype"])
    if dtype.kind != "O":
        return np.array(encoded["values"], dtype=dtype).reshape(encoded["shape"])
    values = np.empty(len(encoded["values"]), dtype=object)
    for index, thing in enumerate(encoded["values"]):
        values[index] = thing
    return values.reshape(encoded["shape"])


def _checked(value: Any, where: str) -> Any:
    """Return a value that comes back from JSON as it is."""
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _checked(child, where) for name, child in value.items()}
    if type(value) is list:
        return [_checked(child, where) for child in value]
    if value is None or type(value) in (str, bool, int, float):
        return value
    raise BatchError(f"{where}: {type(value).__name__} can't be saved as JSON", "make it text, numbers, lists or dicts")
