"""Bounded, named queues between workers: ``put`` blocks while the queue is full, ``get`` while it is empty.

On one host a shared local socket keeps the messages in order, memory files carry their tensors, and an event counter
holds the free places. No broker process, no thread.
"""

from __future__ import annotations

import os
import select
import socket
import time
from abc import ABC, abstractmethod
from collections import deque

from embodrl.errors import ChannelClosed, ChannelError, ChannelTimeout
from embodrl.processes.frames import Frame, Kind, Sender, receive_now, socket_pair, wait_for
from embodrl.scheduler.messages import CODEC

_LINK = "rollout"  # the processes that a run shares channels with
MAX_CAPACITY = 64
"""Limit on messages in a channel; the kernel queues no more."""


class Channel(ABC):
    """A queue of values that ``messages.CODEC`` can send; each value goes to one receiver."""

    def __init__(self, name: str, capacity: int) -> None:
        if not 1 <= capacity <= MAX_CAPACITY:
            raise ChannelError(
                f"channel '{name}' of capacity {capacity}", f"give 1 to {MAX_CAPACITY}; put several values into one"
            )
        self.name = name
        self.capacity = capacity

    @abstractmethod
    def put(self, value: object, timeout_s: float | None = None) -> None:
        """Add a value; blocks while the channel is full.

        Raises:
            ChannelClosed: the channel is closed.
            ChannelTimeout: the channel stayed full.
            MessageError: the value can't be sent.
        """

    @abstractmethod
    def get(self, timeout_s: float | None = None) -> object:
        """Take the oldest value; blocks while the channel is empty.

        Raises:
            ChannelClosed: the channel is closed and empty.
            ChannelTimeout: the channel stayed empty.
        """

    @abstractmethod
    def close(self) -> None:
        """Reject further puts; queued items stay readable; wake all waiters."""

    def _closed(self) -> ChannelClosed:
        return ChannelClosed(
            f"channel '{self.name}' is closed", "get until the channel is empty, and put only before it is closed"
        )

    def _timeout(self, state: str, timeout_s: float | None) -> ChannelTimeout:
        hint = (
            "check what the workers at the other end wait for"
            if state == "empty"
            else "consume values faster, or give up waiting"
        )
        seconds = 0.0 if timeout_s is None else timeout_s
        return ChannelTimeout(f"channel '{self.name}' ({self.capacity} places) stayed {state} for {seconds:g} s", hint)


class SharedChannel(Channel):
    """A channel between processes of one host, which inherit its file descriptors.

    A process killed during a put or get may take one place of the capacity with it.
    """

    def __init__(self, name: str, capacity: int = 2, descriptors: tuple[int, int, int, int] | None = None) -> None:
        super().__init__(name, capacity)
        if descriptors is None:
            inlet, outlet = socket_pair()
            self._free = os.eventfd(capacity, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._free, self._end = descriptors[:2]
            inlet, outlet = (socket.socket(fileno=number) for number in descriptors[2:])
        self._inlet = inlet
        self._outlet = outlet
        self._sender = Sender(inlet, CODEC, link=_LINK)

    @property
    def descriptors(self) -> tuple[int, int, int, int]:
        """File descriptors that a process inherits to use the channel."""
        return self._free, self._end, self._inlet.fileno(), self._outlet.fileno()

    def put(self, value: object, timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            ready = wait_for({self._free: select.POLLIN, self._end: select.POLLIN}, deadline)
            # Checked first: a closed channel rejects values even if places are free.
            if self._end in ready:
                raise self._closed()
            if not ready:
                raise self._timeout("full", timeout_s)
            try:
                os.eventfd_read(self._free)
                break
            except BlockingIOError:
                continue  # another process was faster
        try:
            self._sender.send(Frame(Kind.ITEM, value=value), deadline)
        except BaseException:  # not even a signal may lose the free place; re-raised
            os.eventfd_write(self._free, 1)
            raise

    def get(self, timeout_s: float | None = None) -> object:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            frame = receive_now(self._outlet, CODEC, _LINK)
            if frame is not None:
                os.eventfd_write(self._free, 1)
                return frame.value
            ready = wait_for({self._outlet.fileno(): select.POLLIN, self._end: select.POLLIN}, deadline)
            if not ready:
                raise self._timeout("empty", timeout_s)
            # Only if no message is left: a closed channel can still be drained.
            if ready == {self._end}:
                raise self._closed()

    def close(self) -> None:
        # Never read, so that it stays readable and wakes all waiters.
        os.eventfd_write(self._end, 1)

    def release(self) -> None:
        """Close this process's file descriptors."""
        self._inlet.close()
        self._outlet.close()
        os.close(self._free)
        os.close(self._end)


class LocalChannel(Channel):
    """A channel within one process, where waiting would never end: full and empty are errors at once."""

    def __init__(self, name: str, capacity: int = 2) -> None:
        super().__init__(name, capacity)
        self._values: deque[object] = deque()
        self._is_closed = False

    def put(self, value: object, timeout_s: float | None = None) -> None:
        if self._is_closed:
            raise self._closed()
        if len(self._values) == self.capacity:
            raise self._timeout("full", 0.0)
        self._values.append(CODEC.copied(value))

    def get(self, timeout_s: float | None = None) -> object:
        if self._values:
            return self._values.popleft()
        raise self._closed() if self._is_closed else self._timeout("empty", 0.0)

    def close(self) -> None:
        self._is_closed = True
