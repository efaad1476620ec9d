"""Whether two values are the same, NaN included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def is_same(left: Any, right: Any) -> bool:
    """Tell whether type, shape, dtype and content are the same; NaN is the same as NaN, the order of keys is not."""
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
        return len(left) == len(right) and all(is_same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right) or (left != left and right != right)


def _same_tensors(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    right = right.to(left.device)
    return bool(((left == right) | ((left != left) & (right != right))).all())


def _same_arrays(left: NDArray[Any], right: NDArray[Any]) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype.kind == "O":
        return all(is_same(a, b) for a, b in zip(left.ravel(), right.ravel(), strict=True))
    return (
        _same_tensors(torch.from_numpy(left.copy()), torch.from_numpy(right.copy()))
        if (left.dtype.kind in "biuf")
        else cast(bool, np.array_equal(left, right))
    )
