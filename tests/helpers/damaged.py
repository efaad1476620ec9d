"""Frames that are damaged or made up, for fuzz tests of protocols."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

COUNTS = [
    pytest.param(60, id="60"),
    pytest.param(10_000, id="10000", marks=[pytest.mark.long, pytest.mark.timeout(900)]),
]


def damaged(valid: bytes, count: int) -> Iterator[bytes]:
    """Yield changed copies of a frame; the same ones every time."""
    random = np.random.default_rng(0)
    for number in range(count):
        data = bytearray(valid)
        kind = number % 4
        if kind == 0:
            data = data[: random.integers(len(data))]
        elif kind == 1:
            data = bytearray(random.bytes(int(random.integers(1, 200))))
        else:
            # Most bytes of a frame are pixels: half of the changes go into its head.
            last = len(data) if kind == 2 else min(len(data), 80)
            for place in random.integers(last, size=int(random.integers(1, 5))):
                data[place] = int(random.integers(256))
        yield bytes(data)


def is_readable(text: str) -> bool:
    """Tell whether an error names its code, and no path or stack of the server."""
    return text.endswith("]") and "Traceback" not in text and "/embodrl/" not in text and len(text) < 2000
