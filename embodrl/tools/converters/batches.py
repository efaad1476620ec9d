"""Conversion of batches to the dictionaries of verl and AReaL; neither library is required.

verl and AReaL keep rows in the first axis. A batch with time becomes ``[N,T,...]``, and a column of a group gets a
dotted name; the lost structure (nesting, time) is stored under the key ``embodrl``, so that a round trip gives the same
batch. Foreign dictionaries also survive a round trip unchanged.

Shapes: N rows, T steps, L tokens or steps of the longest trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

import numpy as np
import torch
from torch import Tensor

from embodrl.data.columns import Array, Group, group_at
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import BatchError, BatchKeyError, BatchShapeError

NOTE = "embodrl"
MASK = "attention_mask"
VERL_PARTS = {"batch", "non_tensor_batch", "meta_info"}


class Note(TypedDict, total=False):
    """Information that the flat dictionaries of other libraries cannot express.

    Attributes:
        nested: path of a column in a group, by its dotted name.
        empty: paths of groups without columns.
        num_steps: T of a batch with time.
        num_rows: N of a batch without columns and objects.
        meta: meta of the batch, if the format has no place for it.
        arrays: dtype and shape of objects that became lists.
        mask_added: the ``attention_mask`` is not a column of the batch.
    """

    nested: dict[str, list[str]]
    empty: list[list[str]]
    num_steps: int
    num_rows: int
    meta: dict[str, Any]
    arrays: dict[str, _ArrayKind]
    mask_added: bool


class _ArrayKind(TypedDict):
    dtype: str
    shape: list[int]


class VerlParts(TypedDict):
    """The three parts of verl's DataProto."""

    batch: dict[str, Tensor]
    non_tensor_batch: dict[str, Array]
    meta_info: dict[str, Any]


def to_verl(batch: TrajectoryBatch) -> VerlParts:
    """Return the three parts of verl's DataProto: ``batch``, ``non_tensor_batch`` and ``meta_info``.

    ``batch`` holds tensors ``[N,...]``, ready for a TensorDict of that length, and ``non_tensor_batch`` arrays with N
    entries. ``meta_info["embodrl"]`` is the note, if needed.

    Raises:
        BatchKeyError: two columns would have the same name, or meta uses the key of the note.
    """
    columns, objects, note = _flatten(batch)
    if NOTE in batch.meta:
        raise BatchKeyError(f"meta has a key '{NOTE}', which the converter needs", "rename it")
    meta = batch.meta | ({NOTE: note} if note else {})
    return {"batch": columns, "non_tensor_batch": objects, "meta_info": meta}


def from_verl(parts: Mapping[str, Any]) -> TrajectoryBatch:
    """Return the batch of the three parts of a DataProto (see ``to_verl``); each may be missing or None.

    Raises:
        BatchKeyError: unknown part.
        BatchShapeError: columns differ in length.
    """
    unknown = sorted(parts.keys() - VERL_PARTS)
    if unknown:
        raise BatchKeyError(
            f"a DataProto has no part {', '.join(unknown)}; it has {', '.join(sorted(VERL_PARTS))}",
            "put tensors into batch, everything else into non_tensor_batch or meta_info",
        )
    meta = dict(parts.get("meta_info") or {})
    note = meta.pop(NOTE, {})
    return _unflatten(dict(parts.get("batch") or {}), dict(parts.get("non_tensor_batch") or {}), meta, note)


def to_areal(batch: TrajectoryBatch) -> dict[str, Any]:
    """Return a dictionary as AReaL passes trajectories: tensors ``[N,L,...]`` or ``[N]``, and lists of N objects.

    A batch with time gets an ``attention_mask``, ``bool[N,T]``, true where a chunk has a valid action, unless it has
    such a column. Meta and other content that the format cannot express are under ``embodrl``.

    Raises:
        BatchKeyError: two entries would have the same name.
    """
    columns, objects, note = _flatten(batch)
    if batch.meta:
        note["meta"] = dict(batch.meta)
    arrays: dict[str, _ArrayKind] = {
        name: {"dtype": values.dtype.str, "shape": list(values.shape)}
        for name, values in objects.items()
        if values.dtype.kind != "O" or values.ndim > 1
    }
    if arrays:
        note["arrays"] = arrays
    if batch.num_steps is not None and MASK not in columns:
        valid = columns.get("valid")
        mask = torch.ones(len(batch), batch.num_steps, dtype=torch.bool) if valid is None else valid.flatten(2).any(-1)
        columns = {MASK: mask} | columns
        note["mask_added"] = True
    both = sorted((columns.keys() & objects.keys()) | ({NOTE} & (columns.keys() | objects.keys())))
    if both:
        raise BatchKeyError(f"two entries would be called {', '.join(both)}", "rename one of them")
    return columns | {name: values.tolist() for name, values in objects.items()} | ({NOTE: note} if note else {})


def from_areal(trajectories: Mapping[str, Any]) -> TrajectoryBatch:
    """Return the batch of an AReaL dictionary (see ``to_areal``): tensors become columns, lists objects.

    Raises:
        BatchShapeError: entries differ in length.
        BatchError: an entry is neither a tensor nor a list.
    """
    entries = dict(trajectories)
    note = cast(Note, entries.pop(NOTE, {}))
    if note.get("mask_added"):
        del entries[MASK]
    columns = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    objects = {name: value for name, value in entries.items() if isinstance(value, list)}
    others = sorted(entries.keys() - columns.keys() - objects.keys())
    if others:
        raise BatchError(f"entry '{others[0]}' is neither a tensor nor a list", "pass a list with one object per row")
    kinds = note.get("arrays", {})
    arrays = {
        name: _array(value, kinds.get(name, {"dtype": "O", "shape": [len(value)]})) for name, value in objects.items()
    }
    return _unflatten(columns, arrays, note.get("meta", {}), note)


