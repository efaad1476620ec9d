"""Batches of every shape, for property tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from embodrl.data.columns import is_same
from embodrl.data.trajectory import TrajectoryBatch

# The first batch of a process is slow.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8)
JSON_THINGS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def tensor(seed: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    values = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed))
    result = values.to(dtype) if dtype != torch.uint8 else (values + 3).to(dtype)
    return torch.where(values == 3, torch.nan, result) if dtype.is_floating_point else result


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 0, timed: bool | None = None, max_rows: int = 5) -> TrajectoryBatch:
    """Flat or with time; 0 to 5 rows; tensors of several types with NaN, groups, empty ones too, objects and meta."""
    num_rows = draw(st.integers(min_rows, max_rows))
    has_time = draw(st.booleans()) if timed is None else timed
    size = [draw(st.integers(1, 3)), num_rows] if has_time else [num_rows]

    def column() -> torch.Tensor:
        rest = draw(st.lists(st.integers(0, 2), max_size=2))
        return tensor(draw(st.integers(0, 99)), [*size, *rest], draw(st.sampled_from(DTYPES))).to(torch.device("cpu"))

    columns: dict[str, Any] = {name: column() for name in draw(st.sets(st.sampled_from(["a", "b"])))}
    if draw(st.booleans()):
        columns["group"] = {name: column() for name in draw(st.sets(st.sampled_from(["x", "y.z"])))}
    if draw(st.booleans()):
        columns["deep"] = {"er": {"est": column()}, "none": {}}
    objects: dict[str, Any] = {}
    if draw(st.booleans()):
        things = draw(st.lists(JSON_THINGS, min_size=num_rows, max_size=num_rows))
        objects["things"] = things
    if draw(st.booleans()):
        objects["pairs"] = np.arange(int(np.prod(size)) * 2, dtype=np.int16).reshape(*size, 2)
    if draw(st.booleans()):
        objects["words"] = np.array(["ab", "c"])[np.arange(int(np.prod(size))) % 2].reshape(size)
    meta = draw(st.dictionaries(st.sampled_from(["steps", "note"]), JSON_THINGS, max_size=2))
    return TrajectoryBatch(columns, objects, meta, size)


def numbered(num_rows: int, num_steps: int | None = None) -> TrajectoryBatch:
    """Rows that know their number: a column ``[.., 2]``, one in a group, and objects."""
    size = [num_rows] if num_steps is None else [num_steps, num_rows]
    number = torch.arange(num_rows).expand(size)
    return TrajectoryBatch(
        {"row": number, "group": {"pair": torch.stack([number, -number], -1).float()}},
        {"name": [f"row {i}" for i in range(num_rows)]},
        {"origin": "test"},
        size,
    )


def rows_of(batch: TrajectoryBatch) -> list[int]:
    """Return the numbers of the rows, and check that all columns moved together."""
    number, pair, name = batch["row"], batch["group"]["pair"], batch["name"]
    assert torch.equal(pair, torch.stack([number, -number], -1).float())
    assert name.ravel().tolist() == [f"row {i}" for i in number.flatten().tolist()]
    assert batch.batch_size == tuple(number.shape) == name.shape and batch.meta == {"origin": "test"}
    first = number if number.ndim == 1 else number[0]
    assert torch.equal(first.expand_as(number), number)
    return first.tolist()


def same(left: TrajectoryBatch, right: TrajectoryBatch) -> bool:
    """Tell whether size, columns, dtypes, values, objects and meta are the same; NaN equals NaN."""
    return (
        left.batch_size == right.batch_size
        and is_same(left.tensors, right.tensors)
        and is_same(left.objects, right.objects)
        and is_same(left.meta, right.meta)
    )
