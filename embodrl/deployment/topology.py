"""Cores, NUMA nodes and GPUs of this machine, and the core of each simulator process."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SYSFS = Path("/sys")
PROC = Path("/proc")
GIB = 1 << 30
_GPU_CLASSES = ("0x0300", "0x0302")  # VGA controller, 3D controller
_NVIDIA, _AMD = "0x10de", "0x1002"  # excludes the server's management display
_KFD_NODES = "class/kfd/kfd/topology/nodes"
"""AMD's driver lists processors and GPUs here."""
# cgroup v2, then v1: the limit of a container.
_CPUSET_FILES = ("fs/cgroup/cpuset.cpus.effective", "fs/cgroup/cpuset/cpuset.effective_cpus")
_QUOTA_FILES = ("fs/cgroup/cpu.max", "fs/cgroup/cpu/cpu.cfs_quota_us")


@dataclass(frozen=True)
class Gpu:
    """A GPU on the PCI bus.

    Attributes:
        pci_address: e.g. ``0000:17:00.0``; NVIDIA's GPUs are numbered in this order (CUDA_DEVICE_ORDER=PCI_BUS_ID),
            AMD's as their driver lists them.
        numa_node: NUMA node of its PCI slot; None if unknown.
        name: driver's name of the GPU; "" if unknown.
        memory_bytes: of NVIDIA's needs the extra ``gpu`` (nvidia-ml-py); 0 if unknown.
        uuid: "" if unknown.
    """

    pci_address: str
    numa_node: int | None
    name: str = ""
    memory_bytes: int = 0
    uuid: str = ""


@dataclass(frozen=True)
class Topology:
    """Hardware that this process may use.

    Attributes:
        nodes: NUMA node to its logical CPUs, the first hardware thread of every core before the second ones. Nodes
            without a usable CPU are left out.
        num_cores: NUMA node to its number of physical cores.
        gpus: as they are numbered.
        cpu_quota: processor time limit of a container, in CPUs; None without a limit.
        core_of: logical CPU to the first hardware thread of its core.
    """

    nodes: dict[int, tuple[int, ...]]
    num_cores: dict[int, int]
    gpus: tuple[Gpu, ...]
    cpu_quota: float | None = None
    core_of: dict[int, int] = field(default_factory=dict[int, int])

    def cpus(self, numa_node: int | None = None) -> tuple[int, ...]:
        """Return the logical CPUs of a node, or of all of them, in ascending order."""
        if numa_node in self.nodes:
            return tuple(sorted(self.nodes[numa_node]))
        return tuple(sorted(cpu for cpus in self.nodes.values() for cpu in cpus))


@dataclass(frozen=True)
class Machine:
    """The driver's machine, as available to a run.

    Attributes:
        gpus: NVIDIA's or AMD's GPUs that the driver sees, as CUDA_VISIBLE_DEVICES names them.
        num_cpus: logical CPUs that the driver may use.
    """

    gpus: tuple[str, ...]
    num_cpus: int
    memory_bytes: int
    topology: Topology


@dataclass(frozen=True)
class CpuSlot:
    """The logical CPU of a process, and its preferred NUMA node; None on a machine with one node."""

    cpu: int
    numa_node: int | None


def parse_cpu_list(text: str) -> list[int]:
    """Parse a kernel list such as ``0-3,8,10-11``."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def read_machine() -> Machine:
    """Read the hardware that this process may use; imports no torch.

    For the driver alone: other processes see only part of the GPUs and cores, and get a ``Deployment``.
    """
    visible = visible_devices()
    if visible is None:
        listed = list((PROC / "driver/nvidia/gpus").glob("*")) or _kfd_gpus(SYSFS)
        gpus = [str(index) for index in range(len(listed))]
    else:  # as in CUDA, entries after an invalid one are not visible
        entries = (part.strip() for part in visible.split(","))
        gpus = list(itertools.takewhile(lambda part: part not in ("", "-1"), entries))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(tuple(gpus), len(os.sched_getaffinity(0)), memory, read_topology(SYSFS, None, PROC, visible))


def visible_devices() -> str | None:
    """Return CUDA_VISIBLE_DEVICES, or HIP_VISIBLE_DEVICES where AMD's driver has GPUs; None if all are visible."""
    cuda = os.environ.get("CUDA_VISIBLE_DEVICES")
    return os.environ.get("HIP_VISIBLE_DEVICES", cuda) if _kfd_gpus(SYSFS) else cuda


