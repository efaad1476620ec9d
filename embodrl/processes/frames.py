"""Frames over a local socket: small ones inline, large ones in a memory file whose descriptor is passed along.

The receiver maps the memory file, so an array is copied once, by its sender. The memory file has no name, so a killed
process leaves nothing behind. The socket keeps message boundaries (SOCK_SEQPACKET), so no frame is ever half sent when
a deadline passes.
"""

from __future__ import annotations

import array
import enum
import fcntl
import mmap
import os
import resource
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.errors import EmbodrlError, MessageError
from embodrl.processes.codec import PLAIN, Blobs, Codec, aligned, placed
from embodrl.processes.memory_file import write_memory
from embodrl.processes.traffic import count_received, count_sent

# kind, number, argument, length of the description, bytes in the memory file
_HEADER = struct.Struct("<BQQQQ")
_INLINE_BYTES = 1024
_FD_BYTES = array.array("i").itemsize
# Computed once: operators of the flag enumeration cost as much as the system call.
_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_RECEIVE_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_CUT_SHORT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_MAX_DESCRIPTION_BYTES = 256 << 20
_BLOCK_BYTES = 512  # the unit of st_blocks, on every file system


class Kind(enum.IntEnum):
    """Request or answer type of a frame."""

    START = 1
    CALL = 2
    CLOSE = 3
    RESET = 4
    STEP = 5
    GET_STATE = 6
    SET_STATE = 7
    OFFLOAD = 8
    ONLOAD = 9
    OK = 16
    RAISED = 17
    ITEM = 32


_KINDS = frozenset(map(int, Kind))


class PeerGoneError(Exception):
    """The process at the other end has exited."""


@dataclass(frozen=True)
class Frame:
    """One message.

    Attributes:
        kind: request or answer type.
        number: number of its call, or of the result slot in a simulator's shared memory.
        argument: a count: actions in the chunk (STEP), environments (RESET).
        value: content.
    """

    kind: Kind
    number: int = 0
    argument: int = 0
    value: Any = None


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep message boundaries."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def wait_for(descriptors: Mapping[int, int], deadline: float | None) -> set[int]:
    """Return the ready file descriptors; none once ``time.monotonic()`` has passed the deadline, if any."""
    poller = select.poll()
    for descriptor, events in descriptors.items():
        poller.register(descriptor, events)
    remaining = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
    return {descriptor for descriptor, _ in poller.poll(remaining)}


class Sender:
    """Sends frames; thread-safe. With a ``link``, their bytes are counted for it (``traffic``)."""

    def __init__(
        self, sock: socket.socket, codec: Codec = PLAIN, peer_pidfd: int | None = None, link: str = ""
    ) -> None:
        self.sock = sock
        self.link = link
        self._codec = codec
        self._peer = peer_pidfd

    def send(self, frame: Frame, deadline: float | None = None) -> None:
        """Send a frame.

        Raises:
            MessageError: the value can't be sent, or memory for it is lacking.
            PeerGoneError: the peer has exited.
            TimeoutError: ``time.monotonic()`` passed the deadline first.
        """
        description, blobs = (b"", Blobs()) if frame.value is None else self._codec.pack(frame.value)
        if len(description) > _MAX_DESCRIPTION_BYTES:
            raise MessageError(
                f"a message has {len(description) >> 20} MiB without its arrays, at most"
                f" {_MAX_DESCRIPTION_BYTES >> 20} are read",
                "send arrays instead of lists",
            )
        memory = -1
        num_bytes = 0
        if blobs or blobs.files or len(description) > _INLINE_BYTES:
            memory, num_bytes = _message_file(description, blobs)
        header = _HEADER.pack(frame.kind, frame.number, frame.argument, len(description), num_bytes)
        descriptors = array.array("i", [memory, *blobs.files])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)] if memory >= 0 else []
        message = header if rights else header + description
        try:
            while True:
                try:
                    self.sock.sendmsg([message], rights, _SEND_FLAGS)
                    if self.link:
                        count_sent(self.link, len(message) + num_bytes)
                    return
                except BlockingIOError:
                    self._wait_writable(deadline)
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise PeerGoneError from error
        finally:
            # The message holds a duplicate of the descriptor, so this one is closed after success, too.
            if memory >= 0:
                os.close(memory)

    def _wait_writable(self, deadline: float | None) -> None:
        wanted = {self.sock.fileno(): select.POLLOUT}
        # A process forked by the peer may hold the socket open, so that writing alone would not reveal its death.
        if self._peer is not None:
            wanted[self._peer] = select.POLLIN
        ready = wait_for(wanted, deadline)
        if not ready:
            raise TimeoutError
        if ready == {self._peer}:
            raise PeerGoneError


