"""The processes of a collective weight sync, apart from every other process group."""

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

from embodrl.errors import EmbodrlError, TornSyncError

SENDER = 0
_POLL_S = 0.005
_MEET_POLL_S = 0.02
_BACKLOG = 128
_HERE, _CANCELLED = "here", "cancelled"


def open_meeting(init_method: str, world_size: int, is_sender: bool = True, timeout_s: float = 60.0) -> Store:
    """Return the store where a group meets; that of the sender is there at once, and must be for others to find it.

    Not torch's rendezvous, in which the sender would wait for one that has died.

    The sender listens at that address alone; by default torch's store would at every address of the machine.

    Raises:
        RuntimeError: a receiver has not found it in time.
        TornSyncError: the sender can't listen there.
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
        hint = "another program has the port, or the address is not one of this machine"
        raise TornSyncError(f"a weight sync can't be sent from {init_method}: {error}", hint) from error
    return TCPStore(host, port, world_size, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach())


def cancel_meeting(meeting: Store) -> None:
    """Tell those who are there already: closing it would not, while anybody refers to the store."""
    meeting.set(_CANCELLED, "")


class SyncGroup:
    """One sender, of rank 0, and its receivers. Descriptions and votes go by gloo; on a GPU the weights go by NCCL.

    Other process groups of the same processes are not touched, so that a rank of a sharded trainer can be in both.

    Args:
        init_method: where they meet, ``tcp://HOST:PORT`` (of the sender) or ``file:///PATH``, the same for all.
        rank: 0 sends.
        world_size: sender and receivers.
        device: of the buckets; each rank on a GPU needs one of its own.
        timeout_s: seconds that any of them may keep the others waiting within a sync.
        meet_s: seconds until all must be there, if they are more.
        check: asked while waiting for the others; what it raises ends that.
        meeting: of the sender, from ``open_meeting``; None opens it here.
        find_s: of a receiver: seconds until the sender's meeting must be open; None takes as many as to meet.

    Raises:
        TornSyncError: they did not all come.
        EmbodrlError: there is nobody to send to.
    """

    def __init__(
        self,
        init_method: str,
        rank: int,
        world_size: int,
        device: torch.device | str = "cpu",
        timeout_s: float = 60.0,
        meet_s: float = 0.0,
        check: Callable[[], None] = lambda: None,
        meeting: Store | None = None,
        find_s: float | None = None,
    ) -> None:
        if world_size < 2:
            raise EmbodrlError(
                "a collective weight sync of one process has nobody to send to", "sync by sharing within one process"
            )
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self.broken = False
        self._store: Any = meeting
        self._control: Any = None
        self._data: Any = None
        try:
            meet_s = max(timeout_s, meet_s)
            if meeting is None:
                find_s = meet_s if find_s is None else find_s
                self._store = open_meeting(init_method, world_size, rank == SENDER, find_s)
            self._meet(timedelta(seconds=timeout_s), meet_s, check)
        except RuntimeError as error:
            self.close()
            raise TornSyncError(
                f"{world_size} processes of a weight sync were to meet at {init_method}, and did not: {error}",
                "see whether trainer and rollouts are alive, and make a new group",
            ) from error
        except BaseException:
            self.close()
            raise

    def _meet(self, timeout: timedelta, meet_s: float, check: Callable[[], None]) -> None:
        self._store.add(_HERE, 1)
        deadline = time.monotonic() + meet_s
        while (number := self._store.add(_HERE, 0)) < self.world_size:
            try:
                check()
            except BaseException:
                cancel_meeting(self._store)
                raise
            if self._store.check([_CANCELLED]):
                raise RuntimeError("the sender has called it off")
            if time.monotonic() >= deadline:
                raise RuntimeError(f"{number} of them came within {meet_s:g} s")
            time.sleep(_MEET_POLL_S)
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
        """Leave; whoever waits for this process within a sync is told at once, and the group can't be used any more."""
        self.broken = True
        if self._data is not None and self._data is not self._control:
            self._data.abort()
        # Gloo closes its connections when nobody refers to the group; its abort() does not wake those who wait.
        self._data = self._control = self._store = None

    def announce(self, number: int) -> None:
        """Of the sender: let the receivers know that a sync begins."""
        with self._guard("announcing a sync"):
            self._store.set(f"sync_{number}", "begun")

    def announced(self, number: int, timeout_s: float) -> bool:
        """Of a receiver: tell whether a sync begins within some seconds."""
        with self._guard("waiting for a sync"):
            deadline = time.monotonic() + timeout_s
            # Not store.wait: what it raises when time is up depends on the store.
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
        """Tell whether all ranks agree."""
        with self._guard("the vote"):
            vote = torch.tensor([int(agree)])
            self._control.allreduce(vote, dist.ReduceOp.MIN).wait()
            return bool(vote)

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """Turn what the transport says of a lost process into an error of ours; the group can't be used any more."""
        if self.broken:
            raise TornSyncError("the group of the weight sync has lost a process", "make a new group")
        try:
            yield
        except RuntimeError as error:
            self.close()
            raise TornSyncError(
                f"a process of the weight sync was lost at {what}: {error}",
                "see whether trainer and rollouts are alive, and make a new group",
            ) from error
