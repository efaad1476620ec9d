"""Small typed frames over a local socket, with deadlines and prompt notice of the peer's death."""

from __future__ import annotations

import enum
import select
import socket
import struct
import time
from dataclasses import dataclass

_HEADER = struct.Struct("<BBHIQ")


class Kind(enum.IntEnum):
    """What a frame asks for or answers."""

    BUILD = 1
    RESET = 2
    STEP = 3
    GET_STATE = 4
    SET_STATE = 5
    CALL = 6
    CLOSE = 7
    OFFLOAD = 8
    ONLOAD = 9
    OK = 16
    RAISED = 17


class PeerGoneError(Exception):
    """The process at the other end has gone."""


@dataclass(frozen=True)
class Frame:
    """One message.

    Attributes:
        kind: what it means.
        slot: which result slot of the shared memory it is about.
        argument: a count: actions in the chunk (STEP), environments (RESET).
        payload: bytes of ``codec.encode``, or a simulator state.
    """

    kind: Kind
    slot: int = 0
    argument: int = 0
    payload: bytes | bytearray = b""


class Channel:
    """One end of a connected stream socket.

    Args:
        sock: the socket; becomes non-blocking.
        peer_pidfd: the peer's pidfd. A process forked by the peer may hold the peer's socket open,
            so that end-of-file alone would not tell of its death.
    """

    def __init__(self, sock: socket.socket, peer_pidfd: int | None = None) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._readable = select.poll()
        self._writable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        if peer_pidfd is not None:
            self._readable.register(peer_pidfd, select.POLLIN)
            self._writable.register(peer_pidfd, select.POLLIN)
        self._header = bytearray(_HEADER.size)

    def send(self, frame: Frame, deadline: float | None = None) -> None:
        """Send a frame.

        Raises:
            PeerGoneError: the peer has gone.
            TimeoutError: ``time.monotonic()`` passed the deadline first.
        """
        header = _HEADER.pack(frame.kind, frame.slot, 0, frame.argument, len(frame.payload))
        self._send_all(memoryview(header), deadline)
        if frame.payload:
            self._send_all(memoryview(frame.payload), deadline)

    def receive(self, deadline: float | None = None) -> Frame:
        """Return the next frame.

        Raises:
            PeerGoneError: the peer has gone.
            TimeoutError: ``time.monotonic()`` passed the deadline first.
        """
        self._wait(self._readable, deadline)
        self._receive_into(memoryview(self._header), deadline)
        kind, slot, _, argument, length = _HEADER.unpack(self._header)
        if not length:
            return Frame(Kind(kind), slot, argument)
        payload = bytearray(length)
        self._receive_into(memoryview(payload), deadline)
        return Frame(Kind(kind), slot, argument, payload)

    def close(self) -> None:
        """Close this end; the peer sees end-of-file."""
        self._sock.close()

    def _wait(self, poller: select.poll, deadline: float | None) -> None:
        while True:
            remaining_ms = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
            events = poller.poll(remaining_ms)
            if any(fd == self._sock.fileno() for fd, _ in events):
                return
            if events:
                raise PeerGoneError
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError

    def _send_all(self, data: memoryview, deadline: float | None) -> None:
        while data:
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                self._wait(self._writable, deadline)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise PeerGoneError from error

    def _receive_into(self, target: memoryview, deadline: float | None) -> None:
        while target:
            try:
                count = self._sock.recv_into(target)
            except BlockingIOError:
                self._wait(self._readable, deadline)
                continue
            except ConnectionResetError as error:
                raise PeerGoneError from error
            if count == 0:
                raise PeerGoneError
            target = target[count:]
