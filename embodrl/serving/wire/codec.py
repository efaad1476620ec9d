"""Messages with arrays as bytes: the envelopes of openpi and json_numpy.

All input is untrusted. An array is built only from a plain numeric dtype whose size matches its bytes; object arrays,
structured dtypes and pickles have no decoder. Formats: docs/serving.md.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.errors import MissingDependencyError, WireError

Array = NDArray[Any]
Message = Mapping[str, Any]
"""A decoded message."""
Map = dict[Any, Any]
"""A decoded map, whose keys may be bytes."""
Envelope = Callable[[Map], object]
"""Decodes a map to an array, or returns it unchanged."""

KINDS = "biuf"
MAX_ITEMS = 100_000
"""Limit on maps and list items in a message: one byte can encode an object of 64 bytes."""
_MALFORMED = (ValueError, TypeError, KeyError, OverflowError, RecursionError, binascii.Error)


def need(name: str) -> ModuleType:
    """Import a module of the extra ``serve``; raises MissingDependencyError if it is not installed."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"policy servers and remote policies need {name}: {error}", "pip install 'embodrl[serve]'"
        ) from error


HINT = "see docs/serving.md for what a message holds"


def refused_array(message: str) -> WireError:
    """Return the error for a refused array."""
    return WireError(message, HINT, code="wire-array")


def _malformed(message: str) -> WireError:
    return WireError(message, HINT, code="wire-message")


def array_of(dtype: object, shape: object, data: object, order: str = "C") -> Array:
    """Return a read-only array of raw bytes; ``dtype`` is NumPy's name of a numeric dtype, e.g. ``<f4``.

    Raises:
        WireError: unsupported dtype, or the sizes do not match.
    """
    text = dtype.decode("ascii", "replace") if isinstance(dtype, bytes) else dtype
    if not isinstance(text, str) or len(text) > 8:
        raise refused_array(f"the dtype of an array is {str(text)[:40]!r}, not the name of a numeric dtype")
    try:
        kind = np.dtype(text)
    except _MALFORMED as error:
        raise refused_array(f"the dtype of an array is {text!r}, which NumPy does not know") from error
    if kind.kind not in KINDS:
        raise refused_array(
            f"an array has the dtype {text!r}; allowed are booleans, integers and floats, never objects"
        )
    if not isinstance(shape, (list, tuple)) or len(shape) > 8 or not all(type(size) is int for size in shape):
        raise refused_array("the shape of an array is not a short list of integers")
    if not isinstance(data, (bytes, memoryview)):
        raise refused_array("the data of an array is not bytes")
    wanted = kind.itemsize
    for size in shape:
        wanted *= size
    if min(shape, default=0) < 0 or wanted != len(data):
        raise refused_array(
            f"an array of shape {list(shape)} and type {text} takes {wanted} bytes, and {len(data)} came"
        )
    flat = np.frombuffer(data, kind)
    return flat.reshape(shape, order="F" if order == "F" else "C")


# -- msgpack ----------------------------------------------------------------------------------------------------------


class _Counter:
    """Counts the items of a message during unpacking."""

    def __init__(self, envelope: Envelope) -> None:
        self.envelope = envelope
        self.items = 0

    def _add(self, number: int) -> None:
        self.items += number
        if self.items > MAX_ITEMS:
            raise _malformed(f"a message has more than {MAX_ITEMS} items")

    def map(self, content: Map) -> object:
        self._add(1 + len(content))
        return self.envelope(content)

    def list(self, content: list[object]) -> list[object]:
        self._add(1 + len(content))
        return content


def unpack(data: bytes, envelope: Envelope) -> Any:
    """Decode a msgpack message.

    Raises:
        WireError: the message is malformed, has too many items, or contains a refused array.
    """
    msgpack = need("msgpack")
    counter = _Counter(envelope)
    try:
        return msgpack.unpackb(
            data,
            object_hook=counter.map,
            list_hook=counter.list,
            strict_map_key=False,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=64,
        )
    except (*_MALFORMED, msgpack.UnpackException) as error:
        what = str(error)[:200] or type(error).__name__
        raise _malformed(f"{len(data)} bytes are not a msgpack message: {what}") from error


def pack(content: object, default: Callable[[object], object]) -> bytes:
    """Encode an object as msgpack; ``default`` encodes arrays."""
    packed: bytes = need("msgpack").packb(content, default=default)
    return packed


def scalar_of(dtype: object, value: object) -> object:
    """Return a number sent with its NumPy dtype."""
    if isinstance(value, bytes):
        return array_of(dtype, (), value).item()
    if not isinstance(value, (bool, int, float)):
        raise refused_array("a NumPy scalar is not a number")
    return value


def openpi_envelope(content: Map) -> object:
    """Decode ``{b"__ndarray__": True, b"data", b"dtype", b"shape"}`` and ``{b"__npgeneric__": True, ...}``."""
    if b"__ndarray__" in content:
        return array_of(content[b"dtype"], content[b"shape"], content[b"data"])
    if b"__npgeneric__" in content:
        return scalar_of(content[b"dtype"], content[b"data"])
    return content


def openpi_default(value: object) -> object:
    """Encode arrays and NumPy scalars as openpi does."""
    if isinstance(value, np.ndarray):
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} can't be sent in a message")


# -- JSON -------------------------------------------------------------------------------------------------------------


def _json_envelope(content: Map) -> object:
    if "__numpy__" not in content:
        return content
    text = content["__numpy__"]
    if not isinstance(text, str):
        raise refused_array("the data of an array is not base64")
    return array_of(content["dtype"], content["shape"], base64.b64decode(text, validate=True))


def read_json(data: bytes | str) -> Any:
    """Decode a JSON message; arrays are ``{"__numpy__": base64, "dtype", "shape"}``.

    Raises:
        WireError: the message is malformed, or contains a refused array.
    """
    try:
        return json.loads(data, object_hook=_json_envelope)
    except _MALFORMED as error:
        raise _malformed(f"{len(data)} bytes are not a JSON message: {str(error)[:200]}") from error


def json_default(value: object) -> object:
    """Encode arrays as json_numpy does."""
    if isinstance(value, np.ndarray):
        text = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"__numpy__": text, "dtype": value.dtype.str, "shape": list(value.shape)}
    raise TypeError(f"{type(value).__name__} can't be sent in a message")


def write_json(content: object) -> str:
    """Encode an object as JSON, with json_numpy arrays."""
    return json.dumps(content, default=json_default)
