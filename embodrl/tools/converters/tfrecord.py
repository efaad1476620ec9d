"""Reads TFRecord files, and the ``tf.train.Example`` in them, without TensorFlow.

A record is ``length uint64``, ``crc uint32`` of the length, the data, ``crc uint32`` of the data; little-endian. The
checksums are CRC-32C (Castagnoli), rotated and shifted. Both formats are small and frozen, and this reader is shorter
than the wrapper of a dependency; only the checksum has to be fast, and numpy computes it in lanes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodrl.data.demos import damaged
from embodrl.errors import EmbodrlError
from embodrl.fields import open_regular_file

MAX_RECORD_BYTES = 2**31
_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
_LANE = 256
"""Bytes per lane: a checksum is sequential within a lane, and lanes are computed in parallel."""
Values = NDArray[np.generic] | list[bytes]
Words = NDArray[np.uint32]


def records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the records of a file, each with its offset in bytes.

    Raises:
        FileDamagedError: a checksum is wrong, or the file ends within a record; names file and offset.
    """
    try:
        with open_regular_file(path, follow_links=True) as file:
            offset = 0
            while head := file.read(12):
                if len(head) < 12:
                    raise _wrong(path, offset, "the file ends within it")
                length, checksum = struct.unpack("<QI", head)
                if masked_crc(head[:8]) != checksum:
                    raise _wrong(path, offset, "the checksum of its length is wrong")
                if length > MAX_RECORD_BYTES:
                    raise _wrong(path, offset, f"it has {length:,} bytes, more than {MAX_RECORD_BYTES:,}")
                data = file.read(length)
                tail = file.read(4)
                if len(data) < length or len(tail) < 4:
                    raise _wrong(path, offset, "the file ends within it")
                if masked_crc(data) != struct.unpack("<I", tail)[0]:
                    raise _wrong(path, offset, "its checksum is wrong")
                yield offset, data
                offset += length + 16
    except OSError as error:
        raise EmbodrlError(
            f"{path} can't be read: {error.strerror or error}", "give a readable file", code="rlds-unreadable"
        ) from error


