"""Batch, the record exchanged by workers: tensors, per-row objects, and metadata of the whole.

A batch is flat, ``[N]``, or has a time axis, ``[T,N]``. Rows are the last of these axes: environments of a rollout, or
chunks once time has been folded. Row operations work on both. Unless documented otherwise, a method leaves its batch
unchanged and returns a new one; slices and folds share memory with the original.

Shapes: T steps, N rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias, cast, overload

import numpy as np
import torch
from torch import Tensor

from embodrl.data.columns import (
    Array,
    Columns,
    Group,
    Rows,
    as_group,
    as_objects,
    at_path,
    brief,
    check_same,
    leaves,
    listed,
    mapped,
    num_rows_of,
    row_index,
)
from embodrl.errors import BatchError, BatchKeyError, BatchShapeError

Key: TypeAlias = str | tuple[str, ...]
Column: TypeAlias = "Tensor | Columns | list[Any] | Array"
"""Assignable values: a tensor, a group of columns, or (a list or an array) objects."""


def shuffled(num_rows: int, size: int, epochs: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the row numbers ``int64`` of ``Batch.minibatches``; raises BatchError for a size below 1."""
    if size < 1:
        raise BatchError(f"minibatches of {size} rows", "use a size of at least 1")
    for _ in range(epochs if num_rows else 0):
        # Nearly equal parts, so that no step is taken on a small remainder.
        yield from torch.randperm(num_rows, generator=generator).tensor_split(-(-num_rows // size))


class Batch:
    """Rows of tensors, which may be nested, of other per-row data, and metadata of the whole batch.

    Args:
        columns: tensors by name, each ``[N,...]`` or ``[T,N,...]``; a dictionary makes a group of columns.
        objects: non-tensor data by name: a list of N objects (the same at all steps) or an array ``[N,...]`` or
            ``[T,N,...]``.
        meta: metadata of the whole batch.
        batch_size: ``[N]`` or ``[T,N]``; by default ``[N]``, the length of the first column.

    Raises:
        BatchShapeError: a column does not fit the batch size.
        BatchKeyError: a name is used for both a column and objects.
    """

    __slots__ = ("batch_size", "meta", "objects", "tensors")

    def __init__(
        self,
        columns: Columns,
        objects: Mapping[str, list[Any] | Array] | None = None,
        meta: Mapping[str, Any] | None = None,
        batch_size: Sequence[int] | None = None,
    ) -> None:
        if batch_size is None:
            batch_size = [num_rows_of(columns, objects or {})]
        if len(batch_size) not in (1, 2) or (len(batch_size) == 2 and not batch_size[0]):
            raise BatchShapeError(f"batch size {list(batch_size)}", "use [N], or [T, N] with at least one step")
        self.batch_size = tuple(batch_size)  # (N,) or (T, N)
        self.tensors: Group = {}
        self.objects: dict[str, Array] = {}
        self.meta: dict[str, Any] = dict(meta or {})
        both = set(map(str, columns.keys())) & set(objects or {})
        if both:
            raise BatchKeyError(f"{listed(both)}: among the columns and among the objects", "rename one of them")
        for name, column in columns.items():
            self[str(name)] = cast(Column, column)
        for name, values in (objects or {}).items():
            self.objects[name] = as_objects(name, values, self.batch_size)

    # -- size and names -----------------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int | None:
        """T; None for a flat batch."""
        return self.batch_size[0] if len(self.batch_size) == 2 else None

    @property
    def row_dim(self) -> int:
        """Axis of the rows."""
        return len(self.batch_size) - 1

    def __len__(self) -> int:
        return self.batch_size[-1]

    def __repr__(self) -> str:
        columns = {"/".join(path): list(tensor.shape) for path, tensor in self.leaves()}
        return f"{type(self).__name__}({list(self.batch_size)}, {columns}, objects={list(self.objects)})"

    def names(self) -> list[str]:
        """Return the names of columns, column groups and objects."""
        return [*self.tensors, *self.objects]

    def leaves(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yield every tensor with its path, which ends with the tensor's own name."""
        yield from leaves(self.tensors, ())

    def __contains__(self, key: object) -> bool:
        return key in self.objects or (isinstance(key, str | tuple) and at_path(self.tensors, _path(key)) is not None)

    # -- columns ------------------------------------------------------------------------------------------------------

    def get(self, key: Key) -> Any:
        """Return a tensor, a group of columns as a dictionary, or an array of objects; None if there is none."""
        if key in self.objects:
            return self.objects[cast(str, key)]
        found = at_path(self.tensors, _path(key))
        return as_group(found) if isinstance(found, dict) else found

    @overload
    def __getitem__(self, key: Key) -> Any: ...
    @overload
    def __getitem__(self, key: Rows) -> Self: ...
    def __getitem__(self, key: Key | Rows) -> Any:
        """Return a column by name or, as a batch, rows by index, slice, list or mask.

        Raises:
            BatchKeyError: no such column.
            BatchIndexError: no such row.
            BatchShapeError: the mask has the wrong length.
        """
        if isinstance(key, str) or (isinstance(key, tuple) and all(isinstance(part, str) for part in key)):
            found = self.get(cast(Key, key))
            if found is None:
                raise _no_column(self, cast(Key, key))
            return found
        if isinstance(key, slice) and (key.step is None or key.step > 0):
            return self._slice(key)
        return self._take(row_index(cast(Rows, key), len(self)))

    def __iter__(self) -> Iterator[Self]:
        """Yield the rows as batches of size one."""
        yield from self.split(1) if len(self) else ()

    def __setitem__(self, name: str, column: Column) -> None:
        """Add or replace a column, a column group, or objects; BatchShapeError if the value does not fit."""
        if isinstance(column, list | np.ndarray):
            self.objects[name] = as_objects(name, column, self.batch_size)
            self.tensors.pop(name, None)
            return
        for path, tensor in leaves(column, (name,)):
            if tuple(tensor.shape[: self.row_dim + 1]) != self.batch_size:
                raise BatchShapeError(
                    f"column '{'/'.join(path)}' has shape {list(tensor.shape)}, and the batch {list(self.batch_size)}",
                    "the first axes of a column must be the batch axes",
                )
        self.objects.pop(name, None)
        self.tensors[name] = column if isinstance(column, Tensor) else as_group(column)

    def replace(self, **columns: Column | None) -> Self:
        """Return the batch with columns added, replaced, or (if None) removed; the others are shared."""
        # Copy the dictionaries, not the tensors: an added column must not show in the original.
        result = self._with(as_group(self.tensors), dict(self.objects))
        for name, column in columns.items():
            if column is not None:
                result[name] = column
            elif name in result:
                Batch.pop(result, name)
        return result

    def select(self, *keys: Key) -> Self:
        """Return the batch with only these columns; a tuple names a column of a group. Raises BatchKeyError."""
        for key in keys:
            if key not in self:
                raise _no_column(self, key)
        tensors: Group = {}
        for *groups, name in (_path(key) for key in keys if key not in self.objects):
            target = tensors
            for group in groups:
                target = cast(Group, target.setdefault(group, {}))
            target[name] = cast("Tensor | Group", at_path(self.tensors, (*groups, name)))
        objects = {key: self.objects[cast(str, key)] for key in keys if key in self.objects}
        return self._with(as_group(tensors), objects)

    def pop(self, *keys: Key) -> Self:
        """Remove columns from this batch and return them as a batch; on BatchKeyError nothing is removed."""
        # Select first: if a name is unknown, nothing is removed.
        taken = cast("Self", Batch.select(self, *keys))  # a subclass may spell it otherwise
        for key in keys:
            if key in self.objects:
                del self.objects[cast(str, key)]
            else:
                *groups, name = _path(key)
                del cast(Group, at_path(self.tensors, tuple(groups)))[name]
        return taken

    # -- rows ---------------------------------------------------------------------------------------------------------

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of all parts, in order; a single part is returned as is.

        Raises:
            BatchKeyError: the columns differ.
            BatchShapeError: a column differs in shape or dtype, or the parts differ in their number of steps.
            BatchError: there are no parts, or their meta differs.
        """
        if not parts:
            raise BatchError("no batches to concatenate", "pass at least one")
        first = parts[0]
        for number, part in enumerate(parts[1:], start=1):
            _check_layout(first, part, number)
        if len(parts) == 1:
            return first
        tensors = mapped(lambda *columns: torch.cat(columns, dim=first.row_dim), *(part.tensors for part in parts))
        objects = {
            name: np.concatenate([part.objects[name] for part in parts], axis=first.row_dim) for name in first.objects
        }
        return first._with(tensors, objects, (*first.batch_size[:-1], sum(map(len, parts))))

    def split(self, size: int) -> list[Self]:
        """Split into parts of ``size`` rows; the last may be smaller. An empty batch gives one empty part."""
        if size < 1:
            raise BatchError(f"parts of {size} rows", "use a size of at least 1")
        return [self[start : start + size] for start in range(0, max(len(self), 1), size)]

    def minibatches(self, size: int, epochs: int, generator: torch.Generator | int) -> Iterator[Self]:
        """Yield the rows in random order, ``epochs`` times, in nearly equal batches of at most ``size``.

        ``generator`` is a CPU generator or a seed.
        """
        source = torch.Generator().manual_seed(generator) if isinstance(generator, int) else generator
        for rows in shuffled(len(self), size, epochs, source):
            yield self._take(rows)

    # -- time and device ----------------------------------------------------------------------------------------------

    def fold(self) -> Self:
        """Return ``[T,N]`` as ``[T*N]``, step by step; BatchShapeError if the batch has no time axis."""
        if self.num_steps is None:
            raise BatchShapeError(f"a batch of {list(self.batch_size)} has no time axis to fold", "it is flat already")
        rows = self.num_steps * len(self)
        tensors = mapped(lambda x: x.flatten(0, 1), self.tensors)
        return self._with(tensors, {k: x.reshape(rows, *x.shape[2:]) for k, x in self.objects.items()}, (rows,))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the batch with every tensor on the device."""
        moved = mapped(lambda x: x.to(device, non_blocking=non_blocking), self.tensors)
        return self._with(moved, dict(self.objects))

    # -- internals ----------------------------------------------------------------------------------------------------

    def _with(self, tensors: Group, objects: dict[str, Array], batch_size: tuple[int, ...] | None = None) -> Self:
        """Return a batch of parts known to fit, with a copy of the meta; None keeps the batch size."""
        # Bypass the constructor, whose checks these parts have passed.
        result = type(self).__new__(type(self))
        result.tensors = tensors
        result.objects = objects
        result.meta = dict(self.meta)
        result.batch_size = self.batch_size if batch_size is None else batch_size
        return result

    def _slice(self, rows: slice) -> Self:
        start, stop, step = rows.indices(len(self))
        # torch accepts only steps that fit int64; a step beyond the end selects the same rows.
        where = (slice(None),) * self.row_dim + (slice(start, stop, min(step, len(self) + 1)),)
        size = (*self.batch_size[:-1], len(range(start, stop, step)))
        objects = {name: x[where] for name, x in self.objects.items()}
        return self._with(mapped(lambda x: x[where], self.tensors), objects, size)

    def _take(self, index: Tensor) -> Self:
        """Return the rows at ``int64[M]``, copied."""
        dim = self.row_dim
        rows = index.numpy()
        tensors = mapped(lambda x: x.index_select(dim, index.to(x.device)), self.tensors)
        objects = {name: x.take(rows, axis=dim) for name, x in self.objects.items()}
        return self._with(tensors, objects, (*self.batch_size[:-1], len(index)))


def _no_column(batch: Batch, key: Key) -> BatchKeyError:
    name = key if isinstance(key, str) else "/".join(key)
    return BatchKeyError(f"the batch has no column '{name}'; it has {listed(batch.names())}", "name one of these")


def _path(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _check_layout(first: Batch, other: Batch, number: int) -> None:
    """Raise unless part ``number`` can be joined to the first."""
    if first.batch_size[:-1] != other.batch_size[:-1]:
        raise BatchShapeError(
            f"batch 0 is {list(first.batch_size)} and batch {number} {list(other.batch_size)}",
            "only the number of rows (the last axis) may differ",
        )
    left_columns, right_columns = (
        {"/".join(path): tensor for path, tensor in batch.leaves()} | batch.objects for batch in (first, other)
    )
    left_names = {*left_columns, *first.names()}
    right_names = {*right_columns, *other.names()}
    if left_names != right_names:
        raise BatchKeyError(
            f"batch 0 has the columns {listed(left_names)}, and batch {number} {listed(right_names)}",
            "select the columns that both have",
        )
    start = first.row_dim + 1
    for name, left in left_columns.items():
        right = right_columns[name]
        # Text arrays differ in dtype by their longest text; numpy can join them.
        texts = all(isinstance(x, np.ndarray) and x.dtype.kind == "U" for x in (left, right))
        if left.shape[start:] != right.shape[start:] or (left.dtype != right.dtype and not texts):
            raise BatchShapeError(
                f"column '{name}' is {brief(left)} in batch 0 and {brief(right)} in batch {number}",
                "only the number of rows may differ",
            )
    check_same("meta", first.meta, other.meta)
