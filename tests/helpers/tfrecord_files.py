"""RLDS datasets as tensorflow_datasets writes them, made without it: TFRecord files with checksums by table."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

TABLE: list[int] = []
for value in range(256):
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    TABLE.append(value)


def crc(data: bytes) -> int:
    """The masked CRC-32C, byte after byte."""
    found = 0xFFFFFFFF
    for byte in data:
        found = TABLE[(found ^ byte) & 255] ^ found >> 8
    found ^= 0xFFFFFFFF
    return ((found >> 15 | found << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", crc(head)) + data + struct.pack("<I", crc(data))


def varint(number: int) -> bytes:
    out = bytearray()
    number &= 2**64 - 1
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def piece(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(features: Mapping[str, np.ndarray | Sequence[bytes]]) -> bytes:
    entries = b""
    for name, values in features.items():
        if not isinstance(values, np.ndarray):
            kind, content = 1, b"".join(piece(1, value) for value in values)
        elif values.dtype.kind == "f":
            kind, content = 2, piece(1, values.astype("<f4").tobytes())
        else:
            kind, content = 3, piece(1, b"".join(varint(int(value)) for value in values.ravel()))
        entries += piece(1, piece(1, name.encode()) + piece(2, piece(kind, content)))
    return piece(1, entries)


def encoded(picture: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, kind)
    return file.getvalue()


def tensor(*shape: int, dtype: str = "float32") -> dict[str, object]:
    return {"tensor": {"shape": {"dimensions": [str(n) for n in shape]}, "dtype": dtype, "encoding": "none"}}


def image(*shape: int, dtype: str = "uint8") -> dict[str, object]:
    return {"image": {"shape": {"dimensions": [str(n) for n in shape]}, "dtype": dtype, "encodingFormat": "png"}}


def group(**parts: object) -> dict[str, object]:
    return {"featuresDict": {"features": parts}}


def episode(number: int, length: int, words: Sequence[str] = ("lift the cup",)) -> dict[str, np.ndarray | list[bytes]]:
    """Steps of the features in ``FEATURES``; the camera ``dark`` is black."""
    rng = np.random.default_rng(number)
    said = [words[min(n, len(words) - 1)].encode() for n in range(length)]
    return {
        "steps/action": rng.normal(size=(length, 3)).astype(np.float32),
        "steps/observation/state": rng.normal(size=(length, 2)).astype(np.float32),
        "steps/observation/extra": rng.integers(-5, 5, (length,)),
        "steps/observation/top": [encoded(rng.integers(0, 256, (6, 8, 3), np.uint8)) for _ in range(length)],
        "steps/observation/dark": [encoded(np.zeros((6, 8, 3), np.uint8))] * length,
        "steps/observation/depth": [encoded(np.zeros((6, 8), np.uint8))] * length,
        "steps/language_instruction": said,
        "steps/reward": np.arange(length) == length - 1,
        "steps/is_terminal": np.arange(length) == length - 1,
    }


FEATURES = group(
    steps={
        "sequence": {
            "feature": group(
                action=tensor(3),
                observation=group(
                    state=tensor(2),
                    extra=tensor(dtype="int64"),
                    top=image(6, 8, 3),
                    dark=image(6, 8, 3),
                    depth=image(6, 8, 1),
                ),
                language_instruction={"text": {}},
                reward=tensor(),
                is_terminal=tensor(dtype="bool"),
            )
        }
    }
)


def write(directory: Path, shards: Mapping[str, Sequence[Mapping[str, np.ndarray | Sequence[bytes]]]]) -> Path:
    """Write files by name, e.g. ``toy-train.tfrecord-00000-of-00001``, and features.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "features.json").write_text(json.dumps(FEATURES))
    for name, episodes in shards.items():
        (directory / name).write_bytes(b"".join(record(example(one)) for one in episodes))
    return directory
