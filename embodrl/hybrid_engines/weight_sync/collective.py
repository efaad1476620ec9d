"""Weight sync between processes of one or several machines: buckets by ``torch.distributed`` broadcast."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from embodrl.errors import EmbodrlError, IncompleteSyncError
from embodrl.fields import Fields, parse_fields
from embodrl.hybrid_engines.process_groups import loopback_only
from embodrl.hybrid_engines.weight_sync.base import (
    HINT,
    Check,
    Message,
    StreamReceiver,
    StreamSender,
    WeightTarget,
    no_check,
)
from embodrl.hybrid_engines.weight_sync.buckets import DEFAULT_BUCKET_BYTES, Layout, unpacked
from embodrl.storage.files import safetensors_header

SENDER = 0
_POLL_S = 0.005
_CONNECT_POLL_S = 0.02
_BACKLOG = 128
_HERE = "here"
_CANCELLED = "cancelled"


def open_rendezvous(init_method: str, world_size: int, is_sender: bool = True, timeout_s: float = 60.0) -> Store:
    """Return the store through which a group connects; the sender opens it at once, before the others can find it.

    Not torch's rendezvous, in which the sender would wait for a dead receiver, and which listens on every address of
    the machine instead of this one.

    Raises:
        RuntimeError: a receiver did not find it in time.
        IncompleteSyncError: the sender cannot listen there.
    """
    where = urlsplit(init_method)
    if where.scheme == "file":
        return FileStore(where.path, world_size)
    host = str(where.hostname)
    port = where.port or 0
    timeout = timedelta(seconds=timeout_s)
    if not is_sender:
        return TCPStore(host, port, world_size, False, timeout, wait_for_workers=False)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    try:
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        hint = "another program uses the port, or the address is not one of this machine"
        raise IncompleteSyncError(f"a weight sync cannot be sent from {init_method}: {error}", hint) from error
    return TCPStore(host, port, world_size, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach())


def cancel_rendezvous(rendezvous: Store) -> None:
    """Notify the connected processes; closing the store would not while anything refers to it."""
    rendezvous.set(_CANCELLED, "")


class _Connection(NamedTuple):
    store: Store  # announces syncs
    control: Any  # gloo, for messages and votes; torch declares no collective calls of a backend
    data: Any  # for buckets: NCCL, or gloo on a CPU


class SyncGroup:
    """One sender, rank 0, and its receivers. Messages and votes use gloo; on a GPU the weights use NCCL.

    Independent of other process groups, so that a rank of a sharded trainer can be in both.

    Args:
        init_method: ``tcp://HOST:PORT`` (of the sender) or ``file:///PATH``, the same for all.
        rank: 0 sends.
        world_size: sender and receivers.
        device: device of the buckets; each rank on a GPU needs its own.
        timeout_s: seconds that any process may keep the others waiting within a sync.
        connect_s: seconds until all must have connected, if longer.
        check: called while waiting for the others; raises if one has died.
        find_s: seconds until a receiver must find the sender's rendezvous open; None: ``connect_s``.
    """

    def __init__(
        self,
        init_method: str,
        rank: int,
        world_size: int,
        device: torch.device | str = "cpu",
        timeout_s: float = 60.0,
        connect_s: float = 0.0,
        check: Check = no_check,
        find_s: float | None = None,
    ) -> None:
        if world_size < 2:
            raise EmbodrlError(
                "a collective weight sync needs at least one receiver",
                "use a world_size of 2 or more",
                code="weight-sync-settings",
            )
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self._connection: _Connection | None = None
        connect_s = max(timeout_s, connect_s)
        try:
            find_s = connect_s if find_s is None else find_s
            store = open_rendezvous(init_method, world_size, rank == SENDER, find_s)
            self._wait_for_all(store, connect_s, check)
            where = urlsplit(init_method)
            # gloo does not authenticate connections, so a group on one machine must not listen on its network address.
            with loopback_only(where.scheme == "file" or where.hostname in ("127.0.0.1", "localhost", "::1")):
                self._connection = self._connect(store, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise IncompleteSyncError(
                f"{world_size} processes of a weight sync did not connect at {init_method}: {error}",
                "check whether trainer and rollouts are running, and create a new group",
            ) from error

    def _wait_for_all(self, store: Store, connect_s: float, check: Check) -> None:
        store.add(_HERE, 1)
        deadline = time.monotonic() + connect_s
        while (number := store.add(_HERE, 0)) < self.world_size:
            try:
                check()
            except BaseException:  # also after a signal, which is re-raised: no thread may stay in the rendezvous
                cancel_rendezvous(store)
                raise
            if store.check([_CANCELLED]):
                raise RuntimeError("the sender has cancelled it")
            if time.monotonic() >= deadline:
                raise RuntimeError(f"{number} of them connected within {connect_s:g} s")
            time.sleep(_CONNECT_POLL_S)

    def _connect(self, store: Store, timeout: timedelta) -> _Connection:
        store.set_timeout(timeout)
        control = dist.ProcessGroupGloo(PrefixStore("weight_sync", store), self.rank, self.world_size, timeout)
        if self.device.type != "cuda":
            return _Connection(store, control, control)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # pyright: ignore[reportPrivateUsage]  (its only setter)
        data = dist.ProcessGroupNCCL(PrefixStore("weight_sync_data", store), self.rank, self.world_size, options)
        return _Connection(store, control, data)

    @property
    def broken(self) -> bool:
        """Whether the group was closed, or has lost a process."""
        return self._connection is None

    def close(self) -> None:
        """Leave the group, which becomes unusable; processes that wait for this one get an error at once."""
        # Gloo closes its connections when nothing refers to the group; its abort() does not wake waiting processes.
        connection = self._connection
        self._connection = None
        if connection is not None and connection.data is not connection.control:
            connection.data.abort()

    def announce(self, number: int) -> None:
        """Announce a sync to the receivers (sender only)."""
        with self._guard("announcing a sync"):
            self._open.store.set(f"sync_{number}", "begun")

    def announced(self, number: int, timeout_s: float) -> bool:
        """Return whether a sync begins within the given seconds (receivers only)."""
        with self._guard("waiting for a sync"):
            deadline = time.monotonic() + timeout_s
            # Not store.wait: its timeout error depends on the store.
            while not self._open.store.check([f"sync_{number}"]):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL_S)
            return True

    def describe(self, content: bytes = b"") -> bytes:
        """Broadcast a few bytes from the sender; the receivers' content is ignored."""
        with self._guard("a description"):
            # Receivers must know the size before they can take part in the second broadcast.
            length = torch.tensor([len(content)])
            self._open.control.broadcast(length, SENDER).wait()
            buffer = torch.empty(int(length), dtype=torch.uint8)
            if self.rank == SENDER:
                # A copy: memory of ``bytes`` is read-only, and torch requires writable memory.
                buffer = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
            self._open.control.broadcast(buffer, SENDER).wait()
            return buffer.numpy().tobytes()

    def broadcast(self, buffer: Tensor) -> None:
        """Broadcast a bucket ``uint8[N]`` on the group's device from the sender, in place."""
        if buffer.numel():
            with self._guard("a bucket"):
                self._open.data.broadcast(buffer, SENDER).wait()

    def all_agree(self, agree: bool) -> bool:
        """Return whether all ranks agree."""
        with self._guard("the vote"):
            vote = torch.tensor([int(agree)])
            self._open.control.allreduce(vote, dist.ReduceOp.MIN).wait()
            return bool(vote)

    @property
    def _open(self) -> _Connection:
        # Use only within an expression: in a frame's variable it would outlive close() through an error's traceback,
        # and other processes would wait for this one until their timeout.
        if self._connection is None:
            raise IncompleteSyncError("the group of the weight sync has lost a process", "create a new group")
        return self._connection

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """Convert the transport's errors about a lost process to ``IncompleteSyncError``, and close the group."""
        try:
            yield
        except RuntimeError as error:
            self.close()
            raise IncompleteSyncError(
                f"a process of the weight sync was lost at {what}: {error}",
                "check whether trainer and rollouts are running, and create a new group",
            ) from error


