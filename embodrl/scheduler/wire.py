"""Messages over local sockets: small ones inline, large ones in a memory file whose descriptor is handed over.

The receiver maps the memory file, so a tensor is copied once, by its sender. A memory file has no name: whoever is
killed leaves nothing behind.
"""

from __future__ import annotations

import array
import enum
import mmap
import os
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from embodrl.errors import MessageError
from embodrl.scheduler.messages import pack, unpack

# kind, call, length of the description, number of blobs, bytes in the memory file
_HEADER = struct.Struct("<BQQQQ")
_LENGTH = struct.Struct("<Q")
_INLINE_BYTES = 1024
_ALIGNMENT = 64
_FD_BYTES = array.array("i").itemsize


class Kind(enum.IntEnum):
    """What a message is."""

    START = 1
    CALL = 2
    CLOSE = 3
    OK = 16
    RAISED = 17
    ITEM = 32


class PeerGone(Exception):
    """The process at the other end has gone."""


@dataclass(frozen=True)
class Message:
    """What was received.

    Attributes:
        kind: what it is.
        call: number of the call that it belongs to.
        value: content.
    """

    kind: Kind
    call: int
    value: Any


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep messages whole."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def wait_for(descriptors: dict[Any, int], deadline: float | None) -> set[int]:
    """Return which file descriptors are ready; none once ``time.monotonic()`` has passed the deadline.

    Args:
        descriptors: of files or sockets, with the poll events wanted.
        deadline: None waits for ever.
    """
    poller = select.poll()
    for descriptor, events in descriptors.items():
        poller.register(descriptor, events)
    remaining = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
    return {descriptor for descriptor, _ in poller.poll(remaining)}


def send(sock: socket.socket, kind: Kind, call: int, value: Any, deadline: float | None = None) -> None:
    """Send a message.

    Raises:
        MessageError: the value can't be sent, or there is no memory for it.
        PeerGone: the other end has gone.
        TimeoutError: the deadline passed first.
    """
    description, blobs = pack(value)
    num_bytes = 0
    memory = -1
    if blobs or len(description) > _INLINE_BYTES:
        memory, num_bytes = _memory_file(description, blobs)
    inline = b"" if memory >= 0 else description
    header = _HEADER.pack(kind, call, len(description), len(blobs), num_bytes)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory]))] if memory >= 0 else []
    try:
        while True:
            try:
                sock.sendmsg([header, inline], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                if not wait_for({sock.fileno(): select.POLLOUT}, deadline):
                    raise TimeoutError from None
            except (BrokenPipeError, ConnectionResetError) as error:
                raise PeerGone from error
    finally:
        if memory >= 0:
            os.close(memory)


def receive(sock: socket.socket) -> Message | None:
    """Return the next message, None if there is none yet.

    Raises:
        PeerGone: the other end has gone.
        MessageError: it can't be read.
    """
    try:
        data, ancillary, _, _ = sock.recvmsg(
            _HEADER.size + _INLINE_BYTES, socket.CMSG_SPACE(_FD_BYTES), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        )
    except BlockingIOError:
        return None
    except ConnectionResetError as error:
        raise PeerGone from error
    if not data:
        raise PeerGone
    descriptors = array.array("i")
    for _, _, content in ancillary:
        descriptors.frombytes(content[: len(content) // _FD_BYTES * _FD_BYTES])
    kind, call, length, num_blobs, num_bytes = _HEADER.unpack_from(data)
    if not descriptors:
        return Message(Kind(kind), call, unpack(data[_HEADER.size : _HEADER.size + length], []))
    try:
        view = memoryview(mmap.mmap(descriptors[0], num_bytes))
    finally:
        os.close(descriptors[0])
    return Message(Kind(kind), call, _read(view, length, num_blobs))


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _memory_file(description: bytes, blobs: list[Any]) -> tuple[int, int]:
    """Return a memory file with the description, the lengths of the blobs and the blobs, and its size."""
    lengths = b"".join(_LENGTH.pack(blob.nbytes) for blob in blobs)
    offset = _aligned(len(description) + len(lengths))
    total = offset + sum(_aligned(blob.nbytes) for blob in blobs)
    memory = os.memfd_create("embodrl-message")
    try:
        # Not through a mapping: faulting in new pages takes longer than the copy, and a full memory is a bus error.
        os.ftruncate(memory, total)
        _write(memory, memoryview(description + lengths), 0)
        for blob in blobs:
            _write(memory, memoryview(blob), offset)
            offset += _aligned(blob.nbytes)
    except OSError as error:
        os.close(memory)
        raise MessageError(
            f"no {total / 2**20:.0f} MiB of memory for a message: {error}", "send less at once"
        ) from error
    return memory, total


def _write(memory: int, rest: memoryview, offset: int) -> None:
    """Write bytes, of which the system takes up to 2 GiB at once."""
    while rest:
        written = os.pwrite(memory, rest, offset)
        rest, offset = rest[written:], offset + written


def _read(view: memoryview, length: int, num_blobs: int) -> Any:
    sizes = [_LENGTH.unpack_from(view, length + index * _LENGTH.size)[0] for index in range(num_blobs)]
    offset = _aligned(length + num_blobs * _LENGTH.size)
    blobs: list[memoryview] = []
    for size in sizes:
        blobs.append(view[offset : offset + size])
        offset += _aligned(size)
    return unpack(view[:length], blobs)
