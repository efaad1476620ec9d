"""A training process that counts the bytes of whole tensors that it holds while it sends."""

from __future__ import annotations

from typing import Any

from sync_parts import PeakCounter

from embodrl.hybrid_engines.training import fsdp
from embodrl.scheduler.worker import dispatch
from embodrl.workers.actor import ActorWorker

_gather = fsdp.whole


class CountingWorker(ActorWorker):
    """Gathers through a counter, in small buckets."""

    @dispatch()
    def count(self, bucket_bytes: int) -> None:
        """Begin to count."""
        assert self.sending is not None and self.sending.sender is not None
        self.sending.sender.bucket_bytes = bucket_bytes
        self.counter, self.names = PeakCounter(), 0

        def counted(tensor: Any) -> Any:
            self.names += 1
            # A clone: what is not cut up is the policy's own, which lives on.
            return self.counter.watch(_gather(tensor).clone())

        fsdp.whole = counted

    @dispatch()
    def counted(self) -> tuple[int, int]:
        """Return how many tensors were gathered, and the bytes that were alive at a time."""
        return self.names, self.counter.peak
