"""The worker's side of a launcher: the same code in every worker process."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TypedDict

from embodrl.deployment import ProcessPlace
from embodrl.names import import_object
from embodrl.processes.serve import bind_to_cores
from embodrl.processes.trace import record
from embodrl.scheduler.channel import Channel
from embodrl.scheduler.worker import Worker, WorkerContext, make_worker, marked_method


class ContextMessage(TypedDict):
    """A ``WorkerContext`` as plain values, without its channels."""

    group: str
    rank: int
    world_size: int
    node: int
    devices: Sequence[int]
    cpus: Sequence[int]
    rendezvous: str


def context_message(group: str, rank: int, world_size: int, place: ProcessPlace, rendezvous: str) -> ContextMessage:
    """Convert the context of a worker to plain values, without its channels."""
    return {
        "group": group,
        "rank": rank,
        "world_size": world_size,
        "node": place.node,
        "devices": place.devices,
        "cpus": place.cpus,
        "rendezvous": rendezvous,
    }


def environment(place: ProcessPlace, world_size: int) -> dict[str, str]:
    """Return the environment variables of a worker, some of which torch reads at import."""
    # CUDA orders by speed by default; placements number GPUs as nvidia-smi does.
    variables = {"RANK": str(place.rank), "WORLD_SIZE": str(world_size), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if place.visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = place.visible
    elif place.devices:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, place.devices))
    if "HIP_VISIBLE_DEVICES" in os.environ and "CUDA_VISIBLE_DEVICES" in variables:  # which ROCm prefers
        variables["HIP_VISIBLE_DEVICES"] = variables["CUDA_VISIBLE_DEVICES"]
    if place.cpus:
        variables["OMP_NUM_THREADS"] = str(len(place.cpus))
    return variables


class Host:
    """Holds a worker and executes its calls.

    Args:
        numa_node: preferred NUMA node for memory; None for any.
    """

    def __init__(
        self,
        class_path: str,
        context: ContextMessage,
        numa_node: int | None,
        kwargs: Mapping[str, object],
        channels: dict[str, Channel],
    ) -> None:
        # Before the class is imported and built, so that its memory comes from the NUMA node of these cores.
        bind_to_cores(context["cpus"], numa_node, "place the worker on CPUs that this process may use")
        self.worker_class: type[Worker] = import_object(class_path)
        where = WorkerContext(
            context["group"],
            context["rank"],
            context["world_size"],
            context["node"],
            tuple(context["devices"]),
            tuple(context["cpus"]),
            context["rendezvous"],
            channels,
        )
        self.worker = make_worker(self.worker_class, where, kwargs)

    def call(self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[object, float]:
        """Return the result and the seconds of a method marked with ``dispatch``."""
        marked_method(self.worker_class, method)
        start = time.perf_counter()
        value = getattr(self.worker, method)(*args, **kwargs)
        end = time.perf_counter()
        record(method, start, end)
        return value, end - start
