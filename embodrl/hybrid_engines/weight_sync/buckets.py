"""Weights as a stream, gathered and grouped a bucket at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from embodrl.errors import IncompleteSyncError
from embodrl.models.base import VLAPolicy
from embodrl.storage.files import raw_bytes

Named = tuple[str, Tensor]
Layout = dict[str, tuple[int, ...]]
"""Shapes by name."""

DEFAULT_BUCKET_BYTES = 256 * 2**20


def gathered(tensor: Tensor) -> Tensor:
    """Return a tensor without gradient; a ``DTensor`` is gathered, which is a collective call of its mesh."""
    whole: Any = getattr(tensor, "full_tensor", None)
    return (tensor if whole is None else whole()).detach()


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def buckets(stream: Iterable[Named], bucket_bytes: int) -> Iterator[list[Named]]:
    """Yield the tensors in groups of at most ``bucket_bytes``; a larger tensor is a group of its own.

    A group is cleared when the next one is requested, so that only one is alive at a time (and the tensor that did not
    fit). Callers that need its tensors for longer copy them.
    """
    bucket: list[Named] = []
    size = 0
    for named in stream:
        added = num_bytes(named[1])
        if bucket and size + added > bucket_bytes:
            yield bucket
            bucket.clear()
            size = 0
        bucket.append(named)
        del named
        size += added
    if bucket:
        yield bucket
        bucket.clear()


def dtype_name(dtype: torch.dtype) -> str:
    """Return e.g. ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def as_tensor(raw: Tensor, dtype: str, shape: list[int]) -> Tensor:
    """Return bytes ``uint8[N]`` as a tensor of a named dtype and a shape, in the same memory.

    Raises:
        IncompleteSyncError: there is no such dtype, or the bytes do not make up the shape.
    """
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or torch.Size(shape).numel() * kind.itemsize != raw.numel():
        raise IncompleteSyncError(
            f"{raw.numel()} bytes are not a tensor {dtype}{shape}", "use the same version of embodrl everywhere"
        )
    return raw.view(kind).reshape(shape)


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes.

    The fastest checksum of the standard library (``blake2b`` takes five times as long). It detects every error burst
    up to 32 bits; it does not protect against an attacker.
    """
    return zlib.crc32(raw_bytes(tensor)) if tensor.numel() else 0


def trained_names(policy: VLAPolicy) -> frozenset[str]:
    """Return the ``state_dict`` names that training changes: the trainable parameters and all buffers."""
    trained = {id(p) for group in policy.trainable_groups().values() for p in group}
    fixed = {name for name, p in policy.named_parameters(remove_duplicate=False) if id(p) not in trained}
    return frozenset(policy.state_dict().keys() - fixed)


def layout_of(module: nn.Module) -> Layout:
    """Return the names and shapes in the ``state_dict`` of a policy."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