def read_topology(
    sysfs: Path = SYSFS, allowed: Collection[int] | None = None, proc: Path | None = None, visible: str | None = None
) -> Topology:
    """Read the topology.

    Args:
        sysfs: root of the sysfs tree.
        allowed: logical CPUs that may be used; None for this process's affinity (taskset, cpuset cgroup).
        proc: root of the proc tree, where NVIDIA's driver lists its GPUs; None for this machine's with its own sysfs,
            and for no tree with another one.
        visible: CUDA_VISIBLE_DEVICES: indices or UUIDs; None for no restriction.
    """
    here = sysfs == SYSFS
    proc = PROC if proc is None and here else proc
    usable = set(os.sched_getaffinity(0) if allowed is None else allowed)
    limit = _cpuset(sysfs)
    usable = usable & limit or usable
    node_paths = sorted((sysfs / "devices/system/node").glob("node[0-9]*"))
    cpus_of_node = {int(path.name[4:]): parse_cpu_list((path / "cpulist").read_text()) for path in node_paths}
    cpus_of_node = cpus_of_node or {0: sorted(usable)}
    nodes: dict[int, tuple[int, ...]] = {}
    num_cores: dict[int, int] = {}
    core_of: dict[int, int] = {}
    for node, cpus in sorted(cpus_of_node.items()):
        cores: dict[int, list[int]] = {}
        for cpu in sorted(usable & set(cpus)):
            core_of[cpu] = _core_of(sysfs, cpu)
            cores.setdefault(core_of[cpu], []).append(cpu)
        if cores:
            ranked = [(rank, cpu) for threads in cores.values() for rank, cpu in enumerate(threads)]
            nodes[node] = tuple(cpu for _, cpu in sorted(ranked))
            num_cores[node] = len(cores)
    gpus = _read_gpus(sysfs, proc)
    gpus = _with_memory(gpus) if here else gpus
    if visible is None and here:
        visible = visible_devices()
    return Topology(nodes, num_cores, _visible_gpus(gpus, visible), _quota(sysfs), core_of)


def assign_cpus(
    num_processes: int,
    topology: Topology | None = None,
    gpu: int | None = None,
    near: Sequence[int | None] | None = None,
) -> list[CpuSlot]:
    """Return a CPU for each process.

    Whole cores are assigned before second hardware threads, and those before any core is used twice. Processes are
    spread over the nodes in proportion to their cores, neighbours together; with ``gpu`` (an index into
    ``topology.gpus``), the node of that GPU fills first. ``near`` gives the preferred NUMA node of each process
    instead; None if it does not matter.
    """
    machine = topology or read_topology()
    counts = dict.fromkeys(machine.nodes, 0)
    if near is None:
        one = machine.gpus[gpu].numa_node if gpu is not None and gpu < len(machine.gpus) else None
        for _ in range(num_processes):
            counts[_next_node(machine, counts, one)] += 1
        chosen = [node for node, count in counts.items() for _ in range(count)]
    else:
        chosen = [0] * num_processes
        # Processes with a preference choose first.
        for rank in sorted(range(num_processes), key=lambda rank: near[rank] is None):
            chosen[rank] = _next_node(machine, counts, near[rank])
            counts[chosen[rank]] += 1
    several = len(machine.nodes) > 1
    used = dict.fromkeys(machine.nodes, 0)
    slots: list[CpuSlot] = []
    for node in chosen:
        cpus = machine.nodes[node]
        slots.append(CpuSlot(cpus[used[node] % len(cpus)], node if several else None))
        used[node] += 1
    return slots


def _next_node(machine: Topology, counts: dict[int, int], near: int | None) -> int:
    def load(node: int) -> tuple[int, bool, float]:
        used = counts[node]
        round_of_use = 0 if used < machine.num_cores[node] else 1 + used // len(machine.nodes[node])
        return round_of_use, node != near, used / machine.num_cores[node]

    return min(counts, key=load)


def _core_of(sysfs: Path, cpu: int) -> int:
    """Return the lowest hardware thread of a logical CPU's core."""
    siblings = sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return min(parse_cpu_list(siblings.read_text())) if siblings.exists() else cpu


def _cpuset(sysfs: Path) -> set[int]:
    """Return the logical CPUs of the control group; empty if unknown."""
    for name in _CPUSET_FILES:
        if (sysfs / name).is_file():
            return set(parse_cpu_list((sysfs / name).read_text()))
    return set()


