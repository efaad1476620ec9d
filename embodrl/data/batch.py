"""The record that workers hand to each other: tensors, data of other kinds for each row, and meta.

A batch is flat, ``[N]``, or has time, ``[T,N]``. Rows are the last of these axes: environments of a rollout, or chunks
once time has been folded away. What works on rows works on both. Unless it says otherwise, a method leaves its batch as
it is and returns another; slices, chunks and folds share memory with it.

Legend: T steps, N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from embodrl.data.balance import balanced_order
from embodrl.data.columns import (
    Rows,
    as_group,
    as_objects,
    check_layout,
    check_same,
    leaves,
    listed,
    merge,
    num_rows_of,
    row_index,
)
from embodrl.data.compare import is_same
from embodrl.errors import BatchError, BatchIndexError, BatchKeyError, BatchShapeError

Key = str | tuple[str, ...]


class Batch:
    """Rows of tensors, which may be nested, of other data, and meta that belongs to all of them.

    Args:
        columns: tensors by name, each ``[N,...]`` or ``[T,N,...]``; a dictionary makes a group of columns.
        objects: what is no tensor, by name: a list of N things (the same at all steps) or an array ``[N,...]`` or
            ``[T,N,...]``.
        meta: about the whole batch.
        batch_size: ``[N]`` or ``[T,N]``; without it ``[N]``, the length of the first column.

    Raises:
        BatchShapeError: a column does not fit the batch size.
    """

    __slots__ = ("meta", "objects", "tensors")

    def __init__(
        self,
        columns: Mapping[str, Any] | TensorDict,
        objects: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        batch_size: Sequence[int] | None = None,
    ) -> None:
        if batch_size is None:
            batch_size = (
                columns.batch_size if isinstance(columns, TensorDict) else [num_rows_of(columns, objects or {})]
            )
        if len(batch_size) not in (1, 2) or (len(batch_size) == 2 and not batch_size[0]):
            raise BatchShapeError(f"batch size {list(batch_size)}", "give [N], or [T, N] with at least one step")
        self.tensors = TensorDict({}, batch_size=list(batch_size))
        self.objects: dict[str, NDArray[Any]] = {}
        self.meta: dict[str, Any] = dict(meta or {})
        both = set(map(str, columns.keys())) & set(objects or {})
        if both:
            raise BatchKeyError(f"{listed(both)}: among the columns and among the objects", "rename one of them")
        for name, column in columns.items():
            self[name] = cast(Any, column)
        for name, values in (objects or {}).items():
            self.objects[name] = as_objects(name, values, self.batch_size)

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> tuple[int, ...]:
        """``(N,)`` or ``(T, N)``."""
        return tuple(self.tensors.batch_size)

    @property
    def num_steps(self) -> int | None:
        """T; None for a flat batch."""
        return self.batch_size[0] if len(self.batch_size) == 2 else None

    @property
    def row_dim(self) -> int:
        """The axis of the rows."""
        return len(self.batch_size) - 1

    def __len__(self) -> int:
        return self.batch_size[-1]

    def __repr__(self) -> str:
        columns = {"/".join(path): list(tensor.shape) for path, tensor in self.leaves()}
        return f"{type(self).__name__}({list(self.batch_size)}, {columns}, objects={list(self.objects)})"

    def names(self) -> list[str]:
        """Return the names of columns, of groups of them, and of objects."""
        return [*map(str, self.tensors.keys()), *self.objects]

    def leaves(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yield every tensor with its path, that of a column in a group last."""
        yield from leaves(self.tensors, ())

    def __contains__(self, key: object) -> bool:
        return key in self.objects or (isinstance(key, str | tuple) and self.tensors.get(key) is not None)

    def equals(self, other: Batch) -> bool:
        """Tell whether size, columns, dtypes, values, objects and meta are the same; NaN equals NaN."""
        return (
            self.batch_size == other.batch_size
            and is_same(self.tensors.to_dict(), other.tensors.to_dict())
            and is_same(self.objects, other.objects)
            and is_same(self.meta, other.meta)
        )

    # -- columns ------------------------------------------------------------------------------------------------------

    def get(self, key: Key) -> Any:
        """Return a tensor, a group of columns as a dictionary, or an array of objects; None if there is none."""
        if key in self.objects:
            return self.objects[cast(str, key)]
        found = self.tensors.get(key)
        return found.to_dict() if isinstance(found, TensorDict) else found

    def __getitem__(self, key: Key | Rows) -> Any:
        """Return a column by name or, as a batch, rows by a number, slice, list or mask.

        Raises:
            BatchKeyError: there is no such column.
            BatchIndexError: there is no such row.
            BatchShapeError: the mask has another length.
        """
        if isinstance(key, str) or (isinstance(key, tuple) and all(isinstance(part, str) for part in key)):
            found = self.get(cast(Key, key))
            if found is None:
                raise self._no_column(cast(Key, key))
            return found
        if isinstance(key, slice) and (key.step is None or key.step > 0):
            return self._slice(key)
        return self._take(row_index(cast(Rows, key), len(self)))

    def __iter__(self) -> Iterator[Self]:
        """Yield the rows, each as a batch of one."""
        yield from self.split(1) if len(self) else ()

    def __setitem__(
        self, name: str, column: Tensor | Mapping[str, Any] | TensorDict | list[Any] | NDArray[Any]
    ) -> None:
        """Add or replace a column, a group of them, or (a list or an array) objects.

        Raises:
            BatchShapeError: it does not fit the batch size.
        """
        if isinstance(column, list | np.ndarray):
            self.objects[name] = as_objects(name, column, self.batch_size)
            self.tensors.pop(name, None)
            return
        for path, tensor in leaves(column, (name,)):
            if tuple(tensor.shape[: self.row_dim + 1]) != self.batch_size:
                raise BatchShapeError(
                    f"column '{'/'.join(path)}' has shape {list(tensor.shape)}, and the batch {list(self.batch_size)}",
                    "the first axes of a column are those of the batch",
                )
        self.objects.pop(name, None)
        self.tensors.set(name, column if isinstance(column, Tensor) else as_group(column, self.batch_size))

    def replace(self, **columns: Any) -> Self:
        """Return the batch with some columns added or replaced, or removed if None; the others are shared."""
        result = self._with(self.tensors.copy(), dict(self.objects))
        for name, column in columns.items():
            if column is not None:
                result[name] = column
            elif name in result:
                result.pop(name)
        return result

    def select(self, *keys: Key) -> Self:
        """Return the batch with these columns only; a tuple names a column of a group.

        Raises:
            BatchKeyError: one is not there.
        """
        for key in keys:
            if key not in self:
                raise self._no_column(key)
        tensors = self.tensors.select(*(key for key in keys if key not in self.objects))
        return self._with(tensors.copy(), {key: self.objects[cast(str, key)] for key in keys if key in self.objects})

    def pop(self, *keys: Key) -> Self:
        """Take columns out of this batch, and return them as a batch; ``union`` puts them back.

        Raises:
            BatchKeyError: one is not there; nothing is taken.
        """
        taken = self.select(*keys)
        for key in keys:
            if key in self.objects:
                del self.objects[cast(str, key)]
            else:
                self.tensors.del_(key)
        return taken

    def rename(self, names: Mapping[str, str]) -> Self:
        """Return the batch with columns, groups or objects renamed, old to new; two may swap.

        Raises:
            BatchKeyError: one is not there, or two would have the same name.
        """
        for old in names:
            if old not in self:
                raise self._no_column(old)
        renamed = [names.get(key, key) for key in self.names()]
        twice = sorted({name for name in renamed if renamed.count(name) > 1})
        if twice:
            raise BatchKeyError(f"after renaming, two columns would be called {listed(twice)}", "choose another name")
        result = self._with(TensorDict({}, batch_size=list(self.batch_size)), {})
        for key, column in self.tensors.items():
            result.tensors.set(names.get(str(key), str(key)), column)
        result.objects = {names.get(key, key): values for key, values in self.objects.items()}
        return result

    def union(self, other: Batch) -> Self:
        """Return the columns, objects and meta of both; what both have must be the same.

        Raises:
            BatchShapeError: the batches differ in size.
            BatchError: they differ in something that both have.
        """
        if self.batch_size != other.batch_size:
            raise BatchShapeError(
                f"a batch of {list(self.batch_size)} and one of {list(other.batch_size)} have no union",
                "take the same rows of both first",
            )
        result = self._with(self.tensors.copy(), dict(self.objects))
        merge(result.tensors, other.tensors, ())
        for name in other.names():
            if name in self and (name in self.objects or name in other.objects):
                check_same(f"column '{name}'", self.get(name), other.get(name))
        for name, value in other.meta.items():
            if name in self.meta:
                check_same(f"meta '{name}'", self.meta[name], value)
        result.objects |= other.objects
        result.meta |= other.meta
        return result

    # -- rows ---------------------------------------------------------------------------------------------------------

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of all parts, in order; of a single part, itself.

        Raises:
            BatchKeyError: they have not the same columns.
            BatchShapeError: a column differs in shape or dtype, or the parts in their number of steps.
            BatchError: there is no part, or meta differs.
        """
        if not parts:
            raise BatchError("no batches to concatenate", "give at least one")
        first = parts[0]
        for number, part in enumerate(parts[1:], start=1):
            check_layout(first, part, number)
        if len(parts) == 1:
            return first
        tensors = cast(TensorDict, torch.cat([part.tensors for part in parts], dim=first.row_dim))
        objects = {
            name: np.concatenate([part.objects[name] for part in parts], axis=first.row_dim) for name in first.objects
        }
        return first._with(tensors, objects)

    def chunk(self, num_parts: int) -> list[Self]:
        """Return that many parts of the same number of rows; ``concat`` joins them.

        Raises:
            BatchShapeError: the rows can't be divided so.
        """
        if num_parts < 1 or len(self) % num_parts:
            raise BatchShapeError(
                f"{len(self)} rows can't be divided by {num_parts}", f"pad({num_parts}) first, or split by size"
            )
        size = len(self) // num_parts
        return [self[i * size : (i + 1) * size] for i in range(num_parts)]

    def split(self, size: int) -> list[Self]:
        """Return parts of that many rows, the last perhaps of fewer; of an empty batch, itself."""
        if size < 1:
            raise BatchError(f"parts of {size} rows", "give a size of at least 1")
        return [self[start : start + size] for start in range(0, max(len(self), 1), size)]

    def repeat(self, times: int, interleave: bool = True) -> Self:
        """Return every row that many times: a a b b if interleaved, else a b a b."""
        if times < 1:
            raise BatchError(f"rows repeated {times} times", "give at least 1")
        rows = torch.arange(len(self))
        return self._take(rows.repeat_interleave(times) if interleave else rows.repeat(times))

    def reorder(self, order: Tensor | Sequence[int]) -> Self:
        """Return the rows in another order; that of ``order.argsort()`` undoes it.

        Raises:
            BatchIndexError: a row is missing or named twice.
        """
        index = torch.as_tensor(order, dtype=torch.int64, device="cpu")
        if index.shape != (len(self),) or not torch.equal(index.sort().values, torch.arange(len(self))):
            raise BatchIndexError(
                f"an order of shape {list(index.shape)} for {len(self)} rows", "name every row exactly once"
            )
        return self._take(index)

    def pad(self, divisor: int) -> tuple[Self, int]:
        """Return the batch with rows repeated from its start until the divisor divides them, and how many; see unpad.

        An empty batch stays empty.
        """
        if divisor < 1:
            raise BatchError(f"rows padded to a multiple of {divisor}", "give a divisor of at least 1")
        missing = -len(self) % divisor
        return (self._take(torch.arange(len(self) + missing) % len(self)) if missing else self), missing

    def unpad(self, num_padded: int) -> Self:
        """Return the batch without that many rows at its end."""
        if not 0 <= num_padded <= len(self):
            raise BatchIndexError(f"{num_padded} of {len(self)} rows can't be removed", "give what pad returned")
        return self[: len(self) - num_padded]

    def minibatches(self, size: int, epochs: int, generator: torch.Generator | int) -> Iterator[Self]:
        """Yield the rows in random order, in batches of at most ``size`` that are as even as can be.

        Args:
            size: rows of a minibatch.
            epochs: how often every row is drawn.
            generator: on the CPU, or a seed.
        """
        if size < 1:
            raise BatchError(f"minibatches of {size} rows", "give a size of at least 1")
        source = torch.Generator().manual_seed(generator) if isinstance(generator, int) else generator
        for _ in range(epochs if len(self) else 0):
            for rows in torch.randperm(len(self), generator=source).tensor_split(-(-len(self) // size)):
                yield self._take(rows)

    def balance(self, num_parts: int, lengths: Tensor | Sequence[int]) -> tuple[Self, Tensor]:
        """Return the rows in an order whose ``chunk(num_parts)`` have sums of lengths as equal as can be found.

        Args:
            num_parts: must divide the rows.
            lengths: ``[N]``, what each row costs.

        Returns:
            the batch, and the order ``int64[N]``; ``reorder(order.argsort())`` undoes it.

        Raises:
            BatchShapeError: there are not N lengths, or the rows can't be divided so.
        """
        order = balanced_order(lengths, num_parts)
        if len(order) != len(self):
            raise BatchShapeError(f"{len(order)} lengths for {len(self)} rows", "give one a row")
        return self._take(order), order

    # -- time and place -----------------------------------------------------------------------------------------------

    def fold(self) -> Self:
        """Return ``[T,N]`` as ``[T*N]``: first all rows of the first step.

        Raises:
            BatchShapeError: the batch has no time.
        """
        if self.num_steps is None:
            raise BatchShapeError(f"a batch of {list(self.batch_size)} has no time to fold", "it is flat already")
        rows = self.num_steps * len(self)
        tensors = self._apply(lambda x: x.flatten(0, 1), [rows])
        return self._with(tensors, {k: x.reshape(rows, *x.shape[2:]) for k, x in self.objects.items()})

    def unfold(self, num_steps: int) -> Self:
        """Return ``[T*N]`` as ``[T,N]``, undoing ``fold``.

        Raises:
            BatchShapeError: the batch has time already, or T does not divide its rows.
        """
        if self.num_steps is not None or num_steps < 1 or len(self) % num_steps:
            raise BatchShapeError(
                f"a batch of {list(self.batch_size)} can't be unfolded into {num_steps} steps",
                "the number of steps must divide the rows of a flat batch",
            )
        size = [num_steps, len(self) // num_steps]
        tensors = self._apply(lambda x: x.unflatten(0, size), size)
        return self._with(tensors, {k: x.reshape(*size, *x.shape[1:]) for k, x in self.objects.items()})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the batch with every tensor on the device."""
        moved = self._apply(lambda x: x.to(device, non_blocking=non_blocking), self.batch_size)
        return self._with(moved, dict(self.objects))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _with(self, tensors: TensorDict, objects: dict[str, NDArray[Any]]) -> Self:
        """Return a batch of parts that are known to fit, with a copy of the meta."""
        result = type(self).__new__(type(self))
        result.tensors, result.objects, result.meta = tensors, objects, dict(self.meta)
        return result

    def _apply(self, fn: Callable[[Tensor], Tensor], batch_size: Sequence[int]) -> TensorDict:
        return cast(TensorDict, self.tensors.apply(fn, batch_size=list(batch_size)))

    def _slice(self, rows: slice) -> Self:
        """Return the rows of a slice, sharing memory."""
        start, stop, step = rows.indices(len(self))
        where = (slice(None),) * self.row_dim + (slice(start, stop, min(step, len(self) + 1)),)  # torch: int64
        size = [*self.batch_size[:-1], len(range(start, stop, step))]
        return self._with(self._apply(lambda x: x[where], size), {name: x[where] for name, x in self.objects.items()})

    def _take(self, index: Tensor) -> Self:
        """Return the rows of those indices ``int64[M]``, copied."""
        dim, rows = self.row_dim, index.numpy()
        tensors = self._apply(lambda x: x.index_select(dim, index.to(x.device)), [*self.batch_size[:-1], len(index)])
        return self._with(tensors, {name: x.take(rows, axis=dim) for name, x in self.objects.items()})

    def _no_column(self, key: Key) -> BatchKeyError:
        name = key if isinstance(key, str) else "/".join(key)
        return BatchKeyError(f"the batch has no column '{name}'; it has {listed(self.names())}", "name one of these")
