"""verl's spelling of a batch (``verl.DataProto``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from embodrl.data.batch import Batch
from embodrl.data.columns import Array, Group
from embodrl.errors import BatchError, BatchShapeError


class DataProto(Batch):
    """A batch with the names of verl's: ``batch``, ``non_tensor_batch`` and ``meta_info``."""

    __slots__ = ()

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, list[Any] | Array] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> Self:
        """Return a batch.

        Args:
            tensors: each ``[N,...]``, or ``[T,N,...]`` with two batch dimensions.
            non_tensors: lists or arrays of N objects.
            meta_info: metadata of the whole.
            num_batch_dims: 1 or 2.

        Raises:
            BatchShapeError: sizes differ.
        """
        if num_batch_dims == 2 and not tensors:
            raise BatchShapeError("two batch dimensions, and no tensor to tell them", "pass a tensor [T,N,...]")
        size = None if num_batch_dims == 1 else [*next(iter((tensors or {}).values())).shape[:num_batch_dims]]
        return cls(dict(tensors or {}), non_tensors, meta_info, size)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Tensor | Array], meta_info: Mapping[str, Any] | None = None) -> Self:
        """Return a batch of tensors and arrays of objects, told apart by their types."""
        tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
        return cls.from_dict(tensors, {k: v for k, v in data.items() if not isinstance(v, Tensor)}, meta_info)

    @property
    def batch(self) -> Group:
        """Tensors by name."""
        return self.tensors

    @property
    def non_tensor_batch(self) -> dict[str, Array]:
        """Arrays of objects by name."""
        return self.objects

    @property
    def meta_info(self) -> dict[str, Any]:
        """Metadata of the whole."""
        return self.meta

    def select(  # pyright: ignore[reportIncompatibleMethodOverride]  (another spelling is the point)
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> Self:
        """Return the batch with only these columns and entries; None for all of a kind. Raises BatchKeyError."""
        names = [*(self.tensors if batch_keys is None else batch_keys)]
        names += self.objects if non_tensor_batch_keys is None else non_tensor_batch_keys
        result = super().select(*names)
        result.meta = {name: self.meta[name] for name in (self.meta if meta_info_keys is None else meta_info_keys)}
        return result

    def pop(  # pyright: ignore[reportIncompatibleMethodOverride]  (another spelling is the point)
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> Self:
        """Remove columns and entries, and return them; None for none. Raises BatchKeyError."""
        result = super().pop(*(batch_keys or ()), *(non_tensor_batch_keys or ()))
        result.meta = {name: self.meta.pop(name) for name in meta_info_keys or ()}
        return result

    def union(self, other: Batch) -> Self:
        """Add the columns of another batch, in place, and return this one; a column in both must be the same.

        Raises:
            BatchError: a column, an object or an entry of ``meta_info`` differs, or the rows are not as many.
        """
        for name in {*self.names()} & {*other.names()}:
            if not _equal(self[name], other[name]):
                raise BatchError(f"'{name}' is in both batches, and differs", "rename or pop one of them")
        for name in {*self.meta} & {*other.meta}:
            if not _equal(self.meta[name], other.meta[name]):
                raise BatchError(f"meta_info '{name}' is in both batches, and differs", "rename or pop one of them")
        both = self.replace(**other.tensors, **other.objects)
        self.tensors, self.objects = both.tensors, both.objects
        self.meta = self.meta | other.meta
        return self

    def chunk(self, chunks: int) -> list[Self]:
        """Split into equal parts; see ``split`` for parts of a size.

        Raises:
            BatchShapeError: the rows can't be divided.
        """
        if len(self) % chunks:
            raise BatchShapeError(f"{len(self)} rows in {chunks} equal parts", "choose a divisor, or use split(size)")
        return self.split(len(self) // chunks)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Return every row several times: one after the other (``interleave``), or the whole batch again and again."""
        rows = torch.arange(len(self))
        return self._take(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def reorder(self, indices: Tensor | Sequence[int]) -> None:
        """Put the rows into another order, in place."""
        ordered = self._take(torch.as_tensor(indices))
        self.tensors = ordered.tensors
        self.objects = ordered.objects
        self.batch_size = ordered.batch_size


def _equal(left: object, right: object) -> bool:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and _equal_tensors(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[name], right[name]) for name in left)
    return bool(np.array_equal(np.asarray(left, object), np.asarray(right, object)))


def _equal_tensors(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors are the same, NaN included."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(((left == right) | ((left != left) & (right != right))).all())
