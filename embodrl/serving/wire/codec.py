"""Messages with arrays as bytes: the envelopes of openpi and json_numpy.

Everything read here may come from a stranger. An array is built only from a plain numeric type whose size agrees with
its bytes; object arrays, structured types and pickles have no decoder. Formats: docs/serving.md.
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
"""What a client or a server has sent, decoded."""
Map = dict[Any, Any]
"""A decoded map, whose keys may be bytes."""
Envelope = Callable[[Map], object]
"""From a map to the array that it stands for, or to itself."""

KINDS = "biuf"
MAX_ITEMS = 100_000
"""Maps, and items of lists, in a message: a byte can stand for an object of 64 bytes."""
_MALFORMED = (ValueError, TypeError, KeyError, OverflowError, RecursionError, binascii.Error)


def need(name: str) -> ModuleType:
    """Import a module of the extra ``serve``.

    Raises:
        MissingDependencyError: it is not installed.
    """
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"policy servers and remote policies need {name}: {error}", "pip install 'embodrl[serve]'"
        ) from error


HINT = "see docs/serving.md for what a message holds"


def refused_array(message: str) -> WireError:
    """Return the error for an array that is not built."""
    return WireError(message, HINT, code="wire-array")


def _malformed(message: str) -> WireError:
    return WireError(message, HINT, code="wire-message")


def array_of(dtype: object, shape: object, data: object, order: str = "C") -> Array:
    """Return a read-only array of raw bytes.

    Args:
        dtype: NumPy's text of a boolean, integer or float type, e.g. ``<f4``.
        shape: list or tuple of sizes.
        data: exactly the bytes of the items.
        order: ``C`` or ``F``.

    Raises:
        WireError: another type, or the sizes do not agree.
    """
    text = dtype.decode("ascii", "replace") if isinstance(dtype, bytes) else dtype
    if not isinstance(text, str) or len(text) > 8:
        raise refused_array(f"the type of an array is {str(text)[:40]!r}, not the name of a numeric type")
    try:
        kind = np.dtype(text)
    except _MALFORMED as error:
        raise refused_array(f"the type of an array is {text!r}, which NumPy does not know") from error
    if kind.kind not in KINDS:
        raise refused_array(f"an array has the type {text!r}; booleans, integers and floats are read, objects never")
    if not isinstance(shape, (list, tuple)) or len(shape) > 8 or not all(type(size) is int for size in shape):
        raise refused_array("the shape of an array is not a short list of integers")
    if not isinstance(data, (bytes, memoryview)):
        raise refused_array("the data of an array are not bytes")
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
    """Counts what a message holds while it is unpacked."""

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
    """Return the object of a msgpack message.

    Raises:
        WireError: it is malformed, has too many items, or an array that is refused.
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
        raise _malformed(f"{len(data)} bytes are not a message in msgpack: {what}") from error


def pack(content: object, default: Callable[[object], object]) -> bytes:
    """Return an object as msgpack; ``default`` is the envelope of arrays."""
    packed: bytes = need("msgpack").packb(content, default=default)
    return packed


def scalar_of(dtype: object, value: object) -> object:
    """Return a number that came with its NumPy type."""
    if isinstance(value, bytes):
        return array_of(dtype, (), value).item()
    if not isinstance(value, (bool, int, float)):
        raise refused_array("a scalar of NumPy is not a number")
    return value


def openpi_envelope(content: Map) -> object:
    """Decode ``{b"__ndarray__": True, b"data", b"dtype", b"shape"}`` and ``{b"__npgeneric__": True, ...}``."""
    if b"__ndarray__" in content:
        return array_of(content[b"dtype"], content[b"shape"], content[b"data"])
    if b"__npgeneric__" in content:
        return scalar_of(content[b"dtype"], content[b"data"])
    return content


def openpi_default(value: object) -> object:
    """Encode arrays and NumPy's scalars as openpi does."""
    if isinstance(value, np.ndarray):
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} has no place in a message")


# -- JSON -------------------------------------------------------------------------------------------------------------


def _json_envelope(content: Map) -> object:
    if "__numpy__" not in content:
        return content
    text = content["__numpy__"]
    if not isinstance(text, str):
        raise refused_array("the data of an array are not base64")
    return array_of(content["dtype"], content["shape"], base64.b64decode(text, validate=True))


def read_json(data: bytes | str) -> Any:
    """Return the object of a JSON message; arrays are ``{"__numpy__": base64, "dtype", "shape"}``.

    Raises:
        WireError: it is malformed, or an array is refused.
    """
    try:
        return json.loads(data, object_hook=_json_envelope)
    except _MALFORMED as error:
        raise _malformed(f"{len(data)} bytes are not a message in JSON: {str(error)[:200]}") from error


def json_default(value: object) -> object:
    """Encode arrays as json_numpy does."""
    if isinstance(value, np.ndarray):
        text = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"__numpy__": text, "dtype": value.dtype.str, "shape": list(value.shape)}
    raise TypeError(f"{type(value).__name__} has no place in a message")


def write_json(content: object) -> str:
    """Return an object as JSON, with arrays as json_numpy writes them."""
    return json.dumps(content, default=json_default)
