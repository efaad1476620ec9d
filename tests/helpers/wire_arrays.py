"""An array in messages, and what makes one be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from expect import raises_code
from served import raw

from embodrl.errors import WireError
from embodrl.serving.wire import codec

ARRAY = np.array([[1.5, -2.0]], "<f4")
DATA = b"\x00\x00\xc0?\x00\x00\x00\xc0"
OTHERS: list[dict[str, Any]] = [
    {"dtype": "|O"},
    {"dtype": "O"},
    {"dtype": "<c8"},
    {"dtype": "i4,i4"},
    {"dtype": "<M8[s]"},
    {"dtype": "<U2"},
    {"dtype": 7},
    {"dtype": "nonsense"},
    {"shape": [1, 3]},
    {"shape": [-1, -2]},
    {"shape": [2**62, 2**62]},
    {"shape": [1] * 64},
    {"shape": "12"},
    {"shape": [1.0, 2.0]},
    {"shape": [True, 2]},
    {"data": DATA[:-1]},
    {"data": "text"},
]
"""Entries of a message, each of which makes it that of no plain array."""


def unpacked(content: object, envelope: codec.Envelope) -> Any:
    """Return what a message decodes to."""
    return codec.unpack(raw({"x": content}), envelope)["x"]


def assert_both_ways(content: object, envelope: codec.Envelope, default: Callable[[object], object]) -> None:
    """Check that a message written by hand is ``ARRAY``, and that ``ARRAY`` is packed with the same entries."""
    found = unpacked(content, envelope)
    assert found.dtype == np.float32 and found.tolist() == [[1.5, -2.0]]
    assert codec.unpack(codec.pack({"x": ARRAY}, default), lambda content: content)["x"] == content


def assert_refused(content: dict[Any, Any], change: dict[str, Any], envelope: codec.Envelope) -> None:
    """Check that a message with one of ``OTHERS`` is refused."""
    names = {"dtype": ("dtype", b"dtype", b"type"), "shape": ("shape", b"shape"), "data": ("data", b"data")}
    ((what, value),) = change.items()
    key = next(key for key in content if key in names[what])
    with raises_code("wire-array", WireError):
        unpacked(content | {key: value}, envelope)
