"""Values to a description and raw memory, and back: JSON for the structure, bytes for the arrays.

Nothing in it can carry code, as a pickle can. What can be sent: None, bool, int, float, str, bytes, lists, tuples,
dictionaries with text or integer keys, numpy arrays of numbers, truth values, text or such values, and the types that
a ``Codec`` was extended with. In the description everything that JSON lacks is an object with one key, its tag.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from embodrl.errors import MessageError

_LENGTH = struct.Struct("<Q")
_ARRAY_KINDS = "biufU"
_ALIGNMENT = 64
_ARRAY, _BYTES, _TUPLE, _DICT, _OBJECTS = "__ndarray__", "__bytes__", "__tuple__", "__dict__", "__objects__"


class Packer:
    """Describes one value; collects the memory of its arrays in ``blobs``, not copied where it can be.

    Args:
        extensions: of the codec.
    """

    def __init__(self, extensions: Sequence[Extension]) -> None:
        self._extensions = extensions
        self.blobs: list[Any] = []
        self._end = 0

    def blob(self, memory: Any) -> int:
        """Add contiguous memory; return where it starts in the body that follows the description."""
        start = self._end
        self._end += aligned(memory.nbytes)
        self.blobs.append(memory)
        return start

    def describe(self, value: Any, where: str) -> Any:
        """Return the JSON of a value; ``where`` names it in the error.

        Raises:
            MessageError: a part of it is of a type that can't be sent.
        """
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is list:
            return [self.describe(item, f"{where}[{i}]") for i, item in enumerate(cast("list[Any]", value))]
        if isinstance(value, dict):
            return self._describe_dict(cast("dict[Any, Any]", value), where)
        if isinstance(value, tuple):
            items = enumerate(cast("tuple[Any, ...]", value))
            return {_TUPLE: [self.describe(item, f"{where}[{i}]") for i, item in items]}
        if isinstance(value, bytes):
            return {_BYTES: [self.blob(memoryview(value)), len(value)]}
        if isinstance(value, (np.ndarray, np.generic)):
            return self._describe_array(cast("NDArray[Any]", value), where)
        for extension in self._extensions:
            if isinstance(value, extension.type) and (type(value) is extension.type or extension.subclasses):
                return {extension.tag: extension.describe(value, self, where)}
        allowed = dict.fromkeys(["plain values", "numeric arrays", *(e.plural for e in self._extensions)])
        raise MessageError(
            f"{where} is a {type(value).__name__}, which can't be sent to another process",
            f"send {', '.join(allowed)}",
        )

    def _describe_dict(self, value: dict[Any, Any], where: str) -> Any:
        for key in value:
            if type(key) not in (str, int):
                raise MessageError(f"{where} has a key of type {type(key).__name__}", "use text or integers as keys")
        items = [(key, self.describe(item, f"{where}[{key!r}]")) for key, item in value.items()]
        # A JSON object where that is unambiguous: JSON has text keys only, and one that looks like a tag is taken.
        plain = all(type(key) is str for key in value) and not (len(value) == 1 and next(iter(value)).startswith("__"))
        return dict(items) if plain else {_DICT: items}

    def _describe_array(self, value: NDArray[Any], where: str) -> Any:
        shape = list(value.shape)
        if value.dtype.kind == "O":
            return {_OBJECTS: [self.describe(value.ravel().tolist(), where), shape]}
        if value.dtype.kind not in _ARRAY_KINDS:
            raise MessageError(f"{where} is an array of {value.dtype}", "send numbers, truth values or text")
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        scalar = [] if isinstance(value, np.ndarray) else [True]
        return {_ARRAY: [value.dtype.str, shape, self.blob(raw), *scalar]}


class Unpacker:
    """Restores one value.

    Args:
        extensions: of the codec.
        read: returns so many bytes from a start in the body.
    """

    def __init__(self, extensions: Sequence[Extension], read: Callable[[int, int], Any]) -> None:
        self._restorers = {extension.tag: extension.restore for extension in extensions}
        self.read = read

    def restore(self, node: Any) -> Any:
        """Return the value of a description."""
        if isinstance(node, list):
            return [self.restore(item) for item in cast("list[Any]", node)]
        if not isinstance(node, dict):
            return node
        item = cast("dict[str, Any]", node)
        tag = next(iter(item), "") if len(item) == 1 else ""
        if not tag.startswith("__"):
            return {key: self.restore(part) for key, part in item.items()}
        content = item[tag]
        if tag == _ARRAY:
            return self._restore_array(*content)
        if tag == _TUPLE:
            return tuple(self.restore(part) for part in content)
        if tag == _DICT:
            return {key: self.restore(part) for key, part in content}
        if tag == _BYTES:
            return bytes(self.read(*content))
        if tag == _OBJECTS:
            parts, shape = content
            array = np.empty(len(parts), dtype=object)
            for index, part in enumerate(parts):
                array[index] = self.restore(part)
            return array.reshape(shape)
        return self._restorers[tag](content, self)

    def _restore_array(self, name: str, shape: list[int], start: int, scalar: bool = False) -> Any:
        dtype = np.dtype(name)
        if dtype.kind not in _ARRAY_KINDS:
            raise ValueError(f"array of dtype {name} refused")
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(self.read(start, count * dtype.itemsize), np.uint8).view(dtype).reshape(shape)
        return array[()] if scalar else array


@dataclass(frozen=True)
class Extension:
    """A further type that a codec can send.

    Attributes:
        tag: names it in the description; begins with two underscores.
        type: its class.
        describe: from a value, the packer and the value's place to JSON.
        restore: from that JSON and the unpacker to the value.
        plural: for the message about values that can't be sent.
        subclasses: whether instances of subclasses are described, too.
    """

    tag: str
    type: type
    describe: Callable[[Any, Packer, str], Any]
    restore: Callable[[Any, Unpacker], Any]
    plural: str
    subclasses: bool = True


class Codec:
    """Sends plain values and those of its extensions.

    Args:
        extensions: further types.
    """

    def __init__(self, extensions: Sequence[Extension] = ()) -> None:
        self._extensions = tuple(extensions)

    def pack(self, value: Any) -> tuple[bytes, list[Any]]:
        """Return the description of a value as JSON, and the memory of its arrays, not copied where it can be.

        Raises:
            MessageError: a part of it is of another type; names which.
        """
        packer = Packer(self._extensions)
        description = json.dumps(packer.describe(value, "the value")).encode()
        return description, packer.blobs

    def unpack(self, description: bytes | memoryview, blobs: Iterable[Any]) -> Any:
        """Return the value of ``pack``; its arrays share the memory of the blobs.

        Raises:
            MessageError: these are no description and blobs of a value.
        """
        # Of blobs that start at the same place, all but the last are empty.
        found = {start: memoryview(blob).cast("B") for start, blob in placed(blobs)}
        return self._unpack(description, lambda start, count: found[start][:count] if count else b"")

    def unpack_body(self, description: bytes | memoryview, body: memoryview) -> Any:
        """Return the value of ``pack`` whose blobs were written one after the other, each at its start."""
        return self._unpack(description, lambda start, count: body[start : start + count])

    def _unpack(self, description: bytes | memoryview, read: Callable[[int, int], Any]) -> Any:
        try:
            return Unpacker(self._extensions, read).restore(json.loads(bytes(description)))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise MessageError(
                f"a message can't be read: {error}", "run the same version of embodrl in all processes"
            ) from error

    def encode(self, value: Any) -> bytes:
        """Return one string of bytes for a value.

        Raises:
            MessageError: see ``pack``.
        """
        description, blobs = self.pack(value)
        parts = [_LENGTH.pack(len(description)), description]
        for _, blob in placed(blobs):
            parts += [bytes(blob), b"\0" * (aligned(blob.nbytes) - blob.nbytes)]
        return b"".join(parts)

    def decode(self, data: bytes | bytearray | memoryview) -> Any:
        """Return the value of ``encode``; arrays are private and writable.

        Raises:
            MessageError: the bytes are truncated or not of that form.
        """
        view = memoryview(data)
        if len(view) < _LENGTH.size:
            raise MessageError(f"{len(view)} bytes are too few for an encoded value", "write the file again")
        (length,) = _LENGTH.unpack_from(view)
        body = view[_LENGTH.size + length :]
        description = view[_LENGTH.size : _LENGTH.size + length]
        return self._unpack(description, lambda start, count: bytearray(body[start : start + count]))

    def copied(self, value: Any) -> Any:
        """Return what would arrive if the value were sent.

        Raises:
            MessageError: it can't be sent.
        """
        description, blobs = self.pack(value)
        return self.unpack(description, owned(blobs))


def aligned(count: int) -> int:
    """Return the next multiple of the alignment of arrays, a cache line."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def placed(blobs: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield blobs with their starts in the body."""
    blobs = list(blobs)
    return zip(accumulate((aligned(memoryview(blob).nbytes) for blob in blobs), initial=0), blobs, strict=False)


def owned(blobs: Iterable[Any]) -> list[memoryview]:
    """Return copies of blobs that may be written to."""
    return [memoryview(bytearray(blob)) for blob in blobs]


PLAIN = Codec()
encode, decode = PLAIN.encode, PLAIN.decode
