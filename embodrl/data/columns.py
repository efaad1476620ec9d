"""Parts of a batch: nested column groups, arrays of objects, row indices, and comparison of values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.errors import BatchError, BatchIndexError, BatchShapeError

Array: TypeAlias = NDArray[Any]
"""Array of any dtype; object dtype where rows are not numbers."""
Rows: TypeAlias = int | slice | Sequence[int] | Sequence[bool] | Tensor | Array
Columns: TypeAlias = "Mapping[str, Tensor | Columns]"
"""Tensors by name, possibly in nested groups."""
Group: TypeAlias = "dict[str, Tensor | Group]"
"""Columns of a batch or of a group in it.

Not tensordict's TensorDict: importing it imports torch's compiler, 1.5 s in every process.
"""


def leaves(node: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the tensors of nested groups with their paths; BatchShapeError if a leaf is not a tensor."""
    if isinstance(node, Mapping):
        for name, child in cast("Mapping[str, object]", node).items():
            yield from leaves(child, (*path, str(name)))
    elif isinstance(node, Tensor):
        yield path, node
    else:
        raise BatchShapeError(
            f"column '{'/'.join(path)}' must be a tensor, not {type(node).__name__}",
            "pass it as objects",
        )


def as_group(columns: Columns) -> Group:
    """Copy columns and groups into new dictionaries."""
    return {str(name): column if isinstance(column, Tensor) else as_group(column) for name, column in columns.items()}


def mapped(fn: Callable[..., Tensor], *groups: Group) -> Group:
    """Apply ``fn`` to the columns at each path of all groups, which must have the same paths."""
    found: Group = {}
    for name, first in groups[0].items():
        parts = [group[name] for group in groups]
        found[name] = fn(*parts) if isinstance(first, Tensor) else mapped(fn, *cast("list[Group]", parts))
    return found


def at_path(group: Group, path: tuple[str, ...]) -> Tensor | Group | None:
    """Return the column or group at a path; None if there is none."""
    found: Tensor | Group | None = group
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def group_at(group: Group, path: Sequence[str]) -> Group:
    """Return the group at a path, creating missing groups."""
    for name in path:
        group = cast("Group", group.setdefault(name, {}))
    return group


def num_rows_of(columns: Columns, objects: Mapping[str, Sequence[object] | Array]) -> int:
    """Return the length of the first column or objects, 0 without any; BatchShapeError for a scalar column."""
    for path, tensor in leaves(columns, ()):
        if not tensor.ndim:
            raise BatchShapeError(
                f"column '{'/'.join(path)}' is a scalar", "the first axis of a column must be the rows"
            )
        return len(tensor)
    return next((len(values) for values in objects.values()), 0)


def as_objects(name: str, values: Sequence[object] | Array, batch_size: tuple[int, ...]) -> Array:
    """Return objects as an array that begins with the batch axes; a list, one per row, is repeated over the steps.

    Raises BatchShapeError if they do not fit.
    """
    if isinstance(values, np.ndarray):
        array = values
    else:
        array = np.empty(len(values), dtype=object)
        for index, thing in enumerate(values):  # np.array would turn objects of equal length into further axes
            array[index] = thing
        if len(batch_size) == 2 and len(values) == batch_size[1]:
            array = np.broadcast_to(array, batch_size).copy()
    if tuple(array.shape[: len(batch_size)]) != batch_size:
        raise BatchShapeError(
            f"objects '{name}' have shape {list(array.shape)}, and the batch {list(batch_size)}",
            "pass a list with one object per row",
        )
    return array


def row_index(rows: Rows, num_rows: int) -> Tensor:
    """Return the selected rows as ``int64[M]`` on the CPU.

    Raises:
        BatchIndexError: no such row.
        BatchShapeError: a mask has the wrong length.
    """
    if isinstance(rows, slice):
        return torch.tensor(range(num_rows)[rows], dtype=torch.int64)
    index = torch.as_tensor([rows] if isinstance(rows, int | np.integer) else rows)
    if index.ndim != 1 or (index.is_floating_point() and len(index)):
        raise BatchIndexError(f"a row index of {index.dtype}, shape {list(index.shape)}", "pass a list or a mask")
    if index.dtype == torch.bool:
        if len(index) != num_rows:
            raise BatchShapeError(f"a mask of {len(index)} for {num_rows} rows", "pass one boolean per row")
        return index.nonzero().squeeze(-1).cpu()
    index = index.to("cpu", torch.int64)
    if len(index) and not -num_rows <= int(index.min()) <= int(index.max()) < num_rows:
        raise BatchIndexError(f"row {int(index.max())} or {int(index.min())} of {num_rows}", "count from 0")
    return torch.where(index < 0, index + num_rows, index)


def listed(names: Iterable[str]) -> str:
    """Format names in alphabetical order for a message."""
    return ", ".join(sorted(names)) or "none"


def brief(value: object) -> str:
    """Format dtype and shape, or a short representation, for a message."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return repr(value) if len(repr(value)) <= 60 else f"{type(value).__name__} of {len(repr(value))} characters"


def check_same(what: str, left: object, right: object) -> None:
    """Raise BatchError unless ``left`` and ``right`` are equal."""
    if not is_same(left, right):
        raise BatchError(
            f"{what} is {brief(left)} in one batch and {brief(right)} in the other, with different content or type",
            "rename or remove one of them",
        )


def is_same(left: object, right: object) -> bool:
    """Whether type, shape, dtype and content are equal; NaN equals NaN, and key order does not matter."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and _same_tensors(left, right)
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and _same_arrays(left, right)
    if isinstance(left, Mapping):
        return (
            isinstance(right, Mapping)
            and left.keys() == right.keys()
            and all(is_same(value, right[name]) for name, value in left.items())
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple):
        other = cast("Sequence[object]", right)
        return len(left) == len(other) and all(is_same(a, b) for a, b in zip(left, other, strict=True))
    return bool(left == right) or (left != left and right != right)


def _same_tensors(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    right = right.to(left.device)
    return bool(((left == right) | ((left != left) & (right != right))).all())


def _same_arrays(left: Array, right: Array) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype.kind == "O":
        return all(is_same(a, b) for a, b in zip(left.ravel(), right.ravel(), strict=True))
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fc"))
