"""The process group of a collective weight sync, separate from all other process groups."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from embodrl.errors import EmbodrlError, IncompleteSyncError

SENDER = 0
_POLL_S = 0.005
_CONNECT_POLL_S = 0.02
_BACKLOG = 128
_HERE, _CANCELLED = "here", "cancelled"


def open_rendezvous(init_method: str, world_size: int, is_sender: bool = True, timeout_s: float = 60.0) -> Store:
    """Return the store through which a group connects; the sender's opens at once, and must before others find it.

    Not torch's rendezvous, in which the sender would wait for a receiver that has died, and which listens at every
    address of the machine instead of this one.

    Raises:
        RuntimeError: a receiver did not find it in time.
        IncompleteSyncError: the sender cannot listen there.
    """
    where = urlsplit(init_method)
    if where.scheme == "file":
        return FileStore(where.path, world_size)
    host, port, timeout = str(where.hostname), where.port or 0, timedelta(seconds=timeout_s)
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
    """Notify the processes that have connected; closing the store would not while anything refers to it."""
    rendezvous.set(_CANCELLED, "")


class SyncGroup:
    """One sender, rank 0, and its receivers. Messages and votes go by gloo; on a GPU the weights go by NCCL.

    Independent of other process groups, so that a rank of a sharded trainer can be in both.

    Args:
        init_method: ``tcp://HOST:PORT`` (of the sender) or ``file:///PATH``, the same for all.
        rank: 0 sends.
        world_size: sender and receivers.
        device: of the buckets; each rank on a GPU needs its own.
        timeout_s: seconds that any process may keep the others waiting within a sync.
        connect_s: seconds until all must have connected, if they are more.
        check: called while waiting for the others; raises if one has died.
        rendezvous: of the sender, from ``open_rendezvous``; None opens it here.
        find_s: of a receiver: seconds until the sender's rendezvous must be open; None: ``connect_s``.

    Raises:
        IncompleteSyncError: they did not all connect.
        EmbodrlError: there is no receiver.
    """

    def __init__(
        self,
        init_method: str,
        rank: int,
        world_size: int,
        device: torch.device | str = "cpu",
        timeout_s: float = 60.0,
        connect_s: float = 0.0,
        check: Callable[[], None] = lambda: None,
        rendezvous: Store | None = None,
        find_s: float | None = None,
    ) -> None:
        if world_size < 2:
            raise EmbodrlError(
                "a collective weight sync needs at least one receiver", "give a world_size of at least 2"
            )
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self.broken = False
        self._store: Any = rendezvous
        self._control: Any = None
        self._data: Any = None
        try:
            connect_s = max(timeout_s, connect_s)
            if rendezvous is None:
                find_s = connect_s if find_s is None else find_s
                self._store = open_rendezvous(init_method, world_size, rank == SENDER, find_s)
            self._connect(timedelta(seconds=timeout_s), connect_s, check)
        except RuntimeError as error:
            self.close()
            raise IncompleteSyncError(
                f"{world_size} processes of a weight sync did not connect at {init_method}: {error}",
                "check whether trainer and rollouts are running, and create a new group",
            ) from error
        except BaseException:  # a signal too must not leave a half connected group; raised again
            self.close()
            raise

    def _connect(self, timeout: timedelta, connect_s: float, check: Callable[[], None]) -> None:
        self._store.add(_HERE, 1)
        deadline = time.monotonic() + connect_s
        while (number := self._store.add(_HERE, 0)) < self.world_size:
            try:
                check()
            except BaseException:  # a signal too must not leave a thread in the rendezvous; raised again
                cancel_rendezvous(self._store)
                raise
            if self._store.check([_CANCELLED]):
                raise RuntimeError("the sender has cancelled it")
            if time.monotonic() >= deadline:
                raise RuntimeError(f"{number} of them connected within {connect_s:g} s")
            time.sleep(_CONNECT_POLL_S)
        self._store.set_timeout(timeout)
        control = PrefixStore("weight_sync", self._store)
        self._control = dist.ProcessGroupGloo(control, self.rank, self.world_size, timeout)
        self._data = self._control
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout  # pyright: ignore  (its only setter)
            data = PrefixStore("weight_sync_data", self._store)
            self._data = dist.ProcessGroupNCCL(data, self.rank, self.world_size, options)

    def close(self) -> None:
        """Leave the group, which becomes unusable; processes that wait for this one get an error at once."""
        self.broken = True
        if self._data is not None and self._data is not self._control:
            self._data.abort()
        # Gloo closes its connections when nothing refers to the group; its abort() does not wake waiting processes.
        self._data = self._control = self._store = None

    def announce(self, number: int) -> None:
        """Of the sender: announce a sync to the receivers."""
        with self._guard("announcing a sync"):
            self._store.set(f"sync_{number}", "begun")

    def announced(self, number: int, timeout_s: float) -> bool:
        """Of a receiver: return whether a sync begins within some seconds."""
        with self._guard("waiting for a sync"):
            deadline = time.monotonic() + timeout_s
            # Not store.wait: the error of its timeout depends on the store.
            while not self._store.check([f"sync_{number}"]):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL_S)
            return True

    def describe(self, value: dict[str, Any] | None) -> dict[str, Any]:
        """Broadcast a small value from the sender, as JSON."""
        with self._guard("a description"):
            encoded = json.dumps(value).encode() if self.rank == SENDER else b""
            length = torch.tensor([len(encoded)])
            self._control.broadcast(length, SENDER).wait()
            buffer = torch.from_numpy(np.frombuffer(encoded, np.uint8).copy()) if encoded else torch.empty(0)
            if self.rank != SENDER:
                buffer = torch.empty(int(length), dtype=torch.uint8)
            self._control.broadcast(buffer, SENDER).wait()
            return json.loads(buffer.numpy().tobytes())

    def broadcast(self, buffer: Tensor) -> None:
        """Broadcast a bucket ``uint8[N]`` on the group's device from the sender, in place."""
        if buffer.numel():
            with self._guard("a bucket"):
                self._data.broadcast(buffer, SENDER).wait()

    def all_agree(self, agree: bool) -> bool:
        """Return whether all ranks agree."""
        with self._guard("the vote"):
            vote = torch.tensor([int(agree)])
            self._control.allreduce(vote, dist.ReduceOp.MIN).wait()
            return bool(vote)

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """Turn the transport's errors about a lost process into ``IncompleteSyncError``, and close the group."""
        if self.broken:
            raise IncompleteSyncError("the group of the weight sync has lost a process", "create a new group")
        try:
            yield
        except RuntimeError as error:
            self.close()
            raise IncompleteSyncError(
                f"a process of the weight sync was lost at {what}: {error}",
                "check whether trainer and rollouts are running, and create a new group",
            ) from error
