"""Weights, targets and workers that the tests of weight sync share."""

from __future__ import annotations

import os
import signal
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.weight_sync import base
from embodrl.hybrid_engines.weight_sync.base import GatherOnly
from embodrl.hybrid_engines.weight_sync.buckets import checksum, layout_of, num_bytes
from embodrl.hybrid_engines.weight_sync.collective import CollectiveReceiver, CollectiveSender, SyncGroup
from embodrl.hybrid_engines.weight_sync.disk import DiskReceiver, DiskSender
from embodrl.hybrid_engines.weight_sync.memory import MemoryReceiver, MemorySender
from embodrl.scheduler.channel import LocalChannel
from embodrl.scheduler.worker import Worker, dispatch

ADAPTERS = ("adapter.weight", "adapter.bias")


class Net(nn.Module):
    """Five layers and an adapter, of several sizes and dtypes, whose values follow from names and a version."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(5)])
        self.low = nn.Linear(width, 3, dtype=torch.bfloat16)
        self.adapter = nn.Linear(width, 2)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0, 4))

    def become(self, version: int, only: tuple[str, ...] | None = None) -> Net:
        with torch.no_grad():
            for name, tensor in self.state_dict().items():
                if only is None or name in only:
                    tensor.copy_(values(name, tensor.shape, version).to(tensor.dtype))
        return self

    def sums(self) -> dict[str, int]:
        return {name: checksum(tensor) for name, tensor in self.state_dict().items()}


def values(name: str, shape: Any, version: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()) * 1000 + version)
    return torch.randint(-1000, 1000, tuple(shape), generator=generator).float() / 8


class Target:
    """Takes weights over as a rollout engine does, and can be made to fail on the way."""

    def __init__(self, net: Net | None = None, fail_after: int | None = None) -> None:
        self.net, self.version, self.fail_after = net or Net().become(-1), -1, fail_after

    def update_weights(self, weights: Any, version: int) -> None:
        mine = self.net.state_dict()
        for index, (name, tensor) in enumerate(weights):
            if index == self.fail_after:
                raise OSError("storage is gone")
            mine[name].copy_(tensor)
        self.version = version


class PeakCounter:
    """Counts the bytes of tensors that are alive at the same time."""

    def __init__(self) -> None:
        self.alive = self.peak = 0

    def watch(self, tensor: Tensor) -> Tensor:
        size = num_bytes(tensor)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(tensor, self._gone, size)
        return tensor

    def _gone(self, size: int) -> None:
        self.alive -= size


def weights(version, only=None):
    return list(Net().become(version, only).state_dict().items())


def same(target, version):
    return target.version == version and target.net.sums() == Net().become(version).sums()


def by_memory(trained=None, bucket_bytes=2048, verify=False):
    pipe, target = LocalChannel("weights", 64), Target()
    sender = MemorySender([pipe], trained, bucket_bytes, verify, stall_timeout_s=0.0)
    return sender, MemoryReceiver(target, pipe, layout_of(target.net), stall_timeout_s=0.0), target


def by_disk(tmp_path, trained=None, bucket_bytes=2048, keep=2, **of_target):
    target = Target(**of_target)
    sender = DiskSender(tmp_path, trained, bucket_bytes, keep)
    return sender, DiskReceiver(target, tmp_path, layout_of(target.net)), target


class Trainer(Worker):
    """Sends; with several ranks its weights are sharded by FSDP2."""

    def __init__(self, receivers: int) -> None:
        self.receivers, self.counter = receivers, PeakCounter()
        self.net: Any = Net()
        self.sender: Any = None
        if self.world_size > 1:
            self._shard()

    def _shard(self) -> None:
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo", init_method=self.context.rendezvous, rank=self.rank, world_size=self.world_size)
        for layer in (*self.net.layers, self.net.low, self.net.adapter):
            fully_shard(layer)
        fully_shard(self.net)

    @dispatch()
    def connect(
        self,
        kind: str,
        meeting: str,
        trained: tuple[str, ...] | None,
        bucket_bytes: int,
        verify: bool,
        patches: bool = False,
    ) -> None:
        self.counter = PeakCounter()
        settings: dict[str, Any] = {"trained": trained, "bucket_bytes": bucket_bytes}
        if self.rank:
            self.sender = GatherOnly(**settings)
        elif kind == "memory":
            pipes = [self.channel(f"weights_{rank}") for rank in range(self.receivers)]
            self.sender = MemorySender(pipes, verify=verify, stall_timeout_s=60, patches=patches, **settings)
        elif kind == "collective":
            group = SyncGroup(meeting, 0, 1 + self.receivers, timeout_s=60)
            self.sender = CollectiveSender(group, verify=verify, patches=patches, **settings)
        else:
            self.sender = DiskSender(Path(meeting), **settings)

    @dispatch()
    def send(
        self,
        version: int,
        full: bool = False,
        fail_at: int | None = None,
        kill_at: int | None = None,
        values_of: int | None = None,
    ) -> dict[str, Any]:
        """Train to a version, and send it; its weights are those of the version ``values_of`` if that is given."""
        self._become(version if values_of is None else values_of)
        real = base.gathered
        base.gathered = lambda tensor: self.counter.watch(real(tensor))
        try:
            return vars(self.sender.send(self._weights(fail_at, kill_at), version, full))
        finally:
            base.gathered = real

    def _become(self, version: int) -> None:
        if self.world_size == 1:
            self.net.become(version)
            return
        from torch.distributed.tensor import DTensor, distribute_tensor

        with torch.no_grad():
            for name, tensor in self.net.state_dict().items():
                whole = values(name, tensor.shape, version).to(tensor.dtype)
                if isinstance(tensor, DTensor):
                    sharded = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
                    tensor.to_local().copy_(sharded.to_local())
                else:
                    tensor.copy_(whole)

    def _weights(self, fail_at: int | None, kill_at: int | None) -> Any:
        for index, named in enumerate(self.net.state_dict().items()):
            if index == fail_at:
                raise EmbodrlError("the optimizer lost its mind")
            if index == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield named

    @dispatch("rank_zero")
    def peak(self) -> int:
        return self.counter.peak


class Actor(Worker):
    """Receives."""

    def __init__(self, receivers: int) -> None:
        self.receivers = receivers
        self.target = Target()
        self.receiver: Any = None

    @dispatch()
    def connect(self, kind: str, meeting: str, other_model: int = -1, stall_timeout_s: float = 60.0) -> None:
        """Begin again; the rank ``other_model`` expects another model."""
        self.target = Target()
        layout = layout_of(Net(8) if self.rank == other_model else self.target.net)
        if kind == "memory":
            pipe = self.channel(f"weights_{self.rank}")
            self.receiver = MemoryReceiver(self.target, pipe, layout, stall_timeout_s=stall_timeout_s)
        elif kind == "collective":
            group = SyncGroup(meeting, 1 + self.rank, 1 + self.receivers, timeout_s=60)
            self.receiver = CollectiveReceiver(self.target, group, layout)
        else:
            self.receiver = DiskReceiver(self.target, Path(meeting), layout)

    @dispatch()
    def receive(self, timeout_s: float = 60.0) -> dict[str, Any] | None:
        """Return the report, or the name and message of the error."""
        try:
            report = self.receiver.receive(timeout_s)
        except EmbodrlError as error:
            return {"error": type(error).__name__, "message": error.message}
        if report is None:
            return None
        return vars(report) | {"received": None if report.received is None else vars(report.received)}

    @dispatch()
    def state(self) -> tuple[int, dict[str, int]]:
        return self.target.version, self.target.net.sums()
