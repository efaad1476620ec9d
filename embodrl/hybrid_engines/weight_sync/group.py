"""The processes of a collective weight sync, apart from every other process group."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from embodrl.errors import EmbodrlError, TornSyncError

SENDER = 0
_POLL_S = 0.005


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
    ) -> None:
        if world_size < 2:
            raise EmbodrlError(
                "a collective weight sync of one process has nobody to send to", "sync by sharing within one process"
            )
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self.broken = False
        timeout = timedelta(seconds=timeout_s)
        try:
            meeting = rendezvous(init_method, rank, world_size, timeout=timedelta(seconds=max(timeout_s, meet_s)))
            self.store, _, _ = next(meeting)
        except RuntimeError as error:
            raise TornSyncError(
                f"{world_size} processes of a weight sync were to meet at {init_method}, and did not: {error}",
                "see whether trainer and rollouts are alive, and make a new group",
            ) from error
        self.store.set_timeout(timeout)
        control = dist.PrefixStore("weight_sync", self.store)  # pyright: ignore[reportPrivateImportUsage]
        self._control: Any = dist.ProcessGroupGloo(control, rank, world_size, timeout)
        self._data: Any = self._control
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout  # pyright: ignore  (its only setter)
            data = dist.PrefixStore("weight_sync_data", self.store)  # pyright: ignore[reportPrivateImportUsage]
            self._data = dist.ProcessGroupNCCL(data, rank, world_size, options)

    def announce(self, number: int) -> None:
        """Of the sender: let the receivers know that a sync begins."""
        with self._guard("announcing a sync"):
            self.store.set(f"sync_{number}", "begun")

    def announced(self, number: int, timeout_s: float) -> bool:
        """Of a receiver: tell whether a sync begins within some seconds."""
        with self._guard("waiting for a sync"):
            deadline = time.monotonic() + timeout_s
            # Not store.wait: what it raises when time is up depends on the store.
            while not self.store.check([f"sync_{number}"]):
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
            self.broken = True
            raise TornSyncError(
                f"a process of the weight sync was lost at {what}: {error}",
                "see whether trainer and rollouts are alive, and make a new group",
            ) from error
