"""Bounded, named queues between workers: who puts waits while the queue is full, who gets waits while it is empty.

On one host the queue is the kernel's: a local socket that all share keeps the messages in order, and their tensors lie
in memory files that are handed over. An event counter holds the free places. No process in the middle, no thread.
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

MAX_CAPACITY = 64
"""Messages in a channel at once; the kernel queues no more of them."""


class Channel(ABC):
    """A queue of values that ``messages.CODEC`` can send; each value goes to one of the receivers.

    Args:
        name: name in messages.
        capacity: values in it at most.
    """

    def __init__(self, name: str, capacity: int) -> None:
        if not 1 <= capacity <= MAX_CAPACITY:
            raise ChannelError(
                f"channel '{name}' of capacity {capacity}", f"give 1 to {MAX_CAPACITY}; put several values into one"
            )
        self.name = name
        self.capacity = capacity

    @abstractmethod
    def put(self, value: object, timeout_s: float | None = None) -> None:
        """Add a value, waiting for room.

        Raises:
            ChannelClosed: it is closed.
            ChannelTimeout: it stayed full.
            MessageError: the value can't be sent.
        """

    @abstractmethod
    def get(self, timeout_s: float | None = None) -> object:
        """Take the oldest value, waiting for one.

        Raises:
            ChannelClosed: it is closed and empty.
            ChannelTimeout: it stayed empty.
        """

    @abstractmethod
    def close(self) -> None:
        """Let nothing more in; what is in it can still be taken, and all who wait are woken."""

    def _closed(self) -> ChannelClosed:
        return ChannelClosed(f"channel '{self.name}' is closed", "get until it is empty, and put before it is closed")

    def _timeout(self, state: str, timeout_s: float | None) -> ChannelTimeout:
        hint = "see what those at the other end wait for" if state == "empty" else "take values faster, or give up"
        seconds = 0.0 if timeout_s is None else timeout_s
        return ChannelTimeout(f"channel '{self.name}' ({self.capacity} places) stayed {state} for {seconds:g} s", hint)


class SharedChannel(Channel):
    """A channel between processes of one host; they inherit its file descriptors.

    A process that is killed while it puts or gets may take one place with it.
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
        self._sender = Sender(inlet, CODEC)

    @property
    def descriptors(self) -> tuple[int, int, int, int]:
        """What a process inherits to be part of it."""
        return self._free, self._end, self._inlet.fileno(), self._outlet.fileno()

    def put(self, value: object, timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            ready = wait_for({self._free: select.POLLIN, self._end: select.POLLIN}, deadline)
            # First: a closed channel takes nothing more, even where places are free.
            if self._end in ready:
                raise self._closed()
            if not ready:
                raise self._timeout("full", timeout_s)
            try:
                os.eventfd_read(self._free)
                break
            except BlockingIOError:
                continue  # another was faster
        try:
            self._sender.send(Frame(Kind.ITEM, value=value), deadline)
        except BaseException:  # a signal too must not lose the free place; raised again
            os.eventfd_write(self._free, 1)
            raise

    def get(self, timeout_s: float | None = None) -> object:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            frame = receive_now(self._outlet, CODEC)
            if frame is not None:
                os.eventfd_write(self._free, 1)
                return frame.value
            ready = wait_for({self._outlet.fileno(): select.POLLIN, self._end: select.POLLIN}, deadline)
            if not ready:
                raise self._timeout("empty", timeout_s)
            # Only without a message as well: what is in a closed channel can still be taken.
            if ready == {self._end}:
                raise self._closed()

    def close(self) -> None:
        # It is never read, so that it stays readable and wakes everyone who waits.
        os.eventfd_write(self._end, 1)

    def release(self) -> None:
        """Close this process's file descriptors."""
        self._inlet.close()
        self._outlet.close()
        os.close(self._free)
        os.close(self._end)


class LocalChannel(Channel):
    """A channel within one process, where waiting would be forever: full and empty are errors at once."""

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
