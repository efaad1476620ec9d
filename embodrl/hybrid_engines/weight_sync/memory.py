"""Weight sync between processes of one host: buckets in memory files whose descriptors go through a channel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from embodrl.errors import ChannelClosed, ChannelTimeout, IncompleteSyncError, WorkerError
from embodrl.hybrid_engines.weight_sync.base import HINT, Header, StreamReceiver, StreamSender, WeightTarget
from embodrl.hybrid_engines.weight_sync.buckets import DEFAULT_BUCKET_BYTES, Layout, Named, checksum

STALL_TIMEOUT_S = 60.0
_CHECK_S = 1.0


class Pipe(Protocol):
    """A channel to one receiver; ``embodrl.scheduler.channel`` has them."""

    def put(self, value: Any, timeout_s: float | None = None) -> None:
        """Add a value, waiting for room."""
        ...

    def get(self, timeout_s: float | None = None) -> Any:
        """Take the oldest value, waiting for one."""
        ...


class MemorySender(StreamSender):
    """Copies each bucket into a memory file for every receiver.

    Args:
        pipes: one per receiver, with few places: each place is a bucket that may be in flight.
        trained, bucket_bytes: see WeightSender.
        verify: send checksums, which receivers compare.
        stall_timeout_s: seconds a receiver may leave its pipe full.
    """

    def __init__(
        self,
        pipes: Sequence[Pipe],
        trained: Collection[str] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        verify: bool = False,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        super().__init__(trained, bucket_bytes)
        self.pipes, self.verify, self.stall_timeout_s = pipes, verify, stall_timeout_s

    def _put(self, message: dict[str, Any], bucket: Iterable[Named], check: Callable[[], None]) -> None:
        if message["sync"] == "bucket":
            sums = {name: checksum(tensor) for name, tensor in bucket} if self.verify else None
            message = message | {"checksums": sums, "tensors": dict(bucket)}
        for number, pipe in enumerate(self.pipes):
            try:
                self._put_into(pipe, message, check)
            except (ChannelTimeout, ChannelClosed) as error:
                raise IncompleteSyncError(
                    f"weights of version {message['version']} did not reach receiver {number}: {error.message}",
                    "check whether it is running; then send the next version with full=True",
                ) from error

    def _put_into(self, pipe: Pipe, message: dict[str, Any], check: Callable[[], None]) -> None:
        deadline = time.monotonic() + self.stall_timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                return pipe.put(message, max(0.0, min(left_s, _CHECK_S)))
            except ChannelTimeout:
                check()
                if left_s <= _CHECK_S:
                    raise

    def _finish(self, end: dict[str, Any], failure: Exception | None, check: Callable[[], None]) -> None:
        if failure is None:
            self._put(end, (), check)
            return
        # A receiver that is only slow would otherwise wait for buckets that never come.
        patience_s = 0.0 if isinstance(failure, (IncompleteSyncError, WorkerError)) else self.stall_timeout_s
        for pipe in self.pipes:
            with contextlib.suppress(ChannelTimeout, ChannelClosed):
                pipe.put(end, patience_s)
        raise failure


class MemoryReceiver(StreamReceiver):
    """Keeps the memory files of a sync mapped until all have arrived, then copies them into the policy.

    Args:
        target, layout: see WeightReceiver.
        pipe: from the sender to this receiver alone.
        stall_timeout_s: seconds that the next bucket may take.
    """

    def __init__(
        self,
        target: WeightTarget,
        pipe: Pipe,
        layout: Layout | None = None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        super().__init__(target, layout)
        self.pipe, self.stall_timeout_s = pipe, stall_timeout_s
        self._begun: dict[str, Any] | None = None  # the header that cut the previous sync short
        self._skipped: int | None = None  # version whose remaining messages are ignored

    def _begin(self, timeout_s: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + timeout_s
        begun, self._begun = self._begun, None
        while begun is None:
            try:
                message: dict[str, Any] = self.pipe.get(max(0.0, deadline - time.monotonic()))
            except (ChannelTimeout, ChannelClosed):
                return None
            if message["sync"] == "begin":
                begun = message
            elif message["version"] != self._skipped:
                self._skipped = message["version"]
                raise IncompleteSyncError(f"weights of version {message['version']} came without their header", HINT)
        self._skipped = begun["version"]
        return begun

    def _next(self, header: Header, num_buckets: int) -> dict[str, Any]:
        stopped = f"weights of version {header.version} stopped after {num_buckets} buckets"
        try:
            message: dict[str, Any] = self.pipe.get(self.stall_timeout_s)
        except (ChannelTimeout, ChannelClosed) as error:
            hint = f"check whether the trainer is running; {HINT}"
            raise IncompleteSyncError(f"{stopped}: {error.message}", hint) from error
        if message["sync"] == "begin":
            self._begun = message
            raise IncompleteSyncError(f"{stopped}: version {message['version']} began", HINT)
        return message

    def _tensors(self, message: dict[str, Any]) -> dict[str, Tensor]:
        return message["tensors"]