def from_areal_list(trajectories: Sequence[Mapping[str, Any]]) -> TrajectoryBatch:
    """Join trajectories of different length, zero-padding the second axis (length) of tensors at its end.

    Args:
        trajectories: dictionaries with ``attention_mask [N,L]``, the same entries each, and no note of ``to_areal``.

    Raises:
        BatchKeyError: one has no ``attention_mask``, or other entries than the first.
        BatchShapeError: a tensor differs in more than its length.
    """
    if any(not isinstance(part.get(MASK), Tensor) or part[MASK].ndim != 2 for part in trajectories):
        raise BatchKeyError(f"a trajectory has no {MASK} [N, L]", "add one, of ones where nothing is padded")
    longest = max((part[MASK].shape[1] for part in trajectories), default=0)
    return TrajectoryBatch.concat([from_areal(_padded(part, longest)) for part in trajectories])


def to_areal_list(batch: TrajectoryBatch) -> list[dict[str, Any]]:
    """Return one dictionary per row, cut after the last step of ``attention_mask``; inverts ``from_areal_list``.

    Raises:
        BatchKeyError: the batch has no ``attention_mask``.
    """
    masks = batch[MASK]
    result: list[dict[str, Any]] = []
    for row, mask in zip(batch.split(1), masks, strict=False):
        kept = mask.nonzero().flatten()
        length = int(kept[-1]) + 1 if len(kept) else 0
        result.append(
            {
                name: value[:, :length] if isinstance(value, Tensor) and value.ndim > 1 else value
                for name, value in to_areal(row).items()
            }
        )
    return result


def _padded(part: Mapping[str, Any], longest: int) -> dict[str, Any]:
    length = part[MASK].shape[1]
    padded = dict(part)
    for name, value in part.items():
        if not isinstance(value, Tensor) or value.ndim < 2:
            continue
        if value.shape[1] != length:
            raise BatchShapeError(
                f"'{name}' has shape {list(value.shape)}, and {MASK} {list(part[MASK].shape)}",
                "tensors with more than one axis have the length of the trajectory in the second",
            )
        padded[name] = torch.cat([value, value.new_zeros(len(value), longest - length, *value.shape[2:])], dim=1)
    return padded


def _flatten(batch: TrajectoryBatch) -> tuple[dict[str, Tensor], dict[str, Array], Note]:
    """Return columns and objects with rows first, and the note; empty if the dictionaries express everything."""
    timed = batch.num_steps is not None
    columns: dict[str, Tensor] = {}
    nested: dict[str, list[str]] = {}
    for path, tensor in batch.leaves():
        name = ".".join(path)
        if name in columns:
            raise BatchKeyError(f"two columns would be called '{name}'", "rename one of them")
        columns[name] = tensor.transpose(0, 1) if timed else tensor
        if len(path) > 1:
            nested[name] = list(path)
    objects = {name: values.swapaxes(0, 1) if timed else values for name, values in batch.objects.items()}
    note: Note = {"nested": nested} if nested else {}
    empty = _empty_groups(batch.tensors, [])
    if empty:
        note["empty"] = empty
    if batch.num_steps is not None:
        note["num_steps"] = batch.num_steps
    if not columns and not objects and len(batch):
        note["num_rows"] = len(batch)
    return columns, objects, note


def _empty_groups(node: Group, path: list[str]) -> list[list[str]]:
    found: list[list[str]] = []
    for name, child in node.items():
        if isinstance(child, dict):
            found += _empty_groups(child, [*path, name]) if child else [[*path, name]]
    return found


def _unflatten(
    columns: dict[str, Tensor], objects: dict[str, Array], meta: Mapping[str, Any], note: Note
) -> TrajectoryBatch:
    num_steps = note.get("num_steps")
    first = next(iter(columns.values()), next(iter(objects.values()), None))
    num_rows = len(first) if first is not None else note.get("num_rows", 0)
    batch_size = [num_rows] if num_steps is None else [num_steps, num_rows]
    for name, column in columns.items():
        if not column.ndim or len(column) != num_rows:
            raise BatchShapeError(
                f"entry '{name}' has shape {list(column.shape)}, and the first one {num_rows} rows",
                "the first axis of every tensor is its rows",
            )
    tree: Group = {}
    for path in note.get("empty", []):
        group_at(tree, path)
    for name, column in columns.items():
        path = note.get("nested", {}).get(name, [name])
        group_at(tree, path[:-1])[path[-1]] = column if num_steps is None else column.transpose(0, 1)
    arrays = {name: values if num_steps is None else values.swapaxes(0, 1) for name, values in objects.items()}
    return TrajectoryBatch(tree, arrays, meta, batch_size)


def _array(values: list[Any], kind: _ArrayKind) -> Array:
    dtype = kind["dtype"]
    shape = kind["shape"]
    if np.dtype(dtype).kind != "O":
        return np.array(values, dtype=dtype).reshape(shape)
    things = np.empty(tuple(shape), dtype=object)
    for index in np.ndindex(*shape):
        thing: Any = values
        for i in index:
            thing = thing[i]
        things[index] = thing
    return things
