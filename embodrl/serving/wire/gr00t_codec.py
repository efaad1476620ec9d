"""Arrays in GR00T messages: .npy files in N1.5 and N1.6, msgpack_numpy's envelope in N1.7."""

from __future__ import annotations

import io
import re

import numpy as np

from embodrl.serving.wire.codec import Array, Map, array_of, refused_array, scalar_of

_NPY_HEADER = re.compile(
    rb"\{'descr': '(?P<descr>[^']{1,8})', 'fortran_order': (?P<fortran>True|False), "
    rb"'shape': \((?P<shape>(\d{1,18}, ?)*(\d{1,18})?)\), \}\s*"
)


def npy_array(data: object) -> Array:
    """Decode the bytes of a .npy file; raises as ``array_of``.

    NumPy's own reader evaluates the header as Python, and allocates the claimed size before it reads the data.
    """
    if not isinstance(data, bytes) or data[:6] != b"\x93NUMPY" or data[6:7] not in (b"\x01", b"\x02", b"\x03"):
        raise refused_array("the data of an array is not a .npy file")
    start = 10 if data[6:7] == b"\x01" else 12
    end = start + int.from_bytes(data[8:start], "little")
    header = _NPY_HEADER.fullmatch(data, start, min(end, len(data)))
    if header is None or end > len(data):
        raise refused_array("the header of a .npy file does not describe a numeric array")
    shape = [int(size) for size in header["shape"].replace(b",", b" ").split()]
    return array_of(header["descr"], shape, data[end:], "F" if header["fortran"] == b"True" else "C")


def npy_bytes(array: Array) -> bytes:
    """Return a numeric array as a .npy file."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(array), allow_pickle=False)
    return stream.getvalue()


def groot_envelope(content: Map) -> object:
    """Decode the arrays of GR00T N1.5 and N1.6 (.npy files), and of N1.7 (msgpack_numpy)."""
    if "__ndarray_class__" in content:
        return npy_array(content["as_npy"])
    if b"nd" in content:
        if content[b"nd"] is not True:
            return scalar_of(content[b"type"], content[b"data"])
        if content.get(b"kind") not in (b"", "", None):
            raise refused_array("an array holds objects or records, which are never decoded")
        return array_of(content[b"type"], content[b"shape"], content[b"data"])
    return content


def groot_npy_default(value: object) -> object:
    """Encode arrays as GR00T N1.5 and N1.6 do."""
    if isinstance(value, np.ndarray):
        return {"__ndarray_class__": True, "as_npy": npy_bytes(value)}
    raise TypeError(f"{type(value).__name__} can't be sent in a message")


def groot_msgpack_default(value: object) -> object:
    """Encode arrays as GR00T N1.7 does."""
    if isinstance(value, np.ndarray):
        return {
            b"nd": True,
            b"type": value.dtype.str,
            b"kind": b"",
            b"shape": value.shape,
            b"data": value.tobytes(),
        }
    raise TypeError(f"{type(value).__name__} can't be sent in a message")
