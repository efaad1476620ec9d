"""What a batch is made of, and what batches must have in common: columns in groups, objects, names of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from embodrl.data.compare import is_same
from embodrl.errors import BatchError, BatchIndexError, BatchKeyError, BatchShapeError

if TYPE_CHECKING:
    from embodrl.data.batch import Batch

Rows = int | slice | Sequence[int] | Sequence[bool] | Tensor | NDArray[Any]


def leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the tensors of nested groups with their paths.

    Raises:
        BatchShapeError: something is no tensor.
    """
    if isinstance(node, Mapping | TensorDict):
        for name, child in node.items():
            yield from leaves(child, (*path, str(name)))
    elif isinstance(node, Tensor):
        yield path, node
    else:
        raise BatchShapeError(f"column '{'/'.join(path)}' is no tensor but {type(node).__name__}", "give it as objects")


def as_group(columns: Mapping[str, Any] | TensorDict, batch_size: tuple[int, ...]) -> TensorDict:
    """Return a group of columns, and of groups of them, that fit the batch size."""
    group = TensorDict({}, batch_size=list(batch_size))
    for name, column in columns.items():
        group.set(name, column if isinstance(column, Tensor) else as_group(cast(Any, column), batch_size))
    return group


def merge(into: TensorDict, other: TensorDict, path: tuple[str, ...]) -> None:
    """Add the columns of another; those that both have must be the same."""
    for name, column in other.items():
        known, here = into.get(name), (*path, str(name))
        if isinstance(known, TensorDict) and isinstance(column, TensorDict):
            merge(known, column, here)
        elif known is None:
            into.set(name, column.copy() if isinstance(column, TensorDict) else column)
        else:
            check_same(f"column '{'/'.join(here)}'", known, column)


def num_rows_of(columns: Mapping[str, Any], objects: Mapping[str, Any]) -> int:
    """Return the length of the first column, or of the first objects; 0 without any.

    Raises:
        BatchShapeError: the first column is a scalar.
    """
    for path, tensor in leaves(columns, ()):
        if not tensor.ndim:
            raise BatchShapeError(f"column '{'/'.join(path)}' is a scalar", "the first axis of a column is its rows")
        return len(tensor)
    return next((len(values) for values in objects.values()), 0)


def as_objects(name: str, values: Any, batch_size: tuple[int, ...]) -> NDArray[Any]:
    """Return objects as an array that begins with the axes of the batch; a list of one a row is the same at all steps.

    Raises:
        BatchShapeError: they do not fit.
    """
    if not isinstance(values, np.ndarray):
        things = list(values)
        values = np.empty(len(things), dtype=object)
        for index, thing in enumerate(things):  # numpy would take things of equal length for further axes
            values[index] = thing
        if len(batch_size) == 2 and len(things) == batch_size[1]:
            values = np.broadcast_to(values, batch_size).copy()
    if tuple(values.shape[: len(batch_size)]) != batch_size:
        raise BatchShapeError(
            f"objects '{name}' have shape {list(values.shape)}, and the batch {list(batch_size)}",
            "give a list of one thing a row",
        )
    return values


def row_index(rows: Rows, num_rows: int) -> Tensor:
    """Return ``int64[M]``, on the CPU, of what names rows.

    Raises:
        BatchIndexError: there is no such row.
        BatchShapeError: a mask has another length.
    """
    if isinstance(rows, slice):
        return torch.tensor(range(num_rows)[rows], dtype=torch.int64)
    index = torch.as_tensor([rows] if isinstance(rows, int | np.integer) else rows)
    if index.ndim != 1 or (index.is_floating_point() and len(index)):
        raise BatchIndexError(f"rows named by {index.dtype} of shape {list(index.shape)}", "give a list or a mask")
    if index.dtype == torch.bool:
        if len(index) != num_rows:
            raise BatchShapeError(f"a mask of {len(index)} for {num_rows} rows", "give one truth value a row")
        return index.nonzero().squeeze(-1).cpu()
    index = index.to("cpu", torch.int64)
    if len(index) and not -num_rows <= int(index.min()) <= int(index.max()) < num_rows:
        raise BatchIndexError(f"row {int(index.max())} or {int(index.min())} of {num_rows}", "count from 0")
    return torch.where(index < 0, index + num_rows, index)


def listed(names: Iterable[str]) -> str:
    """Return names in alphabetical order, for a message."""
    return ", ".join(sorted(names)) or "none"


def check_same(what: str, left: Any, right: Any) -> None:
    """Raise BatchError unless two batches have the same of something."""
    if not is_same(left, right):
        raise BatchError(
            f"{what} is {brief(left)} in one batch and {brief(right)} in the other, with other content or type",
            "rename or remove one of them",
        )


def brief(value: Any) -> str:
    """Return what a value is, for a message."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return repr(value) if len(repr(value)) <= 60 else f"{type(value).__name__} of {len(repr(value))} characters"


def check_layout(first: Batch, other: Batch, number: int) -> None:
    """Raise unless a part, by its number, can be joined to the first.

    Raises:
        BatchKeyError: it has other columns.
        BatchShapeError: shapes or dtypes differ in more than the number of rows.
        BatchError: meta differs.
    """
    if first.batch_size[:-1] != other.batch_size[:-1]:
        raise BatchShapeError(
            f"batch 0 is {list(first.batch_size)} and batch {number} {list(other.batch_size)}",
            "only the number of rows, the last one, may differ",
        )
    left_columns, right_columns = _columns(first), _columns(other)
    left_names, right_names = {*left_columns, *first.names()}, {*right_columns, *other.names()}
    if left_names != right_names:
        raise BatchKeyError(
            f"batch 0 has the columns {listed(left_names)}, and batch {number} {listed(right_names)}",
            "select the columns that both have",
        )
    start = first.row_dim + 1
    for name, left in left_columns.items():
        right = right_columns[name]
        texts = all(isinstance(x, np.ndarray) and x.dtype.kind == "U" for x in (left, right))
        if left.shape[start:] != right.shape[start:] or (left.dtype != right.dtype and not texts):
            raise BatchShapeError(
                f"column '{name}' is {brief(left)} in batch 0 and {brief(right)} in batch {number}",
                "only the number of rows may differ",
            )
    check_same("meta", first.meta, other.meta)


def _columns(batch: Batch) -> dict[str, Tensor | NDArray[Any]]:
    return {"/".join(path): tensor for path, tensor in batch.leaves()} | batch.objects
