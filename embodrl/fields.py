"""Typed, bounded reading of JSON that another program may have written or damaged.

A file is read only up to a size limit. Each field is then read with its type and range, so that an invalid value is
reported with file and key before anything is built from it. Simulator processes use this module, too, so it imports no
torch.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import NoReturn, TypeVar, overload

from embodrl.errors import EmbodrlError, FileFormatError

MAX_JSON_BYTES = 64 * 2**20
_T = TypeVar("_T")
_MISSING: object = object()


class Fields:
    """A JSON object whose fields are checked when read.

    A missing field, or null for a field with a default, gives the default; without a default it is an error.

    Args:
        content: the parsed object.
        source: file and location in it, for messages.
        error: class of the raised errors.
        hint: what the user can do about an invalid field.
    """

    def __init__(
        self,
        content: Mapping[str, object],
        source: str,
        error: type[EmbodrlError] = FileFormatError,
        hint: str = "restore the file from its origin",
    ) -> None:
        self.content = content
        self.source = source
        self._error = error
        self._hint = hint

    def __contains__(self, name: str) -> bool:
        return name in self.content

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def refuse(self, problem: str) -> NoReturn:
        """Raise this file's error: ``SOURCE: problem``."""
        raise self._error(f"{self.source}: {problem}", self._hint)

    def _read(self, name: str, default: object) -> tuple[object, bool]:
        value = self.content.get(name, _MISSING)
        if value is _MISSING or (value is None and default is not _MISSING):
            if default is _MISSING:
                self.refuse(f"{name!r} is missing")
            return default, True
        return value, False

    @overload
    def text(self, name: str) -> str: ...
    @overload
    def text(self, name: str, default: _T) -> str | _T: ...
    def text(self, name: str, default: object = _MISSING) -> object:
        value, is_default = self._read(name, default)
        if not is_default and not isinstance(value, str):
            self.refuse(f"{name!r} is {_shown(value)}, not a string")
        return value

    @overload
    def flag(self, name: str) -> bool: ...
    @overload
    def flag(self, name: str, default: _T) -> bool | _T: ...
    def flag(self, name: str, default: object = _MISSING) -> object:
        value, is_default = self._read(name, default)
        if not is_default and not isinstance(value, bool):
            self.refuse(f"{name!r} is {_shown(value)}, not true or false")
        return value

    @overload
    def integer(self, name: str, *, low: int = ..., high: int = ...) -> int: ...
    @overload
    def integer(self, name: str, default: _T, *, low: int = ..., high: int = ...) -> int | _T: ...
    def integer(self, name: str, default: object = _MISSING, *, low: int = 0, high: int = 2**63 - 1) -> object:
        """Return an integer within [low, high]."""
        value, is_default = self._read(name, default)
        if is_default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(f"{name!r} is {_shown(value)}, not an integer from {low} to {high}")
        return value

    @overload
    def number(self, name: str, *, low: float = ..., high: float = ...) -> float: ...
    @overload
    def number(self, name: str, default: _T, *, low: float = ..., high: float = ...) -> float | _T: ...
    def number(
        self, name: str, default: object = _MISSING, *, low: float = -math.inf, high: float = math.inf
    ) -> object:
        """Return a finite number within [low, high] as a float."""
        value, is_default = self._read(name, default)
        return value if is_default else self._finite(name, value, low, high)

    def _finite(self, name: str, value: object, low: float = -math.inf, high: float = math.inf) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(f"{name!r} is {_shown(value)}, not a number")
        if not math.isfinite(value) or not low <= value <= high:
            within = "finite" if math.isinf(low) and math.isinf(high) else f"from {low:g} to {high:g}"
            self.refuse(f"{name!r} is {_shown(value)}, which is not {within}")
        return float(value)

    def numbers(
        self, name: str, length: int | None = None, *, low: float = -math.inf, high: float = math.inf
    ) -> list[float]:
        """Return a list of finite numbers within [low, high], of the given length, if any."""
        values = self.items(name, length)
        return [self._finite(f"{name}[{index}]", value, low, high) for index, value in enumerate(values)]

    def texts(self, name: str) -> list[str]:
        values = self.items(name)
        for index, value in enumerate(values):
            if not isinstance(value, str):
                self.refuse(f"'{name}[{index}]' is {_shown(value)}, not a string")
        return [str(value) for value in values]

    def items(self, name: str, length: int | None = None) -> list[object]:
        """Return a list, of the given length, if any."""
        value, _ = self._read(name, _MISSING)
        if not isinstance(value, list):
            self.refuse(f"{name!r} is {_shown(value)}, not a list")
        items: list[object] = list(value)  # pyright: ignore[reportUnknownArgumentType]
        if length is not None and len(items) != length:
            self.refuse(f"{name!r} has {len(items)} entries, not {length}")
        return items

    def fields(self, name: str, default: Mapping[str, object] | None = None) -> Fields:
        value, _ = self._read(name, _MISSING if default is None else default)
        return self._nested(name, value)

    def objects(self, name: str) -> list[Fields]:
        return [self._nested(f"{name}[{index}]", value) for index, value in enumerate(self.items(name))]

    def _nested(self, name: str, value: object) -> Fields:
        if not isinstance(value, Mapping):
            self.refuse(f"{name!r} is {_shown(value)}, not an object")
        content: dict[str, object] = dict(value)  # pyright: ignore[reportUnknownArgumentType]
        return Fields(content, f"{self.source}, {name}", self._error, self._hint)


