"""Files written so that a crash leaves them whole or tells: safetensors piece by piece, and synced to the disk."""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_BLOCK = 16 * 2**20
SAFETENSORS_DTYPE = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}


def safetensors_bytes(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file piece by piece (https://huggingface.co/docs/safetensors/index#format).

    First the header, then each tensor that is not empty. The library writes the file itself, without a hash, and
    refuses tensors that share memory.
    """
    # Wide types first, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        dtype = SAFETENSORS_DTYPE[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield struct.pack("<Q", len(encoded)) + encoded
    for name in names:
        if tensors[name].numel():
            yield raw_bytes(tensors[name])


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor, on the CPU and contiguous; a copy only where it is not so already."""
    flat = tensor.detach().to("cpu").contiguous()
    if not flat.numel():
        return memoryview(b"")
    # Not Tensor.numpy(), after which the memory could never be given up again.
    memory: Any = (ctypes.c_uint8 * (flat.numel() * flat.element_size())).from_address(flat.data_ptr())
    memory.tensor = flat  # as long as somebody looks at it
    return memoryview(memory).cast("B")


def write_file(path: Path, chunks: Iterator[bytes | memoryview]) -> int:
    """Write and sync a new file; return its size in bytes.

    Raises:
        OSError: it exists, or can't be written.
    """
    num_bytes = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for chunk in chunks:
            view = memoryview(chunk)
            num_bytes += len(view)
            while view:
                view = view[os.write(descriptor, view[:_BLOCK]) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return num_bytes


def sync_directory(path: Path) -> None:
    """Make what was created, renamed or removed in a directory last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
