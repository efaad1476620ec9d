"""Safetensors files, written piece by piece."""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodrl.storage.atomic import write_file

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


class Deferred(Tensor):
    """Placeholder on the meta device for a tensor that ``compute`` returns when it is written; released afterwards."""

    compute: Callable[[], Tensor]

    @staticmethod
    def of(shape: torch.Size, dtype: torch.dtype, compute: Callable[[], Tensor]) -> Deferred:
        """Return a placeholder with the shape and dtype of the tensor that ``compute`` will return."""
        tensor = torch.empty(shape, dtype=dtype, device="meta").as_subclass(Deferred)
        tensor.compute = compute
        return tensor


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write and sync a new safetensors file; unlike the library's writer, follows the umask and allows shared memory.

    Raises OSError if the file exists or can't be written.
    """
    write_file(path, safetensors_bytes(tensors, metadata))


def safetensors_bytes(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file piece by piece: the header, then each non-empty tensor.

    The library's writer computes no hash and rejects tensors that share memory.
    """
    header, names = safetensors_header(tensors, metadata)
    yield header
    for name in names:
        if tensors[name].numel():
            yield raw_bytes(tensors[name])


def safetensors_header(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """Return the header of a safetensors file and the order in which the tensor data follows without gaps.

    https://huggingface.co/docs/safetensors/index#format
    """
    # Wide dtypes first, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        dtype = SAFETENSORS_DTYPE[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    # Pad the header, so that the first tensor is aligned.
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded, names


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor as a view, or as a copy if the tensor is not contiguous on the CPU."""
    whole = tensor.compute() if isinstance(tensor, Deferred) else tensor
    flat = whole.detach().to("cpu").contiguous()
    if not flat.numel():
        return memoryview(b"")
    # Not Tensor.numpy(): the storage could never again be resized to 0 when the engine is offloaded.
    memory: Any = (ctypes.c_uint8 * (flat.numel() * flat.element_size())).from_address(flat.data_ptr())
    memory.tensor = flat  # keeps the memory alive as long as the view
    return memoryview(memory).cast("B")
