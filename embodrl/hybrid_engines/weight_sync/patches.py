"""Patches: of a tensor that receivers already have in an older version, only the values whose bits have changed.

A patch is ``uint8[N]``: the positions of the k changed values among the n of the tensor, then their new bits. Positions
are ``int32[k]`` or, where that is shorter, a mask of n bits. Where a patch would not be shorter, the tensor goes whole.
Both sides keep a copy of the tensors in host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embodrl.errors import IncompleteSyncError, WeightVersionError
from embodrl.hybrid_engines.weight_sync.buckets import checksum, num_bytes

WHOLE = -1
"""In place of the number of changed values: the receiver has nothing to compare with."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POSITION_BYTES = 4


class Patch(NamedTuple):
    """A tensor as it is sent.

    Attributes:
        data: the patch, or the whole tensor.
        changed: number of values with other bits than before; WHOLE if unknown.
        crc32: checksum of the whole tensor.
    """

    data: Tensor
    changed: int
    crc32: int


def patch_form(tensor: Tensor, changed: int) -> tuple[Literal["positions", "mask", "whole"], int]:
    """Return the shortest form of a tensor with so many changed values, and its size in bytes."""
    total = tensor.numel()
    size = tensor.element_size()
    positions = changed * _POSITION_BYTES
    mask = (total + 7) // 8
    shortest = min(positions, mask) + changed * size
    if changed == WHOLE or size not in _BITS or total >= 2**31 or shortest >= total * size:
        return "whole", total * size
    return ("positions" if positions <= mask else "mask"), shortest


def make_patch(before: Tensor, after: Tensor) -> tuple[Tensor, int]:
    """Return the shortest form of ``after`` for a receiver of ``before``, and the number of changed values.

    The tensors are contiguous on the CPU, with equal shapes and dtypes.
    """
    bits = _BITS.get(after.element_size())
    if bits is None:
        return after, WHOLE
    new = after.reshape(-1).view(bits)
    differs = new != before.reshape(-1).view(bits)
    changed = int(differs.sum())
    form, _ = patch_form(after, changed)
    if form == "whole":
        return after, changed
    values = new[differs].view(torch.uint8)
    if form == "positions":
        where = differs.nonzero().reshape(-1).to(torch.int32).view(torch.uint8)
    else:
        where = torch.from_numpy(np.packbits(differs.numpy()))
    return torch.cat([where, values]), changed


def apply_patch(before: Tensor, data: Tensor, changed: int) -> Tensor:
    """Return the tensor that a patch ``uint8[N]`` or a whole tensor stands for, given the receiver's older one.

    Raises:
        IncompleteSyncError: the data is not such a patch.
    """
    form, size = patch_form(before, changed)
    if num_bytes(data) != size or changed > before.numel():
        raise IncompleteSyncError(
            f"a patch of {changed} values has {num_bytes(data)} bytes instead of {size}",
            "use the same version of embodrl everywhere",
        )
    if form == "whole":
        return data
    bits = _BITS[before.element_size()]
    split = size - changed * before.element_size()
    values = data[split:].clone().view(bits)  # a copy: a view needs an aligned start
    after = before.clone()
    flat = after.view(-1).view(bits)
    if form == "positions":
        where = data[:split].clone().view(torch.int32).long()
        sound = not changed or bool(where.min() >= 0 and where.max() < len(flat))
    else:
        mask = np.unpackbits(data[:split].numpy(), count=len(flat))
        where = torch.from_numpy(mask).bool()
        sound = int(where.sum()) == changed
    if not sound:
        raise IncompleteSyncError("a patch names values that its tensor does not have", "all weights are needed again")
    flat[where] = values
    return after


@dataclass
class SentCopies:
    """What the receivers have after the last successful sync, in the sender's host memory.

    Attributes:
        names: tensors that later syncs send; None for all.
        version: version of the copies; None if there are none, or if the last sync failed.
    """

    names: Collection[str] | None
    version: int | None = None
    _tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def forget(self) -> None:
        """Send everything whole next time."""
        self.version = None
        self._tensors.clear()

    def begin(self) -> int:
        """Return the version that the next patches change, -1 without one; until the sync ends there is none."""
        if self.version is None:
            self.forget()  # an interrupted sync has changed some of the copies
            return -1
        previous = self.version
        self.version = None
        return previous

    def patch(self, name: str, tensor: Tensor) -> Patch | None:
        """Return a tensor as it is sent, and remember it; None if later syncs don't send it."""
        if self.names is not None and name not in self.names:
            return None
        after = tensor.cpu().contiguous()
        before = self._tensors.get(name)
        crc32 = checksum(after)
        if before is None or before.shape != after.shape or before.dtype != after.dtype:
            self._tensors[name] = after.clone(memory_format=torch.contiguous_format)
            return Patch(tensor, WHOLE, crc32)
        data, changed = make_patch(before, after)
        before.copy_(after)
        # The whole tensor from where it is, perhaps on a GPU.
        return Patch(tensor if data is after else data, changed, crc32)


@dataclass
class ReceivedCopies:
    """The newest accepted tensors that patches may change, in the receiver's host memory.

    Attributes:
        version: their version; None if there are none.
    """

    version: int | None = None
    _tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def check(self, version: int, previous: int) -> None:
        """Check that patches can be applied; ``previous`` is the version that they change, below 0 without patches.

        Raises:
            WeightVersionError: these copies are of another version.
        """
        if previous >= 0 and previous != self.version:
            have = "none" if self.version is None else f"version {self.version}"
            raise WeightVersionError(
                f"version {version} has patches of version {previous}; this receiver has {have}",
                "send once with full=True",
            )

    def whole(self, tensors: Mapping[str, Tensor], changed: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the whole tensors of a bucket, given the number of changed values of those that copies are kept of.

        Raises:
            IncompleteSyncError: a patch is malformed, or its tensor is not among the copies.
        """
        found = dict(tensors)
        for name, count in changed.items():
            if count == WHOLE:
                continue
            if name not in self._tensors or name not in tensors:
                raise IncompleteSyncError(
                    f"a patch of '{name}' came without the tensor", "all weights are needed again"
                )
            found[name] = apply_patch(self._tensors[name], tensors[name], count)
        return found

    def keep(self, version: int, tensors: Mapping[str, Tensor], names: Collection[str]) -> None:
        """Remember accepted tensors of a version."""
        # Copies: they must not keep the memory of whole buckets.
        self._tensors = {name: tensors[name].clone(memory_format=torch.contiguous_format) for name in names}
        self.version = version if names else None
