"""Between processes of one or several machines: buckets by ``torch.distributed`` broadcast."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from embodrl.errors import TornSyncError, WeightSyncError
from embodrl.hybrid_engines.weight_sync.base import (
    Header,
    SyncReport,
    WeightReceiver,
    WeightSender,
    WeightTarget,
    shapes_of,
)
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
from embodrl.hybrid_engines.weight_sync.staging import HINT, Staging

_ALIGNMENT = 16
Entry = list[Any]
"""Name, dtype, shape, first byte in the bucket, number of bytes, checksum or None."""


class CollectiveSender(WeightSender):
    """Copies tensors into one buffer of ``bucket_bytes``, which is all the memory it needs, and broadcasts that.

    Args:
        group: with rank 0.
        trained: see WeightSender.
        bucket_bytes: see WeightSender.
        verify: send checksums along, which receivers compare; on a GPU this costs a copy to the host.
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

    def _send(self, header: Header, stream: Iterator[Named]) -> None:
        self._number += 1
        self.group.announce(self._number)
        self.group.describe({"version": header.version, "base": header.base})
        num_buckets = num_tensors = 0
        failure: Exception | None = None
        try:
            for entries, buffer in self._packed(stream):
                self.group.describe({"index": num_buckets, "entries": entries, "num_bytes": buffer.numel()})
                self.group.broadcast(buffer)
                num_buckets += 1
                num_tensors += len(entries)
            end: dict[str, Any] = {"buckets": num_buckets, "tensors": num_tensors}
        except Exception as error:
            if self.group.broken:
                raise
            failure, end = error, {"reason": str(error)}
        self.group.describe({"end": end})
        agreed = self.group.all_agree(failure is None)
        if failure is not None:
            raise failure
        if not agreed:
            raise TornSyncError(
                f"a receiver refused the weights of version {header.version}, and none took them over",
                "see its error; if it is new, send with full=True",
            )

    def close(self) -> None:
        """Leave the group."""
        self.group.close()

    def _packed(self, stream: Iterator[Named]) -> Iterator[tuple[list[Entry], Tensor]]:
        """Yield the tensors, packed into one buffer that is used again and again; a larger tensor goes alone."""
        buffer: Tensor | None = None
        entries: list[Entry] = []
        filled = 0
        for name, tensor in stream:
            size = num_bytes(tensor)
            if entries and filled + size > self.bucket_bytes:
                assert buffer is not None
                yield entries, buffer[:filled]
                entries, filled = [], 0
            entry = [name, dtype_name(tensor.dtype), list(tensor.shape), filled, size]
            entry.append(checksum(tensor) if self.verify else None)
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            if size > self.bucket_bytes:
                entry[3] = 0
                yield [entry], flat.to(self.group.device)
                continue
            if buffer is None:
                buffer = torch.empty(self.bucket_bytes, dtype=torch.uint8, device=self.group.device)
            buffer[filled : filled + size].copy_(flat)
            entries.append(entry)
            filled = min(-(-(filled + size) // _ALIGNMENT) * _ALIGNMENT, self.bucket_bytes)
        if entries:
            assert buffer is not None
            yield entries, buffer[:filled]


class CollectiveReceiver(WeightReceiver):
    """Keeps what it gets in the memory of the host, votes, and copies it into the policy if all receivers can.

    Args:
        target: see WeightReceiver.
        group: with a rank above 0.
        layout: see WeightReceiver.
    """

    def __init__(self, target: WeightTarget, group: SyncGroup, layout: Layout | None = None) -> None:
        super().__init__(target, layout)
        self.group, self._number = group, 0

    def receive(self, timeout_s: float = 0.0) -> SyncReport | None:
        """See WeightReceiver; all receivers of the group take a version over, or none does."""
        if not self.group.announced(self._number + 1, timeout_s):
            return None
        self._number += 1
        clock = time.perf_counter()
        begin = self.group.describe(None)
        header = Header(begin["version"], begin["base"])
        staging, failure = Staging(header), None
        try:
            self._check_version(header)
        except WeightSyncError as error:
            failure = error
        # Whatever it thinks of them, it takes part to the end: the others wait for it.
        while "end" not in (part := self.group.describe(None)):
            buffer = torch.empty(part["num_bytes"], dtype=torch.uint8, device=self.group.device)
            self.group.broadcast(buffer)
            if failure is None:
                failure = _problem_of(staging, part, buffer.cpu())
        failure = failure or self._unfinished(staging, part["end"])
        agreed = self.group.all_agree(failure is None)
        if failure is not None:
            raise failure
        if not agreed:
            raise TornSyncError(f"another receiver refused the weights of version {header.version}", HINT)
        self.target.update_weights(staging.tensors.items(), header.version)
        self._took(header)
        return SyncReport(
            header.version, header.full, len(staging.tensors), staging.num_bytes, time.perf_counter() - clock
        )

    def close(self) -> None:
        """Leave the group."""
        self.group.close()

    def _unfinished(self, staging: Staging, end: dict[str, Any]) -> WeightSyncError | None:
        if "reason" in end:
            return TornSyncError(
                f"weights of version {staging.header.version} stopped after {staging.num_buckets} buckets: the sender"
                f" failed with: {end['reason']}",
                HINT,
            )
        try:
            staging.finish(end["buckets"], end["tensors"])
            self._check_layout(staging.header, shapes_of(staging.tensors))
        except WeightSyncError as error:
            return error
        return None


def _problem_of(staging: Staging, part: dict[str, Any], bucket: Tensor) -> WeightSyncError | None:
    """Keep the tensors of a bucket ``uint8[N]``; return what is wrong with them."""
    try:
        entries: list[Entry] = part["entries"]
        tensors = {e[0]: as_tensor(bucket[e[3] : e[3] + e[4]], dtype=e[1], shape=e[2]) for e in entries}
        staging.add(part["index"], tensors, {e[0]: e[5] for e in entries if e[5] is not None})
    except WeightSyncError as error:
        return error
    return None
