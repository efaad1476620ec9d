"""The placement grammar, and the devices of each process of a component. Arithmetic only: reads no machine.

A place is ``all``, or pieces ``devices[:processes]`` such as ``0-3`` or ``0-1:0-3,3:4``; within a node group, devices
count from 0. Without ``:processes`` each device has one process.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

COMPONENTS = ("actor", "rollout", "env")
RANKS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
MACHINES = "node"
"""The node group whose devices are the CPUs of whole machines."""

Mode = Literal["co-located", "disaggregated", "hybrid"]


class PlacementError(ValueError):
    """A placement is malformed or impossible; ``allowed`` are the allowed values."""

    def __init__(
        self,
        message: str,
        hint: str = "write all, 0, 0-3 or 0-1:0-3",
        allowed: str = "all, or ranks such as 0, 0-3, 0-1:0-3 or 0,2",
    ) -> None:
        super().__init__(message)
        self.hint = hint
        self.allowed = allowed


@dataclass(frozen=True)
class Place:
    """Devices, and how many processes share them.

    Attributes:
        devices_of: devices of each process, by its rank.
    """

    devices: tuple[int, ...]
    num_processes: int
    devices_of: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Pool:
    """The devices of a node group, which a place indexes.

    Attributes:
        devices: ``(node, device of that node)`` by rank; a device of -1 is the CPU.
        label: label of the node group, for messages.
    """

    devices: tuple[tuple[int, int], ...]
    label: str = ""

    @property
    def name(self) -> str:
        return f"node group '{self.label}'" if self.label else "the cluster"


@dataclass(frozen=True)
class ProcessPlace:
    """A process and its resources.

    Attributes:
        component: actor, rollout or env.
        rank: rank within the component, from 0.
        node: machine number, from 0.
        devices: GPUs of that machine, as placements count them; empty for CPU only.
        cpus: logical CPUs it may use; empty for all.
        numa_node: preferred NUMA node; None on a machine with one node, or if it does not matter.
        visible: CUDA_VISIBLE_DEVICES of the process; None leaves it unchanged, or derives it from ``devices``.
    """

    component: str
    rank: int
    node: int = 0
    devices: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    numa_node: int | None = None
    visible: str | None = None


def parse_range(text: str) -> list[int]:
    """Parse ``3`` or ``0-3`` into ranks. Raises PlacementError if the text is neither."""
    match = RANKS.fullmatch(text.strip())
    if match is None:
        raise PlacementError(f"'{text.strip()}' is not a rank or a range of ranks")
    first = int(match[1])
    last = int(match[2] or match[1])
    if last < first:
        raise PlacementError(f"the range '{text.strip()}' ends before it starts")
    if last - first > 100_000:
        raise PlacementError(f"the range '{text.strip()}' is far too long")
    return list(range(first, last + 1))


def parse_ranks(text: str) -> Place | None:
    """Parse a placement into devices and processes; None for ``all``.

    Raises:
        PlacementError: the text does not follow the grammar, or devices and processes do not divide evenly.
    """
    if text.strip() == "all":
        return None
    devices: list[int] = []
    devices_of: list[tuple[int, ...]] = []
    for piece in text.split(","):
        device_text, colon, process_text = piece.partition(":")
        ranks = parse_range(device_text)
        processes = parse_range(process_text) if colon else list(range(len(devices_of), len(devices_of) + len(ranks)))
        count = len(processes)
        if count % len(ranks) and len(ranks) % count:
            raise PlacementError(
                f"in '{piece.strip()}', {count} processes and {len(ranks)} devices do not divide evenly:"
                f" {count} / {len(ranks)} leaves {count % len(ranks)}"
            )
        if set(ranks) & set(devices):
            raise PlacementError(f"a device of '{piece.strip()}' is named twice")
        if processes[0] != len(devices_of):
            start = len(devices_of)
            wanted = f"{start}-{start + count - 1}" if count > 1 else str(start)
            raise PlacementError(
                f"in '{piece.strip()}', the processes start with {processes[0]}, but {start} come first: the next is"
                f" {start}",
                f"write {device_text.strip()}:{wanted}",
            )
        devices += ranks
        devices_of += spread(tuple(ranks), count)
    return Place(tuple(devices), len(devices_of), tuple(devices_of))


def split_group(text: str) -> tuple[str, str]:
    """Return the label of the node group, "" for none, and the ranks of ``LABEL/ranks``."""
    label, slash, ranks = text.partition("/")
    return (label.strip(), ranks.strip()) if slash else ("", text.strip())


def spread(devices: tuple[int, ...], num_processes: int) -> list[tuple[int, ...]]:
    """Return the devices of each process: adjacent devices together, as evenly as possible."""
    count = len(devices)
    if num_processes >= count:
        return [(devices[rank * count // num_processes],) for rank in range(num_processes)]
    bounds = [rank * count // num_processes for rank in range(num_processes + 1)]
    return [devices[first:last] for first, last in itertools.pairwise(bounds)]


def make_pool(gpus: Sequence[int], nodes: tuple[int, ...] | None = None, label: str = "") -> Pool:
    """Return the GPUs of some machines (None: all), or the machines themselves if none of them has a GPU, or for the
    group ``node``.

    ``gpus`` are the numbers of GPUs, by machine.
    """
    members = nodes if nodes is not None else tuple(range(len(gpus)))
    if label == MACHINES or not any(gpus[node] for node in members):
        return Pool(tuple((node, -1) for node in members), label)
    return Pool(tuple((node, gpu) for node in members for gpu in range(gpus[node])), label)


def assign(
    component: str, text: str, pool: Pool, num_processes: int | None = None, single: bool = False
) -> list[ProcessPlace]:
    """Return the processes of a component.

    Args:
        component: name of the component.
        text: placement text.
        pool: devices that the ranks index.
        num_processes: process count set by another key (env.num_processes); None if the placement sets it.
        single: the backend is one process on one device, so ``all`` means the first.

    Raises:
        PlacementError: there are no such devices, or they can't be shared out.
    """
    place = parse_ranks(text)
    size = len(pool.devices)
    if place is None:
        chosen = (0,) if single else tuple(range(size))
        count = num_processes if num_processes is not None else len(chosen)
        if count < len(chosen) and not single:
            shares = [tuple(s) for s in spread(chosen, count)]
            place = Place(chosen, count, tuple(s[:1] if _spans_nodes(s, pool) else s for s in shares))
        else:
            place = Place(chosen, count, tuple(spread(chosen, count)))
    beyond = [rank for rank in place.devices if rank >= size]
    if beyond:
        last = "0" if size == 1 else f"0 to {size - 1}"
        raise PlacementError(
            f"'{text}' needs {max(place.devices) + 1} devices, and {pool.name} offers {size}",
            "write all",
            f"all, {last}",
        )
    if num_processes is not None and place.num_processes != num_processes:
        place = _fit(place, text, num_processes)
    processes: list[ProcessPlace] = []
    for rank, devices in enumerate(place.devices_of):
        found = [pool.devices[device] for device in devices]
        if len({node for node, _ in found}) > 1:
            raise PlacementError(
                f"process {rank} of '{text}' gets the devices {', '.join(map(str, devices))}, which lie in several"
                " machines",
                "give it devices of one machine",
            )
        processes.append(
            ProcessPlace(component, rank, found[0][0], tuple(device for _, device in found if device >= 0))
        )
    return processes


def _spans_nodes(ranks: tuple[int, ...], pool: Pool) -> bool:
    return len({pool.devices[rank][0] for rank in ranks}) > 1


def _fit(place: Place, text: str, num_processes: int) -> Place:
    """Spread the processes that another key sets over the given devices."""
    count = len(place.devices)
    if ":" in text:
        raise PlacementError(
            f"'{text}' has {place.num_processes} processes, and env.num_processes is {num_processes}",
            f"set env.num_processes={place.num_processes}, or omit the colon and the processes",
        )
    if num_processes % count and count % num_processes:
        near = f"{num_processes // count * count} or " if num_processes > count else ""
        near += str((num_processes // count + 1) * count)
        raise PlacementError(
            f"env.num_processes = {num_processes} processes can't be spread evenly over {count} devices:"
            f" {num_processes} / {count} leaves {num_processes % count}",
            f"set env.num_processes to {near}, or write all",
        )
    return Place(place.devices, num_processes, tuple(spread(place.devices, num_processes)))


def mode_of(processes: Mapping[str, Sequence[ProcessPlace]]) -> Mode:
    """Return how components share devices: all the same, none, or in between."""
    sets = [
        {(p.node, device) for p in found for device in (p.devices or (-1,))} for found in processes.values() if found
    ]
    if all(devices == sets[0] for devices in sets):
        return "co-located"
    if sum(map(len, sets)) == len(set[tuple[int, int]]().union(*sets)):
        return "disaggregated"
    return "hybrid"
