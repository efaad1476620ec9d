"""Weight sync between processes of one host: buckets in memory files whose descriptors go through a channel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from typing import Protocol

from embodrl.errors import ChannelClosed, ChannelTimeout, IncompleteSyncError, WorkerError
from embodrl.fields import Fields
from embodrl.hybrid_engines.weight_sync.base import HINT, Check, Message, StreamReceiver, StreamSender, WeightTarget
from embodrl.hybrid_engines.weight_sync.buckets import DEFAULT_BUCKET_BYTES, Layout

STALL_TIMEOUT_S = 60.0
_CHECK_S = 1.0


class Pipe(Protocol):
    """A channel to one receiver, e.g. of ``embodrl.scheduler.channel``."""

    def put(self, value: object, timeout_s: float | None = None) -> None:
        """Add a value, waiting for room."""
        ...

    def get(self, timeout_s: float | None = None) -> object:
        """Take the oldest value, waiting for one."""
        ...


class MemorySender(StreamSender):
    """Copies each bucket into a memory file for every receiver.

    Args:
        pipes: one per receiver, with few slots: each slot is a bucket that may be in flight.
        trained, bucket_bytes, verify, patches: see StreamSender.
        stall_timeout_s: seconds a receiver may leave its pipe full.
    """

    def __init__(
        self,
        pipes: Sequence[Pipe],
        trained: Collection[str] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        verify: bool = False,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        patches: bool = False,
    ) -> None:
        super().__init__(trained, bucket_bytes, verify, patches)
        self.pipes = pipes
        self.stall_timeout_s = stall_timeout_s

    def _put(self, message: Message, check: Check) -> None:
        for number, pipe in enumerate(self.pipes):
            try:
                self._put_into(pipe, message, check)
            except (ChannelTimeout, ChannelClosed) as error:
                raise IncompleteSyncError(
                    f"weights of version {message.version} did not reach receiver {number}: {error.message}",
                    "check whether it is running; then send the next version with full=True",
                ) from error

    def _put_into(self, pipe: Pipe, message: Message, check: Check) -> None:
        deadline = time.monotonic() + self.stall_timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                # In short intervals: only ``check`` notices that the receiver has died.
                return pipe.put(vars(message), max(0.0, min(left_s, _CHECK_S)))
            except ChannelTimeout:
                check()
                if left_s <= _CHECK_S:
                    raise

    def _finish(self, end: Message, failure: Exception | None, check: Check) -> None:
        if failure is None:
            self._put(end, check)
            return
        # A receiver that is only slow would otherwise wait for buckets that never arrive.
        patience_s = 0.0 if isinstance(failure, (IncompleteSyncError, WorkerError)) else self.stall_timeout_s
        for pipe in self.pipes:
            with contextlib.suppress(ChannelTimeout, ChannelClosed):
                pipe.put(vars(end), patience_s)
        raise failure


class MemoryReceiver(StreamReceiver):
    """Keeps the memory files of a sync mapped until all have arrived, then copies them into the policy.

    Args:
        target, layout: see WeightReceiver.
        pipe: pipe from the sender to this receiver only.
        stall_timeout_s: seconds that the next bucket may take.
    """

    def __init__(
        self, target: WeightTarget, pipe: Pipe, layout: Layout | None = None, stall_timeout_s: float = STALL_TIMEOUT_S
    ) -> None:
        super().__init__(target, layout)
        self.pipe = pipe
        self.stall_timeout_s = stall_timeout_s
        self._begun: Message | None = None  # the begin that interrupted the previous sync
        self._skipped: int | None = None  # version whose remaining messages are ignored

    def _get(self, timeout_s: float) -> Message:
        received = Fields({"message": self.pipe.get(timeout_s)}, "weight sync", IncompleteSyncError, HINT)
        return Message.read(received.fields("message"))

    def _begin(self, timeout_s: float) -> Message | None:
        deadline = time.monotonic() + timeout_s
        begun = self._begun
        self._begun = None
        while begun is None:
            try:
                message = self._get(max(0.0, deadline - time.monotonic()))
            except (ChannelTimeout, ChannelClosed):
                return None
            if message.sync == "begin":
                begun = message
            elif message.version != self._skipped:
                # Further messages of this version are then skipped without another error.
                self._skipped = message.version
                raise IncompleteSyncError(f"weights of version {message.version} came without their header", HINT)
        self._skipped = begun.version
        return begun

    def _next(self, begin: Message, num_buckets: int) -> Message:
        stopped = f"weights of version {begin.version} stopped after {num_buckets} buckets"
        try:
            message = self._get(self.stall_timeout_s)
        except (ChannelTimeout, ChannelClosed) as error:
            hint = f"check whether the trainer is running; {HINT}"
            raise IncompleteSyncError(f"{stopped}: {error.message}", hint) from error
        if message.sync == "begin":
            self._begun = message
            raise IncompleteSyncError(f"{stopped}: version {message.version} began", HINT)
        return message
