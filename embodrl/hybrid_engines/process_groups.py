"""Process groups of ``torch.distributed``: listening address, timeouts, and the cause of failures."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout  # pyright: ignore[reportPrivateUsage]

from embodrl.errors import WorkerDied, WorkerError
from embodrl.hybrid_engines.training.sharding import DP, TP

_INTERFACE = "GLOO_SOCKET_IFNAME"
_DEATH_S = 5.0  # delay until a death is detected after the others' connections have noticed it
_CONNECTION = re.compile(r"gloo|NCCL|Timed out|[Cc]onnection (closed|reset|refused)|DistStoreError")


@contextmanager
def loopback_only(one_machine: bool) -> Iterator[None]:
    """Make gloo listen only on the loopback interface, if all processes of the group are on one machine.

    By default it listens, without authentication, on the address that the host name resolves to. An interface set by
    the user is kept.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if not (one_machine and names) or _INTERFACE in os.environ:
        yield
        return
    os.environ[_INTERFACE] = names[0]
    try:
        yield
    finally:
        # Other groups of this process, e.g. of a weight sync to another machine, need the network.
        del os.environ[_INTERFACE]


def join_mesh(
    device: torch.device, rendezvous: str, rank: int, world_size: int, tensor_parallel: int, timeout_s: float
) -> DeviceMesh:
    """Create the default process group of the training processes, and their mesh.

    Args:
        device: device that the policy trains on.
        rendezvous: ``init_method``, equal in all processes.
        rank: rank of this process.
        world_size: number of processes.
        tensor_parallel: number of processes that share a layer; divides ``world_size``.
        timeout_s: seconds that a process waits for the others in a collective call.

    Returns:
        a mesh with the dimensions DP and TP, of consecutive ranks.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rendezvous, timedelta(seconds=timeout_s), world_size, rank)
    return make_mesh(device, world_size, tensor_parallel, timeout_s)


def make_mesh(device: torch.device, world_size: int, tensor_parallel: int, timeout_s: float) -> DeviceMesh:
    """Return the mesh of the default process group; see ``join_mesh``."""
    shape = (world_size // tensor_parallel, tensor_parallel)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=(DP, TP))
    for group in mesh.get_all_groups():  # new groups do not inherit the timeout
        _set_pg_timeout(timedelta(seconds=timeout_s), group)
    return mesh


def is_connection_error(message: str) -> bool:
    """Return whether an error says that another process of a group is gone or late."""
    return _CONNECTION.search(message) is not None


class Call(Protocol):
    """A call to all processes of a group; ``embodrl.scheduler.group.Handle``."""

    @property
    def futures(self) -> Mapping[int, Future[Any]]:
        """Futures by rank; the caller knows the type of their results."""
        ...


def cause_of(call: Call, error: WorkerError) -> WorkerError:
    """Return the root cause of an error in a collective call.

    A live process that does not take part is noticed by the processes that wait for it: they raise connection errors
    and would be blamed. Connections may also notice a death before the parent process does.
    """
    silent = sorted(rank for rank, future in call.futures.items() if not future.done())
    if isinstance(error, WorkerDied) or not silent or not is_connection_error(error.message):
        return error
    ended, _ = wait([call.futures[rank] for rank in silent], _DEATH_S, FIRST_COMPLETED)
    deaths = (future.exception() for future in ended)
    if died := next((death for death in deaths if isinstance(death, WorkerDied)), None):
        return died
    ranks = f"rank {', '.join(map(str, silent))}"
    return WorkerError(
        f"the training process of {ranks} did not take part in a collective call; another one, which waited for it,"
        f" reports: {error.message.splitlines()[0]}",
        f"see the log of {ranks}; if the process was only slow, raise cluster.collective_timeout_s",
        silent[0],
        log_tail=error.log_tail,
        code="collective-timeout",
    )
