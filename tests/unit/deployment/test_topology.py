import os
from pathlib import Path

import pytest
from sysfs_trees import GPU_BUSES, build_laptop, build_server, write

from embodrl.deployment import topology as topology_module
from embodrl.deployment.grammar import ProcessPlace
from embodrl.deployment.topology import CpuSlot, assign_cpus, parse_cpu_list, read_machine, read_topology
from embodrl.scheduler.launchers.host import environment


@pytest.fixture
def server(tmp_path):
    return build_server(tmp_path)[0]


def test_kernel_lists():
    assert parse_cpu_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_cpu_list("\n") == []


def test_server_is_read(tmp_path):
    sysfs, proc = build_server(tmp_path)
    topology = read_topology(sysfs, range(128), proc)
    assert topology.nodes[0] == (*range(32), *range(64, 96))
    assert topology.nodes[1] == (*range(32, 64), *range(96, 128))
    assert topology.num_cores == {0: 32, 1: 32}
    assert [gpu.pci_address for gpu in topology.gpus] == [f"0000:{bus}:00.0" for bus in GPU_BUSES]
    assert [gpu.numa_node for gpu in topology.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {gpu.name for gpu in topology.gpus} == {"NVIDIA H100 80GB HBM3"}
    assert topology.gpus[3].uuid == "GPU-3f2c9a40-0000-4000-8000-000000000003"
    assert topology.cpus(1) == (*range(32, 64), *range(96, 128)) and topology.cpus() == tuple(range(128))
    assert topology.core_of[70] == 6 and topology.cpu_quota is None


def test_gpus_without_the_driver_are_still_on_the_bus(server):
    assert len(read_topology(server, range(128)).gpus) == 8


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


def test_each_process_gets_its_own_node_and_those_without_a_wish_the_rest(server):
    topology = read_topology(server, range(128))
    slots = assign_cpus(5, topology, near=[1, None, 0, 1, None])
    assert [slot.numa_node for slot in slots] == [1, 0, 0, 1, 0]
    assert [slot.cpu for slot in slots] == [32, 0, 1, 33, 2]
    full = assign_cpus(33, topology, near=[1] * 33)
    assert [slot.numa_node for slot in full] == [1] * 32 + [0]


def test_affinity_is_respected(server):
    topology = read_topology(server, {2, 3, 66, 40})
    assert topology.nodes == {0: (2, 3, 66), 1: (40,)}
    assert topology.num_cores == {0: 2, 1: 1}
    assert {slot.cpu for slot in assign_cpus(3, topology)} == {2, 3, 40}
    assert {slot.cpu for slot in assign_cpus(4, topology)} == {2, 3, 66, 40}
    only_one = read_topology(server, {40, 41})
    assert assign_cpus(2, only_one) == [CpuSlot(40, None), CpuSlot(41, None)]


def test_a_container_sees_its_cpus_its_time_and_its_gpus(tmp_path):
    sysfs, proc = build_server(tmp_path, served=(4, 6))
    write(sysfs / "fs/cgroup/cpuset.cpus.effective", "32-35,96-97")
    write(sysfs / "fs/cgroup/cpu.max", "250000 100000")
    topology = read_topology(sysfs, range(128), proc)
    assert topology.nodes == {1: (32, 33, 34, 35, 96, 97)} and topology.num_cores == {1: 4}
    assert topology.cpu_quota == 2.5
    assert [gpu.pci_address for gpu in topology.gpus] == ["0000:9a:00.0", "0000:bd:00.0"]


def test_control_groups_of_version_1(tmp_path):
    sysfs = build_laptop(tmp_path)
    write(sysfs / "fs/cgroup/cpuset/cpuset.effective_cpus", "1")
    write(sysfs / "fs/cgroup/cpu/cpu.cfs_quota_us", "50000")
    write(sysfs / "fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    topology = read_topology(sysfs, range(2))
    assert topology.nodes == {0: (1,)} and topology.cpu_quota == 0.5
    write(sysfs / "fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    assert read_topology(sysfs, range(2)).cpu_quota is None


def add_amd_gpu(sysfs: Path, node: int, address: str, simd_count: int = 1216) -> None:
    """An AMD GPU for computing, of the class of processing accelerators, as its driver lists it."""
    bus, device = int(address[5:7], 16), int(address[8:10], 16)
    properties = f"cpu_cores_count 0\nsimd_count {simd_count}\nlocation_id {bus << 8 | device << 3}\ndomain 0\n"
    write(sysfs / f"class/kfd/kfd/topology/nodes/{node}/properties", properties)
    for name, text in {
        "class": "0x120000",
        "vendor": "0x1002",
        "numa_node": "1",
        "mem_info_vram_total": "206141652992",
        "product_name": "Instinct",
    }.items():
        write(sysfs / "bus/pci/devices" / address / name, text)


def test_amds_gpus_are_numbered_as_its_driver_lists_them(tmp_path, monkeypatch):
    sysfs = build_laptop(tmp_path)
    write(sysfs / "class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 2\nsimd_count 0\nlocation_id 0\n")
    add_amd_gpu(sysfs, 1, "0000:c1:00.0")
    add_amd_gpu(sysfs, 2, "0000:05:03.0")
    add_amd_gpu(sysfs, 10, "0000:46:00.0")
    gpus = read_topology(sysfs, range(2)).gpus
    assert [gpu.pci_address for gpu in gpus] == ["0000:c1:00.0", "0000:05:03.0", "0000:46:00.0"]
    assert {(gpu.name, gpu.memory_bytes, gpu.numa_node) for gpu in gpus} == {("Instinct", 206141652992, 1)}
    monkeypatch.setattr(topology_module, "SYSFS", sysfs)
    monkeypatch.setattr(topology_module, "PROC", tmp_path / "proc")
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert read_machine().gpus == ("0", "1", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,1")
    assert read_machine().gpus == ("2", "1")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "2")
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert read_machine().gpus == ("0",)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    assert environment(ProcessPlace("actor", 0, 0, visible="1"), 1)["HIP_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("", []), ("5,0", [5, 0]), ("1,9,2", [1]), ("-1", []), ("GPU-6f2c,GPU-2f2c", [6, 2]), ("GPU-,0", [])],
)
def test_visible_gpus(tmp_path, visible, expected):
    sysfs, proc = build_server(tmp_path)
    gpus = read_topology(sysfs, range(128), proc, visible).gpus
    assert [GPU_BUSES.index(gpu.pci_address[5:7]) for gpu in gpus] == expected


def test_laptop_is_read(tmp_path):
    topology = read_topology(build_laptop(tmp_path), {0, 1})
    assert topology.nodes == {0: (0, 1)} and topology.num_cores == {0: 2} and topology.gpus == ()
    assert assign_cpus(2, topology) == [CpuSlot(0, None), CpuSlot(1, None)]


def test_a_machine_without_numa_and_gpus(tmp_path):
    topology = read_topology(tmp_path, {0, 1})
    assert topology.nodes == {0: (0, 1)} and topology.gpus == ()
    assert assign_cpus(3, topology, gpu=0) == [CpuSlot(0, None), CpuSlot(1, None), CpuSlot(0, None)]


def test_this_machine():
    slots = assign_cpus(2)
    assert {slot.cpu for slot in slots} <= os.sched_getaffinity(0)
