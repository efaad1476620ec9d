"""Sysfs and proc trees in the kernel's layout, for machines that are not here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def build_cpus(sysfs: Path, nodes: Mapping[int, str], num_cores: int, threads: int) -> None:
    """Write /sys/devices/system: thread t of core c is logical CPU c + t * num_cores."""
    total = num_cores * threads
    system = sysfs / "devices/system"
    write(system / "cpu/online", f"0-{total - 1}")
    write(system / "node/online", f"0-{max(nodes)}" if max(nodes) else "0")
    for node, cpus in nodes.items():
        write(system / f"node/node{node}/cpulist", cpus)
    for cpu in range(total):
        core = cpu % num_cores
        siblings = ",".join(str(core + thread * num_cores) for thread in range(threads))
        write(system / f"cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
        write(system / f"cpu/cpu{cpu}/topology/core_id", str(core))


def build_pci(sysfs: Path, address: str, device_class: str, vendor: str, node: int) -> None:
    """Write /sys/bus/pci/devices/ADDRESS."""
    device = sysfs / "bus/pci/devices" / address
    for name, text in (("class", device_class), ("vendor", vendor), ("numa_node", str(node))):
        write(device / name, text)


def build_driver(proc: Path, address: str, model: str, uuid: str, minor: int) -> None:
    """Write /proc/driver/nvidia/gpus/ADDRESS/information."""
    lines = [
        f"Model: \t\t {model}",
        f"IRQ:   \t\t {180 + minor}",
        f"GPU UUID: \t {uuid}",
        "Video BIOS: \t 96.00.74.00.01",
        "Bus Type: \t PCIe",
        "DMA Size: \t 52 bits",
        f"Bus Location: \t {address}",
        f"Device Minor: \t {minor}",
        "GPU Firmware: \t 550.54.15",
        "GPU Excluded:\t No",
    ]
    write(proc / f"driver/nvidia/gpus/{address}/information", "\n".join(lines))


GPU_BUSES = ("17", "2a", "3d", "51", "9a", "ab", "bd", "d0")


def build_server(root: Path, served: Sequence[int] = range(8)) -> tuple[Path, Path]:
    """Two sockets of 32 cores with two threads each, four GPUs a socket; returns sysfs and proc.

    Args:
        root: empty directory.
        served: GPUs that the driver lists: those that a container was given.
    """
    sysfs, proc = root / "sys", root / "proc"
    build_cpus(sysfs, {0: "0-31,64-95", 1: "32-63,96-127"}, 64, 2)
    for index, bus in enumerate(GPU_BUSES):
        address = f"0000:{bus}:00.0"
        build_pci(sysfs, address, "0x030200", "0x10de", index // 4)
        if index in served:
            build_driver(
                proc, address, "NVIDIA H100 80GB HBM3", f"GPU-{index}f2c9a40-0000-4000-8000-{index:012x}", index
            )
    build_pci(sysfs, "0000:03:00.0", "0x030000", "0x1a03", 0)  # the management display
    build_pci(sysfs, "0000:18:00.0", "0x020000", "0x15b3", 0)  # a network card
    build_pci(sysfs, "0000:0b:00.0", "0x068000", "0x10de", 0)  # an NVSwitch
    return sysfs, proc


def build_laptop(root: Path) -> Path:
    """One node, two cores, no GPU; returns sysfs."""
    sysfs = root / "sys"
    build_cpus(sysfs, {0: "0-1"}, 2, 1)
    build_pci(sysfs, "0000:00:02.0", "0x030000", "0x1234", -1)  # an emulated display
    return sysfs