class CollectiveSender(StreamSender):
    """Packs each bucket into a reused buffer and broadcasts it from rank 0; succeeds if all receivers accept.

    For ``trained``, ``bucket_bytes``, ``verify`` and ``patches`` see StreamSender.
    """

    def __init__(
        self,
        group: SyncGroup,
        trained: Collection[str] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        verify: bool = False,
        patches: bool = False,
    ) -> None:
        super().__init__(trained, bucket_bytes, verify, patches)
        self.group = group
        self._number = 0
        self._buffer = torch.empty(0, dtype=torch.uint8, device=group.device)

    def _put(self, message: Message, check: Check) -> None:
        if message.sync == "begin":
            self._number += 1
            self.group.announce(self._number)
        packed = self._packed(message.tensors)
        content = vars(message) | {"tensors": {}, "num_bytes": len(packed)}
        self.group.describe(json.dumps(content).encode())
        if message.sync == "bucket":
            self.group.broadcast(packed)

    def _packed(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a bucket as a safetensors file ``uint8[N]`` on the group's device."""
        header, names = safetensors_header(tensors)
        pieces = [torch.frombuffer(bytearray(header), dtype=torch.uint8)]
        pieces += [tensors[name].contiguous().reshape(-1).view(torch.uint8) for name in names]
        size = sum(map(len, pieces))
        if size > len(self._buffer):
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self.group.device)
        start = 0
        for piece in pieces:
            self._buffer[start : start + len(piece)].copy_(piece)
            start += len(piece)
        return self._buffer[:size]

    def _finish(self, end: Message, failure: Exception | None, check: Check) -> None:
        # Without the group no vote can be held.
        if failure is not None and self.group.broken:
            raise failure
        self._put(end, check)
        agreed = self.group.all_agree(failure is None)
        if failure is not None:
            raise failure
        if not agreed:
            raise IncompleteSyncError(
                f"a receiver refused the weights of version {end.version}, and none accepted them",
                "check its error; if the receiver is new, send with full=True",
            )

    def close(self) -> None:
        self.group.close()