def receive_now(sock: socket.socket, codec: Codec = PLAIN, link: str = "") -> Frame | None:
    """Return the next frame, or None if there is none yet; with a ``link``, its bytes are counted for it.

    Raises:
        PeerGoneError: the peer has exited.
        MessageError: the frame is unreadable.
    """
    try:
        space = socket.CMSG_SPACE((1 + codec.max_files) * _FD_BYTES)
        data, ancillary, flags, _ = sock.recvmsg(_HEADER.size + _INLINE_BYTES, space, _RECEIVE_FLAGS)
    except BlockingIOError:
        return None
    except ConnectionResetError as error:
        raise PeerGoneError from error
    descriptors = array.array("i")
    for _, _, content in ancillary:
        # A truncated message may end within a descriptor.
        descriptors.frombytes(content[: len(content) // _FD_BYTES * _FD_BYTES])
    try:
        if not data and _hung_up(sock):
            raise PeerGoneError
        if flags & _CUT_SHORT:
            _check_descriptors(sock)
            raise MessageError(
                f"a frame arrived in part: {len(data)} bytes, {len(descriptors)} memory files",
                "this is the sender's fault",
            )
        frame = parse_frame(data, descriptors, codec)
        if link:
            in_memory = _HEADER.unpack_from(data)[-1]
            count_received(link, len(data) + in_memory)
        return frame
    finally:
        # The mapping keeps the memory; open descriptors would add up to the limit of open files.
        for descriptor in descriptors:
            os.close(descriptor)


def _check_descriptors(sock: socket.socket) -> None:
    """Raise an EmbodrlError if all descriptors are in use, so that a missing one is not the sender's fault."""
    try:
        os.close(os.dup(sock.fileno()))
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        message = f"this process has all of its {limit} files open, so that a message could not be received"
        raise EmbodrlError(message, "raise the limit: ulimit -n 65536", code="open-files") from error


def _hung_up(sock: socket.socket) -> bool:
    """Return whether the other end is closed; an empty frame looks the same to ``recvmsg``."""
    poller = select.poll()
    poller.register(sock, 0)
    return bool(poller.poll(0))


def parse_frame(data: bytes, descriptors: Sequence[int], codec: Codec = PLAIN) -> Frame:
    """Return the frame in a message and its memory file, if any, validating everything: the sender may be a simulator
    whose native code corrupts memory.

    Args:
        data: the message.
        descriptors: of its memory file, and of those that the value has; the caller closes them.
        codec: codec of the value.

    Raises:
        MessageError: the frame is invalid.
    """
    if len(data) < _HEADER.size:
        raise _invalid(f"it has {len(data)} bytes, its header alone {_HEADER.size}")
    kind, number, argument, length, num_bytes = _HEADER.unpack_from(data)
    if kind not in _KINDS:
        raise _invalid(f"there is no kind {kind}")
    inline = len(data) - _HEADER.size
    most = 1 + codec.max_files if num_bytes else 0
    if not bool(num_bytes) <= len(descriptors) <= most or inline != (0 if num_bytes else length):
        raise _invalid(
            f"it announces {length} bytes and {num_bytes} in a memory file, and holds {inline} bytes and"
            f" {len(descriptors)} memory files"
        )
    value = None
    if num_bytes:
        view = _map(descriptors[0], length, num_bytes)
        body = view[aligned(length) :]
        value = codec.read_from(view[:length], lambda start, count: body[start : start + count], descriptors[1:])
    elif length:
        value = codec.read_from(data[_HEADER.size :], lambda *_: b"")
    return Frame(Kind(kind), number, argument, value)


def _map(memory: int, length: int, num_bytes: int) -> memoryview:
    """Map a memory file with a description of ``length`` bytes.

    It is sealed against shrinking and its pages exist, since reading a missing page, or one without free memory, causes
    a bus error, which would end this process.
    """
    try:
        seals = fcntl.fcntl(memory, fcntl.F_GET_SEALS)
        found = os.fstat(memory)
    except OSError as error:
        raise _invalid(f"its descriptor is not a memory file ({error.strerror})") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise _invalid("its memory file is not sealed")
    if found.st_size != num_bytes or found.st_blocks * _BLOCK_BYTES < num_bytes:
        raise _invalid(f"its memory file has {found.st_size} bytes, {found.st_blocks * _BLOCK_BYTES} of them written")
    if not 0 < length <= min(_MAX_DESCRIPTION_BYTES, num_bytes):
        raise _invalid(f"its description has {length} of {num_bytes} bytes")
    try:
        return memoryview(mmap.mmap(memory, num_bytes))
    except (OSError, ValueError, OverflowError) as error:
        raise _invalid(f"its memory file of {num_bytes} bytes can't be mapped ({error})") from error


def _invalid(problem: str) -> MessageError:
    return MessageError(f"invalid frame: {problem}", "run the same version of embodrl in all processes")


class Connection(Sender):
    """One end of a connected pair, with deadlines and prompt detection of the peer's death.

    Args:
        sock: socket from ``socket_pair``.
        codec: codec of the values.
        peer_pidfd: the peer's pidfd: a process forked by the peer may hold the peer's socket open, so end-of-file alone
            would not report its death.
        link: what the bytes of the frames are counted for; "" for nothing.
    """

    def __init__(
        self, sock: socket.socket, codec: Codec = PLAIN, peer_pidfd: int | None = None, link: str = ""
    ) -> None:
        super().__init__(sock, codec, peer_pidfd, link)
        self._readable = select.poll()  # created once, since every simulator step waits on it
        self._readable.register(sock, select.POLLIN)
        if peer_pidfd is not None:
            self._readable.register(peer_pidfd, select.POLLIN)

    def receive(self, deadline: float | None = None) -> Frame:
        """Return the next frame. Frames sent before the peer's death still arrive.

        Raises:
            PeerGoneError: the peer has exited.
            TimeoutError: ``time.monotonic()`` passed the deadline first.
            MessageError: the frame is unreadable.
        """
        while True:
            remaining_ms = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
            events = self._readable.poll(remaining_ms)
            if any(descriptor == self.sock.fileno() for descriptor, _ in events):
                frame = receive_now(self.sock, self._codec, self.link)
                if frame is not None:
                    return frame
            elif events:
                raise PeerGoneError
            elif deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError

    def close(self) -> None:
        """Close this end; the peer sees end-of-file."""
        self.sock.close()


def _message_file(description: bytes, blobs: list[NDArray[np.uint8]]) -> tuple[int, int]:
    """Return a memory file with the description and the blobs at their offsets in the body, and its size."""
    body = aligned(len(description))
    total = body + sum(aligned(blob.nbytes) for blob in blobs)
    parts = [(body + start, blob.data) for start, blob in placed(blobs)]
    return write_memory("embodrl-message", [(0, memoryview(description)), *parts], total), total