def masked_crc(data: bytes) -> int:
    """Return the masked CRC-32C that TFRecord files hold."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of ``data``."""
    start = np.frombuffer(b"\xff\xff\xff\xff", np.uint8)
    lanes = 1 << max(0, -(-max(len(data), 4) // _LANE) - 1).bit_length()
    padded = np.zeros(lanes * _LANE, np.uint8)  # leading zeros change nothing, as the checksum starts at 0
    padded[len(padded) - len(data) :] = np.frombuffer(data, np.uint8)
    short = len(data) < 4
    if not short:  # starting at all ones equals inverting the first four bytes of the data
        first = len(padded) - len(data)
        padded[first : first + 4] ^= start
    table = _table()
    sums = np.full(1, 0xFFFFFFFF, np.uint32) if short else np.zeros(lanes, np.uint32)
    columns = padded[len(padded) - len(data) :].reshape(-1, 1) if short else padded.reshape(lanes, _LANE).T
    for column in columns:
        sums = table[(sums ^ column) & 0xFF] ^ (sums >> np.uint32(8))
    power = 0
    while len(sums) > 1:
        sums = _applied(_zeros(power), sums[::2]) ^ sums[1::2]
        power += 1
    return int(sums[0]) ^ 0xFFFFFFFF


@cache
def _table() -> Words:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ np.where(table & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return table


@cache
def _zeros(power: int) -> Words:
    """Return the effect of ``_LANE * 2**power`` zero bytes on each byte value of a checksum: ``[4,256]``."""
    sums = np.arange(256, dtype=np.uint32)[None] << (8 * np.arange(4, dtype=np.uint32))[:, None]
    if power:
        return _applied(_zeros(power - 1), _applied(_zeros(power - 1), sums))
    table = _table()
    for _ in range(_LANE):
        sums = table[sums & 0xFF] ^ (sums >> np.uint32(8))
    return sums


def _applied(operator: Words, sums: Words) -> Words:
    parts = [operator[byte][(sums >> np.uint32(8 * byte)) & 0xFF] for byte in range(4)]
    return parts[0] ^ parts[1] ^ parts[2] ^ parts[3]


def _wrong(path: Path, offset: int, problem: str) -> EmbodrlError:
    return damaged(path, f"the record at byte {offset}: {problem}")


class Example:
    """The features of a ``tf.train.Example``, decoded when read.

    Args:
        path, offset: location, named in errors.

    Raises:
        FileDamagedError: the record is not a ``tf.train.Example``.
    """

    def __init__(self, data: bytes, path: Path, offset: int) -> None:
        self.path = path
        self.offset = offset
        self._features: dict[str, memoryview] = {}
        for number, features in self._messages(memoryview(data)):
            if number != 1:
                continue
            for _, entry in self._messages(features):
                parts = dict(self._messages(entry))
                if 1 in parts:
                    self._features[self._text(parts[1])] = parts.get(2, memoryview(b""))

    def __contains__(self, name: str) -> bool:
        return name in self._features

    def __getitem__(self, name: str) -> Values:
        """Return the values of a feature: ``float32[n]``, ``int64[n]``, or n byte strings; KeyError if absent."""
        for kind, values in self._messages(self._features[name]):
            if kind == 1:
                return [bytes(value) for _, value in self._messages(values)]
            if kind in (2, 3):
                return self._numbers(values, kind)
        return []

    def refuse(self, problem: str) -> EmbodrlError:
        return _wrong(self.path, self.offset, problem)

    def _text(self, value: memoryview) -> str:
        try:
            return bytes(value).decode()
        except UnicodeDecodeError as error:
            raise self.refuse("the name of a feature is not UTF-8") from error

    def _numbers(self, values: memoryview, kind: int) -> NDArray[np.generic]:
        parts: list[NDArray[np.generic]] = []
        at = 0
        while at < len(values):
            key, at = self._varint(values, at)
            if key & 7 == 2:
                part, at = self._piece(values, at)
                parts.append(self._floats(part) if kind == 2 else self._varints(part))
            elif key & 7 == 5 and kind == 2:
                parts.append(self._floats(values[at : at + 4]))
                at += 4
            elif key & 7 == 0 and kind == 3:
                number, at = self._varint(values, at)
                parts.append(np.array([number], np.uint64).astype(np.int64))
            else:
                raise self.refuse("a list of numbers has entries of another type")
        return np.concatenate(parts) if parts else np.zeros(0, np.float32 if kind == 2 else np.int64)

    def _floats(self, part: memoryview) -> NDArray[np.generic]:
        if len(part) % 4:
            raise self.refuse("a list of floats ends within a number")
        return np.frombuffer(part, "<f4")

    def _varints(self, part: memoryview) -> NDArray[np.generic]:
        if not len(part):
            return np.zeros(0, np.int64)
        encoded = np.frombuffer(part, np.uint8)
        ends = np.flatnonzero(encoded < 128)
        starts = np.concatenate([[0], ends[:-1] + 1])
        if not len(ends) or ends[-1] != len(encoded) - 1 or (ends - starts).max() > 9:
            raise self.refuse("a list of integers ends within a number")
        place = np.arange(len(encoded)) - np.repeat(starts, ends - starts + 1)
        bits = (encoded & 127).astype(np.uint64) << (7 * place).astype(np.uint64)
        return np.bitwise_or.reduceat(bits, starts).astype(np.int64)

    def _messages(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Yield number and content of the length-delimited fields; an Example has no others."""
        at = 0
        while at < len(data):
            key, at = self._varint(data, at)
            if key & 7 != 2:
                raise self.refuse("it is not a tf.train.Example")
            part, at = self._piece(data, at)
            yield key >> 3, part

    def _piece(self, data: memoryview, at: int) -> tuple[memoryview, int]:
        length, at = self._varint(data, at)
        if length > len(data) - at:
            raise self.refuse("a field is longer than the record")
        return data[at : at + length], at + length

    def _varint(self, data: memoryview, at: int) -> tuple[int, int]:
        value = 0
        for place in range(10):
            if at + place >= len(data):
                break
            byte = data[at + place]
            value |= (byte & 127) << (7 * place)
            if byte < 128:
                return value, at + place + 1
        raise self.refuse("a number is truncated")
