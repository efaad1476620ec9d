"""Weight sync between processes of one or several machines: buckets by ``torch.distributed`` broadcast."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from embodrl.errors import IncompleteSyncError
from embodrl.hybrid_engines.weight_sync.base import Header, StreamReceiver, StreamSender, WeightTarget
from embodrl.hybrid_engines.weight_sync.buckets import (
    DEFAULT_BUCKET_BYTES,
    Layout,
    Named,
    as_tensor,
    checksum,
    dtype_name,
    num_bytes,
)
from embodrl.hybrid_engines.weight_sync.group import SyncGroup

_ALIGNMENT = 16


class CollectiveSender(StreamSender):
    """Packs each bucket into one buffer, which is reused, and broadcasts that; succeeds if all receivers accept.

    Args:
        group: with rank 0.
        trained, bucket_bytes: see WeightSender.
        verify: send checksums, which receivers compare; on a GPU this costs a copy to the host.
    """

    def __init__(
        self,
        group: SyncGroup,
        trained: Collection[str] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        verify: bool = False,
    ) -> None:
        super().__init__(trained, bucket_bytes)
        self.group, self.verify, self._number = group, verify, 0
        self._buffer = torch.empty(0, dtype=torch.uint8, device=group.device)

    def _put(self, message: dict[str, Any], bucket: Iterable[Named], check: Callable[[], None]) -> None:
        if message["sync"] == "begin":
            self._number += 1
            self.group.announce(self._number)
            self.group.describe(message)
            return
        entries: list[list[Any]] = []  # name, dtype, shape, first byte, number of bytes
        filled = 0
        for name, tensor in bucket:
            entries.append([name, dtype_name(tensor.dtype), list(tensor.shape), filled, num_bytes(tensor)])
            filled += -(-num_bytes(tensor) // _ALIGNMENT) * _ALIGNMENT
        if filled > len(self._buffer):
            self._buffer = torch.empty(filled, dtype=torch.uint8, device=self.group.device)
        for (_, tensor), (*_, start, size) in zip(bucket, entries, strict=True):
            self._buffer[start : start + size].copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        sums = {name: checksum(tensor) for name, tensor in bucket} if self.verify else None
        self.group.describe(message | {"entries": entries, "num_bytes": filled, "checksums": sums})
        self.group.broadcast(self._buffer[:filled])

    def _finish(self, end: dict[str, Any], failure: Exception | None, check: Callable[[], None]) -> None:
        if failure is not None and self.group.broken:
            raise failure
        self.group.describe(end)
        agreed = self.group.all_agree(failure is None)
        if failure is not None:
            raise failure
        if not agreed:
            raise IncompleteSyncError(
                f"a receiver refused the weights of version {end['version']}, and none accepted them",
                "see its error; if it is new, send with full=True",
            )

    def close(self) -> None:
        self.group.close()


class CollectiveReceiver(StreamReceiver):
    """Keeps what it receives in host memory, votes, and accepts it if all receivers can.

    Args:
        target, layout: see WeightReceiver.
        group: with a rank above 0.
    """

    def __init__(self, target: WeightTarget, group: SyncGroup, layout: Layout | None = None) -> None:
        super().__init__(target, layout)
        self.group, self._number = group, 0

    @property
    def is_broken(self) -> bool:
        return self.group.broken

    def _begin(self, timeout_s: float) -> dict[str, Any] | None:
        if not self.group.announced(self._number + 1, timeout_s):
            return None
        self._number += 1
        return self.group.describe(None)

    def _next(self, header: Header, num_buckets: int) -> dict[str, Any]:
        message = self.group.describe(None)
        if message["sync"] == "bucket":
            buffer = torch.empty(message["num_bytes"], dtype=torch.uint8, device=self.group.device)
            self.group.broadcast(buffer)
            message["buffer"] = buffer.cpu()
        return message

    def _tensors(self, message: dict[str, Any]) -> dict[str, Tensor]:
        buffer: Tensor = message["buffer"]
        return {
            name: as_tensor(buffer[start : start + size], dtype, shape)
            for name, dtype, shape, start, size in message["entries"]
        }

    def _vote(self, agree: bool) -> bool:
        return self.group.all_agree(agree)

    def close(self) -> None:
        self.group.close()
