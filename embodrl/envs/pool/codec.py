"""Plain values to bytes and back: JSON for the structure, raw memory for the arrays. Nothing in it can carry code."""

from __future__ import annotations

import json
import struct
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

_LENGTH = struct.Struct("<Q")
_ARRAY_KEY = "__ndarray__"
_ARRAY_KINDS = "biuf"


def encode(value: Any) -> bytes:
    """Return bytes for a value of None, bool, int, float, str, list, dict with str keys, and numpy arrays.

    Tuples come back as lists.

    Raises:
        TypeError: any other type, or an array that is neither boolean, integer nor float.
    """
    blobs: list[bytes] = []
    offset = 0

    def default(item: object) -> Any:
        nonlocal offset
        if isinstance(item, np.generic):
            return cast("Any", item).item()
        array = cast("NDArray[Any]", item)
        if not isinstance(item, np.ndarray) or array.dtype.kind not in _ARRAY_KINDS:
            raise TypeError(
                f"only plain values and numeric arrays can be sent, not {type(array).__name__}: {array!r:.100}"
            )
        blobs.append(array.tobytes())
        start, offset = offset, offset + array.nbytes
        return {_ARRAY_KEY: [array.dtype.str, list(array.shape), start]}

    text = json.dumps(value, default=default).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *blobs])


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Return the value of ``encode``; arrays are private and writable.

    Raises:
        ValueError: the bytes are truncated or not of that form.
    """
    view = memoryview(data)
    if len(view) < _LENGTH.size:
        raise ValueError(f"{len(view)} bytes are too few for an encoded value")
    (text_length,) = _LENGTH.unpack_from(view)
    body = view[_LENGTH.size + text_length :]

    def restore(item: dict[str, Any]) -> Any:
        if _ARRAY_KEY not in item:
            return item
        dtype_name, shape, start = item[_ARRAY_KEY]
        dtype = np.dtype(dtype_name)
        if dtype.kind not in _ARRAY_KINDS:
            raise ValueError(f"array of dtype {dtype_name} refused")
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(body, dtype, count, start).reshape(shape).copy()

    return json.loads(bytes(view[_LENGTH.size : _LENGTH.size + text_length]), object_hook=restore)
