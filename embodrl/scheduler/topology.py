"""Cores, NUMA nodes and GPUs of this machine, and which core each simulator process gets."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")
_GPU_CLASSES = ("0x0300", "0x0302")  # VGA controller, 3D controller
_GPU_VENDORS = ("0x10de", "0x1002")  # NVIDIA, AMD; leaves out the server's management display


@dataclass(frozen=True)
class Gpu:
    """A GPU on the PCI bus.

    Attributes:
        pci_address: e.g. ``0000:17:00.0``; GPUs are numbered in this order (CUDA_DEVICE_ORDER=PCI_BUS_ID).
        numa_node: node it hangs on; None if the machine does not tell.
    """

    pci_address: str
    numa_node: int | None


@dataclass(frozen=True)
class Topology:
    """What this process may use.

    Attributes:
        nodes: NUMA node to its logical CPUs, the first hardware thread of every core before the second ones.
            Nodes without a usable CPU are left out.
        num_cores: NUMA node to its number of physical cores.
        gpus: in order of PCI address.
    """

    nodes: dict[int, tuple[int, ...]]
    num_cores: dict[int, int]
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True)
class CpuSlot:
    """Where a process runs.

    Attributes:
        cpu: logical CPU.
        numa_node: the node whose memory it should use; None on a machine with one node.
    """

    cpu: int
    numa_node: int | None


def parse_cpu_list(text: str) -> list[int]:
    """Return the numbers of a kernel list such as ``0-3,8,10-11``."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def read_topology(sysfs: Path = SYSFS, allowed: Collection[int] | None = None) -> Topology:
    """Read the topology.

    Args:
        sysfs: root of the sysfs tree.
        allowed: logical CPUs that may be used; None takes this process's affinity (taskset, cpuset cgroup).
    """
    usable = set(os.sched_getaffinity(0) if allowed is None else allowed)
    node_paths = sorted((sysfs / "devices/system/node").glob("node[0-9]*"))
    cpus_of_node = {int(path.name[4:]): parse_cpu_list((path / "cpulist").read_text()) for path in node_paths}
    cpus_of_node = cpus_of_node or {0: sorted(usable)}
    nodes: dict[int, tuple[int, ...]] = {}
    num_cores: dict[int, int] = {}
    for node, cpus in sorted(cpus_of_node.items()):
        cores: dict[int, list[int]] = {}
        for cpu in sorted(usable & set(cpus)):
            cores.setdefault(_core_of(sysfs, cpu), []).append(cpu)
        if cores:
            ranked = [(rank, cpu) for threads in cores.values() for rank, cpu in enumerate(threads)]
            nodes[node] = tuple(cpu for _, cpu in sorted(ranked))
            num_cores[node] = len(cores)
    return Topology(nodes, num_cores, _read_gpus(sysfs))


def assign_cpus(num_processes: int, topology: Topology | None = None, gpu: int | None = None) -> list[CpuSlot]:
    """Return a place for each process.

    Whole cores are handed out before second hardware threads, and those before any core is used twice. Processes are
    spread over the nodes by their number of cores, neighbours together; with ``gpu`` the node of that GPU fills first.

    Args:
        num_processes: how many.
        topology: None reads this machine's.
        gpu: index into ``topology.gpus`` of the GPU that the processes feed.
    """
    machine = topology or read_topology()
    near = machine.gpus[gpu].numa_node if gpu is not None and gpu < len(machine.gpus) else None
    counts = dict.fromkeys(machine.nodes, 0)
    for _ in range(num_processes):
        counts[_next_node(machine, counts, near)] += 1
    several = len(machine.nodes) > 1
    return [
        CpuSlot(machine.nodes[node][number % len(machine.nodes[node])], node if several else None)
        for node, count in counts.items()
        for number in range(count)
    ]


def _next_node(machine: Topology, counts: dict[int, int], near: int | None) -> int:
    def load(node: int) -> tuple[int, bool, float]:
        used = counts[node]
        round_of_use = 0 if used < machine.num_cores[node] else 1 + used // len(machine.nodes[node])
        return round_of_use, node != near, used / machine.num_cores[node]

    return min(counts, key=load)


def _core_of(sysfs: Path, cpu: int) -> int:
    """Return the lowest hardware thread of the core that this logical CPU belongs to."""
    siblings = sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return min(parse_cpu_list(siblings.read_text())) if siblings.exists() else cpu


def _read_gpus(sysfs: Path) -> tuple[Gpu, ...]:
    gpus: list[Gpu] = []
    for device in sorted((sysfs / "bus/pci/devices").glob("*")):
        if not (device / "class").exists() or not (device / "vendor").exists():
            continue
        kind, vendor = (device / "class").read_text().strip(), (device / "vendor").read_text().strip()
        if kind[:6] in _GPU_CLASSES and vendor in _GPU_VENDORS:
            node_file = device / "numa_node"
            node = int(node_file.read_text()) if node_file.exists() else -1
            gpus.append(Gpu(device.name, node if node >= 0 else None))
    return tuple(gpus)
