import os

import pytest

from embodrl.scheduler.topology import CpuSlot, Gpu, assign_cpus, parse_cpu_list, read_topology


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def server(tmp_path):
    """Two sockets of 32 cores with two threads each (64 + n is the sibling of n), four GPUs a socket."""
    write(tmp_path / "devices/system/node/node0/cpulist", "0-31,64-95")
    write(tmp_path / "devices/system/node/node1/cpulist", "32-63,96-127")
    for cpu in range(128):
        core = cpu % 64
        write(tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{core},{core + 64}")
    for bus, node in [("17", 0), ("2a", 0), ("3d", 0), ("51", 0), ("9a", 1), ("ab", 1), ("bd", 1), ("d0", 1)]:
        device = tmp_path / f"bus/pci/devices/0000:{bus}:00.0"
        write(device / "class", "0x030200")
        write(device / "vendor", "0x10de")
        write(device / "numa_node", str(node))
    display = tmp_path / "bus/pci/devices/0000:03:00.0"
    write(display / "class", "0x030000")
    write(display / "vendor", "0x1a03")
    network = tmp_path / "bus/pci/devices/0000:18:00.0"
    write(network / "class", "0x020000")
    write(network / "vendor", "0x15b3")
    return tmp_path


def test_kernel_lists():
    assert parse_cpu_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_cpu_list("\n") == []


def test_server_is_read(server):
    topology = read_topology(server, range(128))
    assert topology.nodes[0] == (*range(32), *range(64, 96))
    assert topology.nodes[1] == (*range(32, 64), *range(96, 128))
    assert topology.num_cores == {0: 32, 1: 32}
    assert [gpu.numa_node for gpu in topology.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert topology.gpus[0] == Gpu("0000:17:00.0", 0)


def test_processes_spread_over_sockets_and_whole_cores(server):
    topology = read_topology(server, range(128))
    slots = assign_cpus(8, topology)
    assert slots == [*(CpuSlot(cpu, 0) for cpu in range(4)), *(CpuSlot(cpu, 1) for cpu in range(32, 36))]
    assert {slot.cpu for slot in assign_cpus(64, topology)} == set(range(64))
    assert {slot.cpu for slot in assign_cpus(128, topology)} == set(range(128))
    many = [slot.cpu for slot in assign_cpus(256, topology)]
    assert all(many.count(cpu) == 2 for cpu in range(128))


def test_the_gpus_node_fills_first(server):
    topology = read_topology(server, range(128))
    assert {slot.numa_node for slot in assign_cpus(32, topology, gpu=5)} == {1}
    slots = assign_cpus(40, topology, gpu=5)
    assert [slot.numa_node for slot in slots].count(1) == 32
    assert {slot.cpu for slot in slots if slot.numa_node == 0} == set(range(8))


def test_affinity_is_respected(server):
    topology = read_topology(server, {2, 3, 66, 40})
    assert topology.nodes == {0: (2, 3, 66), 1: (40,)}
    assert topology.num_cores == {0: 2, 1: 1}
    assert {slot.cpu for slot in assign_cpus(3, topology)} == {2, 3, 40}
    assert {slot.cpu for slot in assign_cpus(4, topology)} == {2, 3, 66, 40}
    only_one = read_topology(server, {40, 41})
    assert assign_cpus(2, only_one) == [CpuSlot(40, None), CpuSlot(41, None)]


def test_a_machine_without_numa_and_gpus(tmp_path):
    topology = read_topology(tmp_path, {0, 1})
    assert topology.nodes == {0: (0, 1)} and topology.gpus == ()
    assert assign_cpus(3, topology, gpu=0) == [CpuSlot(0, None), CpuSlot(1, None), CpuSlot(0, None)]


def test_this_machine():
    slots = assign_cpus(2)
    assert {slot.cpu for slot in slots} <= os.sched_getaffinity(0)
