"""Conversion of values to a JSON description plus raw array memory, and back.

Unlike a pickle, a message can't carry code. Supported: None, bool, int, float, str, bytes, lists, tuples, dictionaries
with text or integer keys, numpy arrays of numbers, booleans, text or such values, and the types of a ``Codec``'s
extensions. Values that JSON lacks are described by an object with a single key, their tag.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from embodrl.errors import MessageError

T = TypeVar("T")
_LENGTH = struct.Struct("<Q")
_ARRAY_KINDS = "biufU"
_ALIGNMENT = 64  # a cache line
_SHOWN = 200  # maximum characters of errors about another process's message
# Every error that parsing invalid JSON, shapes, offsets and tags can raise, whatever another process sends.
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, MemoryError)
_ARRAY = "__ndarray__"
_BYTES = "__bytes__"
_TUPLE = "__tuple__"
_DICT = "__dict__"
_OBJECTS = "__objects__"

ReadBytes = Callable[[int, int], bytes | bytearray | memoryview]
"""Returns the given number of bytes, from an offset in the body that follows the description."""


class Read(NamedTuple):
    """Reads what a description refers to: bytes of the body, and the descriptors of memory files."""

    body: ReadBytes
    files: Sequence[int] = ()

    def __call__(self, start: int, count: int) -> bytes | bytearray | memoryview:
        return self.body(start, count)


class Blobs(list[NDArray[np.uint8]]):
    """Array memory of a value, referenced without copying where possible.

    Attributes:
        files: descriptors of memory files that the value has; they pass only through sockets.
    """

    end = 0

    def __init__(self) -> None:
        super().__init__()
        self.files: list[int] = []

    def add(self, memory: NDArray[np.uint8]) -> int:
        """Add contiguous memory; return its offset in the body that follows the description."""
        start = self.end
        self.end = self.end + aligned(memory.nbytes)
        self.append(memory)
        return start


class Extension(NamedTuple):
    """A further type that a codec can send.

    Attributes:
        tag: name in the description; starts with two underscores.
        plural: plural form in errors about values that can't be sent.
        describe: function from (value, codec, blobs, location of the value) to JSON.
        restore: function from (that JSON, codec, read) to the value.
    """

    tag: str
    plural: str
    describe: Callable[[Any, Codec, Blobs, str], object]  # values of the extension's own class
    restore: Callable[[object, Codec, Read], object]


class Codec:
    """Sends plain values and values of its extensions' classes; an extension also covers subclasses.

    Values may have up to ``max_files`` memory files.
    """

    def __init__(self, extensions: Mapping[type, Extension] | None = None, max_files: int = 0) -> None:
        self._extensions = extensions or {}
        self.max_files = max_files
        self._by_tag = {extension.tag: extension for extension in self._extensions.values()}

    def pack(self, value: object) -> tuple[bytes, Blobs]:
        """Return the JSON description of a value, and the memory of its arrays.

        Raises:
            MessageError: a part has an unsupported type; the message names the part.
        """
        blobs = Blobs()
        description = json.dumps(self.describe(value, blobs, "the value")).encode()
        if len(blobs.files) > self.max_files:
            raise MessageError(f"a message has {len(blobs.files)} memory files", f"send at most {self.max_files}")
        return description, blobs

    def unpack(self, description: bytes, blobs: Iterable[NDArray[np.uint8]]) -> Any:
        """Return the value of ``pack``; its arrays are private, writable copies.

        Raises:
            MessageError: the description or blobs are invalid.
        """
        # Of blobs with equal offsets, all but the last are empty.
        found = {start: blob.data for start, blob in placed(blobs)}
        files = blobs.files if isinstance(blobs, Blobs) else ()
        return self.read_from(
            description, lambda start, count: bytearray(found[start][:count] if count else b""), files
        )

    def read_from(self, description: bytes | memoryview, body: ReadBytes, files: Sequence[int] = ()) -> Any:
        """Return the value of ``pack``; its arrays share the memory that ``body`` returns.

        Raises:
            MessageError: the description or memory is invalid.
        """
        try:
            return self.restore(json.loads(bytes(description)), Read(body, files))
        except _UNREADABLE as error:
            raise MessageError(
                f"unreadable message: {type(error).__name__}: {str(error)[:_SHOWN]}",
                "run the same version of embodrl in all processes",
            ) from error

    def encode(self, value: object) -> bytes:
        """Return a value as a single byte string.

        Raises:
            MessageError: see ``pack``.
        """
        description, blobs = self.pack(value)
        if blobs.files:
            raise MessageError("a memory file is not bytes", "send it through a socket")
        body = [bytes(blob).ljust(aligned(blob.nbytes), b"\0") for blob in blobs]
        return b"".join([_LENGTH.pack(len(description)), description, *body])

    def decode(self, data: bytes | bytearray | memoryview) -> Any:
        """Return the value of ``encode``; its arrays are private and writable.

        Raises:
            MessageError: the bytes are truncated or invalid.
        """
        view = memoryview(data)
        begin = _LENGTH.size + int.from_bytes(view[: _LENGTH.size], "little")
        body = view[begin:]
        return self.read_from(view[_LENGTH.size : begin], lambda start, count: bytearray(body[start : start + count]))

    def copied(self, value: T) -> T:
        """Return a copy of a value as its receiver would see it.

        Raises:
            MessageError: the value can't be sent.
        """
        return self.unpack(*self.pack(value))

    def describe(self, value: object, blobs: Blobs, where: str) -> object:
        """Return the JSON of a value, and add its memory to ``blobs``; ``where`` names the value in errors."""
        # Exact types: a numpy float64 is an instance of float, and would arrive as another type.
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, (list, tuple)):
            items = enumerate(cast("list[object]", value))
            described = [self.describe(item, blobs, f"{where}[{i}]") for i, item in items]
            return {_TUPLE: described} if isinstance(value, tuple) else described
        if isinstance(value, dict):
            return self._describe_dict(cast("dict[object, object]", value), blobs, where)
        if isinstance(value, bytes):
            return {_BYTES: [blobs.add(np.frombuffer(value, np.uint8)), len(value)]}
        if isinstance(value, (np.ndarray, np.generic)):
            return self._describe_array(cast("NDArray[np.generic]", value), blobs, where)
        for kind in type(value).__mro__:
            if kind in self._extensions:
                extension = self._extensions[kind]
                return {extension.tag: extension.describe(value, self, blobs, where)}
        allowed = dict.fromkeys(["plain values", "numeric arrays", *(e.plural for e in self._extensions.values())])
        raise MessageError(
            f"{where} is a {type(value).__name__}, which can't be sent to another process", f"send {', '.join(allowed)}"
        )

    def _describe_dict(self, value: dict[object, object], blobs: Blobs, where: str) -> object:
        for key in value:
            if type(key) not in (str, int):
                raise MessageError(f"{where} has a key of type {type(key).__name__}", "use text or integers as keys")
        items = [(key, self.describe(item, blobs, f"{where}[{key!r}]")) for key, item in value.items()]
        # A JSON object where unambiguous: JSON only has text keys, and a single key may look like a tag.
        plain = all(type(key) is str for key in value) and not (
            len(value) == 1 and str(next(iter(value))).startswith("__")
        )
        return dict(items) if plain else {_DICT: items}

    def _describe_array(self, value: NDArray[np.generic], blobs: Blobs, where: str) -> object:
        if value.dtype.kind == "O":
            return {_OBJECTS: [self.describe(value.ravel().tolist(), blobs, where), value.shape]}
        if value.dtype.kind not in _ARRAY_KINDS:
            raise MessageError(f"{where} is an array of {value.dtype}", "send numbers, booleans or text")
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return {_ARRAY: [value.dtype.str, value.shape, blobs.add(raw), isinstance(value, np.generic)]}

    def restore(self, node: object, read: Read) -> Any:
        if isinstance(node, list):
            return [self.restore(item, read) for item in cast("list[object]", node)]
        if not isinstance(node, dict):
            return node
        item = cast("dict[str, Any]", node)
        tag = next(iter(item)) if len(item) == 1 else ""
        if not tag.startswith("__"):
            return {key: self.restore(part, read) for key, part in item.items()}
        content = item[tag]
        if tag == _ARRAY:
            return _restore_array(read, *content)
        if tag == _TUPLE:
            return tuple(self.restore(content, read))
        if tag == _DICT:
            return {key: self.restore(part, read) for key, part in content}
        if tag == _BYTES:
            return bytes(_take(read, *content))
        if tag == _OBJECTS:
            parts, shape = content
            array = np.empty(len(parts), dtype=object)
            # Assigned one by one, since numpy would turn nested lists into further dimensions.
            for index, part in enumerate(parts):
                array[index] = self.restore(part, read)
            return array.reshape(shape)
        return self._by_tag[tag].restore(content, self, read)


def _restore_array(read: Read, name: str, shape: list[int], start: int, scalar: bool = False) -> object:
    dtype = np.dtype(str(name))
    if dtype.kind not in _ARRAY_KINDS or not dtype.itemsize:
        raise ValueError(f"array of dtype {str(name)[:_SHOWN]} refused")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError("an array has a negative size")
    num_bytes = math.prod(shape) * dtype.itemsize  # Python integers do not overflow
    array = np.frombuffer(_take(read, start, num_bytes), np.uint8).view(dtype).reshape(shape)
    return array[()] if scalar else array


def _take(read: Read, start: int, count: int) -> memoryview:
    """Return ``count`` bytes of memory from ``start``, checking that they exist."""
    if type(start) is not int or type(count) is not int or start < 0 or count < 0:
        raise ValueError(f"{count} bytes at {start} can't be read")
    memory = memoryview(read(start, count))
    if memory.nbytes != count:
        raise ValueError(f"{count} bytes at {start} announced, {memory.nbytes} sent")
    return memory


def aligned(count: int) -> int:
    """Return the next multiple of the array alignment."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def placed(blobs: Iterable[NDArray[np.uint8]]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield blobs with their offsets in the body."""
    blobs = list(blobs)
    # ``accumulate`` yields one offset more than there are blobs.
    return zip(accumulate((aligned(blob.nbytes) for blob in blobs), initial=0), blobs, strict=False)


PLAIN = Codec()
encode = PLAIN.encode
decode = PLAIN.decode