def with_whole_numbers(fields: Fields) -> Fields:
    """Return the object with 12.0 as 12, since tools that merge data tables write integers as floats."""
    content = {n: int(v) if isinstance(v, float) and v.is_integer() else v for n, v in fields.content.items()}
    return Fields(content, fields.source, fields._error, fields._hint)  # pyright: ignore[reportPrivateUsage]


def open_descriptor(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Open a regular file; also an ``opener`` for ``open``. A pipe would wait for its other end, a device forever.

    Raises:
        OSError: the file is not regular, or can't be opened.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def open_regular_file(path: Path, follow_links: bool = False) -> BufferedReader:
    """Open a file for reading, refusing pipes and devices, and links unless links are followed.

    Raises:
        OSError: the file is refused, or can't be read.
    """
    return os.fdopen(open_descriptor(path, os.O_RDONLY | (0 if follow_links else os.O_NOFOLLOW)), "rb")


def check_regular_file(path: Path) -> None:
    """Check a file like ``open_regular_file``, following links, before a library opens it.

    Raises:
        OSError: the file is refused, or can't be read.
    """
    open_regular_file(path, follow_links=True).close()


def read_regular_file(path: Path, max_bytes: int, follow_links: bool = False) -> bytes:
    """Return the content of a file; see ``open_regular_file``.

    Raises:
        OSError: the file is refused, larger than ``max_bytes``, or can't be read.
    """
    with open_regular_file(path, follow_links) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes:,} bytes, the limit for such a file", str(path))
    return content


class TooLargeError(ValueError):
    """Unpacked bytes exceed the size limit."""


def unpack(packed: bytes, max_bytes: int) -> bytes:
    """Unpack zlib or gzip data with a size limit, since a few bytes may expand to gigabytes.

    Raises:
        TooLargeError: the content is larger than ``max_bytes``.
        ValueError: the data are damaged.
    """
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # 32: either, by its first bytes
    try:
        content = unpacker.decompress(packed, max_bytes)
        rest = unpacker.decompress(unpacker.unconsumed_tail, 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if rest:
        raise TooLargeError(f"it unpacks to more than {max_bytes:,} bytes, the limit for such a file")
    if not unpacker.eof:
        raise ValueError("it is cut off")
    return content


def read_fields(
    path: Path,
    error: type[EmbodrlError] = FileFormatError,
    hint: str = "restore the file from its origin",
    max_bytes: int = MAX_JSON_BYTES,
    follow_links: bool = True,
) -> Fields:
    """Read a JSON file with an object at the top level; without ``follow_links`` if it may be another user's.

    Raises:
        EmbodrlError: of class ``error``: the file can't be read, is too large, nested too deeply, or not a JSON object.
    """
    try:
        encoded = read_regular_file(path, max_bytes, follow_links)
    except OSError as cause:
        raise error(f"{path} can't be read: {cause.strerror or cause}", hint) from cause
    return parse_fields(encoded, str(path), error, hint, max_bytes)


def parse_fields(
    encoded: bytes | str,
    source: str,
    error: type[EmbodrlError] = FileFormatError,
    hint: str = "restore the file from its origin",
    max_bytes: int = MAX_JSON_BYTES,
) -> Fields:
    """Parse text that was read already, like ``read_fields``."""
    if len(encoded) > max_bytes:
        raise error(f"{source} is larger than {max_bytes:,} bytes, the limit for such a file", hint)
    try:
        content: object = json.loads(encoded)
    except RecursionError as cause:
        raise error(f"{source} is nested too deeply", hint) from cause
    except ValueError as cause:  # from json, or from a wrong encoding
        raise error(f"{source} is not valid JSON: {cause}", hint) from cause
    if not isinstance(content, dict):
        raise error(f"{source} holds {_shown(content)}, not a JSON object", hint)
    members: dict[str, object] = dict(content)  # pyright: ignore[reportUnknownArgumentType]
    return Fields(members, source, error, hint)


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