class CollectiveReceiver(StreamReceiver):
    """Stages received buckets in host memory, votes, and accepts them if all receivers can. Its rank is above 0."""

    def __init__(self, target: WeightTarget, group: SyncGroup, layout: Layout | None = None) -> None:
        super().__init__(target, layout)
        self.group = group
        self._number = 0

    @property
    def is_broken(self) -> bool:
        return self.group.broken

    def _begin(self, timeout_s: float) -> Message | None:
        if not self.group.announced(self._number + 1, timeout_s):
            return None
        self._number += 1
        return Message.read(self._description())

    def _next(self, begin: Message, num_buckets: int) -> Message:
        fields = self._description()
        message = Message.read(fields)
        if message.sync != "bucket":
            return message
        buffer = torch.empty(fields.integer("num_bytes"), dtype=torch.uint8, device=self.group.device)
        self.group.broadcast(buffer)
        try:
            return replace(message, tensors=unpacked(buffer.cpu(), f"bucket {message.index}"))
        except IncompleteSyncError as error:  # rejected by the vote, after everything has been read
            return replace(message, problem=error.message)

    def _description(self) -> Fields:
        return parse_fields(self.group.describe(), "weight sync", IncompleteSyncError, HINT)

    def _vote(self, agree: bool) -> bool:
        return self.group.all_agree(agree)

    def close(self) -> None:
        self.group.close()
