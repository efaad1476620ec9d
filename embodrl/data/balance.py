"""Parts of equal size and nearly equal load."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from embodrl.errors import BatchShapeError


def balanced_order(lengths: Tensor | Sequence[int], num_parts: int) -> Tensor:
    """Order rows so that ``num_parts`` consecutive parts of the same number of rows have nearly the same total length.

    The largest differencing method (Karmarkar and Karp 1982) for sets of equal cardinality: rows of similar length are
    dealt out, one a part, and such deals are joined two by two, the heavy side of one to the light side of the other,
    those that differ most within first.

    Args:
        lengths: ``[N]``, at least 0.
        num_parts: must divide N.

    Returns:
        ``int64[N]``: the rows of the first part, in ascending order, then those of the second, and so on.

    Raises:
        BatchShapeError: the rows can't be divided so.
    """
    load = torch.as_tensor(lengths).tolist()
    if num_parts < 1 or len(load) % num_parts:
        raise BatchShapeError(f"{len(load)} rows can't be divided by {num_parts}", f"pad({num_parts}) first")
    rows = sorted(range(len(load)), key=lambda row: (-load[row], row))
    # A deal is (minus its spread, a number that breaks ties, its parts as (load, rows), heaviest first).
    deals = [
        _deal(number, [(load[row], [row]) for row in rows[start : start + num_parts]])
        for number, start in enumerate(range(0, len(rows), num_parts))
    ]
    heapq.heapify(deals)
    while len(deals) > 1:
        (_, number, heavy), (_, _, other) = heapq.heappop(deals), heapq.heappop(deals)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(heavy, reversed(other), strict=True)]
        heapq.heappush(deals, _deal(number, joined))
    parts = sorted(sorted(part) for _, part in deals[0][2]) if deals else []
    return torch.tensor([row for part in parts for row in part], dtype=torch.int64)


def _deal(number: int, parts: list[tuple[float, list[int]]]) -> tuple[float, int, list[tuple[float, list[int]]]]:
    parts = sorted(parts, key=lambda part: (-part[0], part[1]))
    return parts[-1][0] - parts[0][0], number, parts
