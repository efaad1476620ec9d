"""Trainer and rollout in one process: what both hold is the same memory, and the rest is copied within it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

from torch import Tensor

from embodrl.errors import WeightLayoutError
from embodrl.hybrid_engines.weight_sync.base import (
    Header,
    SyncReport,
    WeightReceiver,
    WeightSender,
    shapes_of,
)
from embodrl.hybrid_engines.weight_sync.buckets import Named, num_bytes


class SharedReceiver(WeightReceiver):
    """Gets its weights at once when the sender sends; ``receive`` only tells of it."""

    _news: SyncReport | None = None

    def take(self, header: Header, weights: Sequence[Named]) -> None:
        """Take weights over; names and shapes are looked at before the first copy, and copies can't fail.

        Raises:
            WeightVersionError: as ``receive``.
            WeightLayoutError: as ``receive``.
        """
        clock = time.perf_counter()
        self._check_version(header)
        self._check_layout(header, shapes_of(dict(weights)))
        self.target.update_weights(weights, header.version)
        self._took(header)
        size = sum(num_bytes(tensor) for _, tensor in weights)
        self._news = SyncReport(header.version, header.full, len(weights), size, time.perf_counter() - clock)

    def receive(self, timeout_s: float = 0.0) -> SyncReport | None:
        """See WeightReceiver."""
        news, self._news = self._news, None
        return news


class SharedSender(WeightSender):
    """Hands references to receivers of the same process; nothing is gathered, so weights must be whole.

    Args:
        receivers: of this process.
        trained: see WeightSender.
    """

    def __init__(self, receivers: Sequence[SharedReceiver], trained: Collection[str] | None = None) -> None:
        super().__init__(trained)
        self.receivers = receivers

    def _send(self, header: Header, stream: Iterator[Named]) -> None:
        weights = list(stream)
        for receiver in self.receivers:
            receiver.take(header, weights)

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        if hasattr(tensor, "full_tensor"):
            raise WeightLayoutError(
                f"'{name}' is a shard, and sharing gathers nothing", "sync by memory, collective or disk"
            )
        return tensor.detach()
