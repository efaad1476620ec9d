"""Between processes of one host: buckets in memory files whose descriptors go through a channel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

from embodrl.errors import ChannelClosed, ChannelTimeout, TornSyncError, WorkerError
from embodrl.hybrid_engines.weight_sync.base import (
    DEFAULT_STALL_TIMEOUT_S,
    Header,
    SyncReport,
    WeightReceiver,
    WeightSender,
    WeightTarget,
    shapes_of,
)
from embodrl.hybrid_engines.weight_sync.buckets import DEFAULT_BUCKET_BYTES, Layout, Named, buckets, checksum
from embodrl.hybrid_engines.weight_sync.staging import HINT, Staging

_CHECK_S = 1.0


class Pipe(Protocol):
    """A channel to one receiver; ``embodrl.scheduler.channel`` has them."""

    def put(self, value: Any, timeout_s: float | None = None) -> None:
        """Add a value, waiting for room."""
        ...

    def get(self, timeout_s: float | None = None) -> Any:
        """Take the oldest value, waiting for one."""
        ...


class MemorySender(WeightSender):
    """Copies each bucket into a memory file for every receiver.

    Args:
        pipes: one a receiver, with few places: each place is a bucket that may be in flight.
        trained: see WeightSender.
        bucket_bytes: see WeightSender.
        verify: send checksums along, which receivers compare.
        stall_timeout_s: seconds a receiver may leave its pipe full.

    Attributes:
        check: asked while a pipe is full; what it raises ends the sync.
    """

    def __init__(
        self,
        pipes: Sequence[Pipe],
        trained: Collection[str] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        verify: bool = False,
        stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
    ) -> None:
        super().__init__(trained, bucket_bytes)
        self.pipes, self.verify, self.stall_timeout_s = pipes, verify, stall_timeout_s
        self.check: Callable[[], None] = lambda: None

    def _send(self, header: Header, stream: Iterator[Named]) -> None:
        try:
            self._send_all(header, stream)
        except Exception as error:
            # A receiver that is only slow would else wait for buckets that do not come.
            patience_s = 0.0 if isinstance(error, (TornSyncError, WorkerError)) else self.stall_timeout_s
            for pipe in self.pipes:
                with contextlib.suppress(ChannelTimeout, ChannelClosed):
                    pipe.put({"sync": "abort", "version": header.version, "reason": str(error)}, patience_s)
            raise

    def _send_all(self, header: Header, stream: Iterator[Named]) -> None:
        num_buckets = num_tensors = 0
        self._put({"sync": "begin", "version": header.version, "base": header.base})
        for bucket in buckets(stream, self.bucket_bytes):
            sums = {name: checksum(tensor) for name, tensor in bucket} if self.verify else None
            part = {"sync": "bucket", "version": header.version, "index": num_buckets, "checksums": sums}
            self._put(part | {"tensors": dict(bucket)})
            num_buckets += 1
            num_tensors += len(bucket)
        self._put({"sync": "end", "version": header.version, "buckets": num_buckets, "tensors": num_tensors})

    def _put(self, message: dict[str, Any]) -> None:
        for number, pipe in enumerate(self.pipes):
            try:
                self._put_into(pipe, message)
            except (ChannelTimeout, ChannelClosed) as error:
                raise TornSyncError(
                    f"weights of version {message['version']} did not reach receiver {number}: {error.message}",
                    "see whether it is alive; then send the next version with full=True",
                ) from error

    def _put_into(self, pipe: Pipe, message: dict[str, Any]) -> None:
        deadline = time.monotonic() + self.stall_timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                return pipe.put(message, max(0.0, min(left_s, _CHECK_S)))
            except ChannelTimeout:
                self.check()
                if left_s <= _CHECK_S:
                    raise


class MemoryReceiver(WeightReceiver):
    """Keeps the memory files of a sync mapped until all have come, and copies them into the policy then.

    Args:
        target: see WeightReceiver.
        pipe: from the sender to this receiver alone.
        layout: see WeightReceiver.
        stall_timeout_s: seconds between two buckets after which the sender counts as gone.
    """

    def __init__(
        self,
        target: WeightTarget,
        pipe: Pipe,
        layout: Layout | None = None,
        stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
    ) -> None:
        super().__init__(target, layout)
        self.pipe, self.stall_timeout_s = pipe, stall_timeout_s
        self._begun: dict[str, Any] | None = None  # a beginning that cut another sync short
        self._given_up: int | None = None

    def receive(self, timeout_s: float = 0.0) -> SyncReport | None:
        """See WeightReceiver."""
        begin = self._beginning(timeout_s)
        if begin is None:
            return None
        clock = time.perf_counter()
        header = Header(begin["version"], begin["base"])
        # Until it has been taken over, what is left of it in the pipe is passed over by the next call.
        self._given_up = header.version
        self._check_version(header)
        staging = self._gather(header)
        self._check_layout(header, shapes_of(staging.tensors))
        self.target.update_weights(staging.tensors.items(), header.version)
        self._took(header)
        return SyncReport(
            header.version, header.full, len(staging.tensors), staging.num_bytes, time.perf_counter() - clock
        )

    def _beginning(self, timeout_s: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + timeout_s
        begun, self._begun = self._begun, None
        while begun is None:
            try:
                message: dict[str, Any] = self.pipe.get(max(0.0, deadline - time.monotonic()))
            except (ChannelTimeout, ChannelClosed):
                return None
            if message["sync"] == "begin":
                begun = message
            elif message["version"] != self._given_up:
                self._given_up = message["version"]
                raise TornSyncError(f"weights of version {message['version']} came without their beginning", HINT)
        return begun

    def _gather(self, header: Header) -> Staging:
        staging = Staging(header)
        while True:
            try:
                message: dict[str, Any] = self.pipe.get(self.stall_timeout_s)
            except (ChannelTimeout, ChannelClosed) as error:
                raise TornSyncError(
                    f"weights of version {header.version} stopped after {staging.num_buckets} buckets: {error.message}",
                    f"see whether the trainer is alive; {HINT}",
                ) from error
            if message["sync"] == "begin":
                self._begun = message
                raise TornSyncError(
                    f"weights of version {header.version} stopped after {staging.num_buckets} buckets:"
                    f" version {message['version']} began",
                    HINT,
                )
            if message["sync"] == "abort":
                raise TornSyncError(
                    f"weights of version {header.version} stopped after {staging.num_buckets} buckets: the sender"
                    f" failed with: {message['reason']}",
                    HINT,
                )
            if message["sync"] == "end":
                staging.finish(message["buckets"], message["tensors"])
                return staging
            staging.add(message["index"], message["tensors"], message["checksums"])
