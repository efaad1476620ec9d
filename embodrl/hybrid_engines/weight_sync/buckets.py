"""Weights as a stream, gathered and grouped a bucket at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from embodrl.errors import TornSyncError
from embodrl.models.base import VLAPolicy
from embodrl.storage.files import raw_bytes

Named = tuple[str, Tensor]
Layout = dict[str, tuple[int, ...]]
"""Shapes by name."""

DEFAULT_BUCKET_BYTES = 256 * 2**20


def gathered(tensor: Tensor) -> Tensor:
    """Return a tensor without gradient; of a ``DTensor`` the whole, which every rank of its mesh must ask for."""
    whole: Any = getattr(tensor, "full_tensor", None)
    return (tensor if whole is None else whole()).detach()


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def buckets(stream: Iterable[Named], bucket_bytes: int) -> Iterator[list[Named]]:
    """Yield the tensors in groups of at most ``bucket_bytes``; a larger tensor is a group of its own.

    A group is emptied when the next is asked for, so that only one is alive at a time (and one tensor, which did not
    fit). Who needs its tensors longer copies them.
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
        TornSyncError: there is no such dtype, or the bytes do not make up the shape.
    """
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or torch.Size(shape).numel() * kind.itemsize != raw.numel():
        raise TornSyncError(
            f"{raw.numel()} bytes are no tensor {dtype}{shape}", "run the same version of embodrl everywhere"
        )
    return raw.view(kind).reshape(shape)


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes.

    It is the fastest of the standard library, beside which ``blake2b`` takes five times as long, and finds every burst
    of errors up to 32 bits; it is no protection against an attacker.
    """
    return zlib.crc32(raw_bytes(tensor)) if tensor.numel() else 0


def trained_names(policy: VLAPolicy) -> frozenset[str]:
    """Return the names in ``state_dict`` of what training changes: the trainable parameters, and all buffers."""
    trained = {id(p) for group in policy.trainable_groups().values() for p in group}
    fixed = {name for name, p in policy.named_parameters(remove_duplicate=False) if id(p) not in trained}
    return frozenset(policy.state_dict().keys() - fixed)


def layout_of(module: nn.Module) -> Layout:
    """Return the names and shapes in the ``state_dict`` of a policy."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