def _quota(sysfs: Path) -> float | None:
    """Return the processor time limit of the control group, in CPUs; None without a limit."""
    for name in _QUOTA_FILES:
        path = sysfs / name
        if not path.is_file():
            continue
        words = path.read_text().split()
        if path.name != "cpu.max":
            words.append((path.parent / "cpu.cfs_period_us").read_text())
        if words[0] not in ("max", "-1"):
            return int(words[0]) / int(words[1])
    return None


def _read_gpus(sysfs: Path, proc: Path | None) -> tuple[Gpu, ...]:
    """Return the GPUs on the bus, as they are numbered.

    Of each maker's only the ones its driver lists, if it lists any: a container may have a subset.
    """
    listed = proc / "driver/nvidia/gpus" if proc is not None else None
    served = {path.name: path for path in listed.glob("*")} if listed is not None and listed.is_dir() else None
    amd = _kfd_gpus(sysfs)
    gpus: list[Gpu] = []
    for device in sorted((sysfs / "bus/pci/devices").glob("*")):
        vendor, draws = _line(device / "vendor"), _line(device / "class")[:6] in _GPU_CLASSES
        if not (
            (vendor == _NVIDIA and draws and (served is None or device.name in served))
            or (vendor == _AMD and (device.name in amd if amd else draws))
        ):
            continue
        node = int(_line(device / "numa_node") or -1)
        facts = _information(served[device.name]) if served and vendor == _NVIDIA else {}
        name = facts.get("Model", "") or _line(device / "product_name")
        memory = int(_line(device / "mem_info_vram_total") or 0)  # AMD's driver writes it
        gpus.append(Gpu(device.name, node if node >= 0 else None, name, memory, facts.get("GPU UUID", "")))
    return tuple(sorted(gpus, key=lambda gpu: amd.index(gpu.pci_address) if gpu.pci_address in amd else -1))


def _line(path: Path) -> str:
    """Return the only line of a file; "" without one."""
    return path.read_text().strip() if path.is_file() else ""


def _kfd_gpus(sysfs: Path) -> list[str]:
    """Return the PCI addresses of AMD's GPUs that this process may use, as ROCm numbers them."""
    addresses: list[str] = []
    for node in sorted((sysfs / _KFD_NODES).glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            text = (node / "properties").read_text()
        except PermissionError:  # a GPU that this container must not use
            continue
        facts = {name: int(number) for name, number in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}
        if facts.get("simd_count"):  # 0: a processor
            place = facts["location_id"]
            slot = f"{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
            addresses.append(f"{facts.get('domain', 0):04x}:{slot}")
    left = os.environ.get("ROCR_VISIBLE_DEVICES") if sysfs == SYSFS else None
    if left is None:
        return addresses
    # ROCm numbers only these, in this order; a GPU may also be named by its UUID.
    words = [word.strip() for word in left.split(",")]
    return [addresses[int(word)] for word in words if word.isdecimal() and int(word) < len(addresses)]


def _information(directory: Path) -> dict[str, str]:
    """Return an entry of the driver's file ``information`` about a GPU."""
    path = directory / "information"
    lines = path.read_text().splitlines() if path.is_file() else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _visible_gpus(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs visible under CUDA_VISIBLE_DEVICES; as in CUDA, entries after an unknown one are not visible."""
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for word in (part.strip() for part in visible.split(",")):
        if re.fullmatch(r"\d+", word):
            found = [gpus[int(word)]] if int(word) < len(gpus) else []
        else:
            found = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
        if len(found) != 1:
            break
        chosen += found
    return tuple(chosen)


def _with_memory(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Return the GPUs with name and memory from NVML, if the extra ``gpu`` is installed and a driver runs."""
    if not gpus or importlib.util.find_spec("pynvml") is None:
        return gpus
    nvml = importlib.import_module("pynvml")  # untyped package
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver: the GPUs are present but unusable, which torch reports
        return gpus
    try:
        known: dict[str, object] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            known[_text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()[-12:]] = handle
        return tuple(_ask(nvml, known[gpu.pci_address], gpu) if gpu.pci_address in known else gpu for gpu in gpus)
    finally:
        nvml.nvmlShutdown()


def _ask(nvml: Any, handle: Any, gpu: Gpu) -> Gpu:
    return replace(
        gpu,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
