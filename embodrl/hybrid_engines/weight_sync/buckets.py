"""Weights as a stream of named tensors, gathered and grouped one bucket at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from embodrl.errors import IncompleteSyncError
from embodrl.fields import parse_fields
from embodrl.hybrid_engines.training.sharding import is_sharded
from embodrl.models.base import VLAPolicy
from embodrl.storage.files import SAFETENSORS_DTYPE, raw_bytes

Named = tuple[str, Tensor]
Layout = Mapping[str, tuple[int, ...]]
"""Shapes by name."""

DEFAULT_BUCKET_BYTES = 256 * 2**20
_DTYPES = {code: dtype for dtype, code in SAFETENSORS_DTYPE.items()}


def gathered(tensor: Tensor) -> Tensor:
    """Return a tensor without gradient; gathering a ``DTensor`` is a collective call of its mesh."""
    return (tensor.full_tensor() if is_sharded(tensor) else tensor).detach()


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; a ``DTensor`` counts whole."""
    return tensor.numel() * tensor.element_size()


def buckets(stream: Iterable[Named], bucket_bytes: int) -> Iterator[list[Named]]:
    """Yield the tensors in groups of at most ``bucket_bytes``; a larger tensor is a group of its own.

    A group is cleared when the next one is requested, so that only one is alive at a time (plus the tensor that did not
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
        # The loop variable would keep a tensor of this bucket alive while the next one is gathered.
        del named
        size += added
    if bucket:
        yield bucket
        bucket.clear()


def unpacked(file: Tensor, what: str) -> dict[str, Tensor]:
    """Return the tensors of a bucket ``uint8[N]`` transferred as a safetensors file, in the same memory.

    The library's reader would copy everything twice.

    Raises:
        IncompleteSyncError: the bytes are not a safetensors file.
    """
    start = 8 + int.from_bytes(raw_bytes(file[:8]), "little")
    hint = "use the same version of embodrl everywhere"
    header = parse_fields(raw_bytes(file[8:start]).tobytes(), what, IncompleteSyncError, hint)
    tensors: dict[str, Tensor] = {}
    for name in header:
        entry = header.fields(name)
        dtype = _DTYPES.get(entry.text("dtype"))
        shape = torch.Size(map(int, entry.numbers("shape", low=0)))
        first, last = (start + int(offset) for offset in entry.numbers("data_offsets", 2, low=0))
        size = 0 if dtype is None else shape.numel() * dtype.itemsize
        # ``view`` needs a start that is a multiple of the element size.
        if dtype is None or not len(file[first:last]) == last - first == size or first % dtype.itemsize:
            entry.refuse(f"bytes {first} to {last} are not a tensor {entry.text('dtype')}{list(shape)}")
        tensors[name] = file[first:last].view(dtype).reshape(shape)
    return tensors


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes.

    The fastest checksum of the standard library (``blake2b`` takes five times as long). It detects every error burst
    up to 32 bits; it does not protect against an attacker.
    """
    return zlib.crc32(raw_bytes(tensor)) if tensor.numel() else 0


def trained_names(policy: VLAPolicy) -> frozenset[str]:
    """Return the ``state_dict`` names that training changes: the trainable parameters and all buffers."""
    trained = {id(p) for group in policy.trainable_groups().values() for p in group}
    # Tied weights have several names, all of which the state_dict contains.
    fixed = {name for name, p in policy.named_parameters(remove_duplicate=False) if id(p) not in trained}
    return frozenset(policy.state_dict().keys() - fixed)


def layout_of(weights: nn.Module | Mapping[str, Tensor]) -> Layout:
    """Return the names and shapes of tensors, or of a module's ``state_dict``; sharded ones have their whole shapes."""
    named = weights.state_dict() if isinstance(weights, nn.Module) else weights
    return {name: tuple(tensor.shape) for name, tensor in named.items()}


def layout_problems(found: Layout, expected: Layout, complete: bool = True) -> list[str]:
    """Return the differences of two layouts; names may be missing unless ``found`` is ``complete``."""
    unknown = sorted(found.keys() - expected.keys())
    missing = sorted(expected.keys() - found.keys()) if complete else []
    other = sorted(name for name in found.keys() & expected.keys() if found[name] != expected[name])
    problems = [f"{len(unknown)} unknown names, e.g. '{unknown[0]}'"] if unknown else []
    if missing:
        problems.append(f"{len(missing)} names are missing, e.g. '{missing[0]}'")
    if other:
        first = f"'{other[0]}' is {found[other[0]]} instead of {expected[other[0]]}"
        problems.append(f"{len(other)} have other shapes, e.g. {first}")
    return problems
