"""Processes of a run: which component, on which machine, devices and cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from embodrl.config.cluster_schema import HardwareConfig
from embodrl.config.placement import Mode, PlacementError, Process, mode_of
from embodrl.config.rules.cluster import place_all
from embodrl.config.schema import Config
from embodrl.errors import EmbodrlError
from embodrl.scheduler.topology import Gpu, Topology, assign_cpus, read_topology

GIB = 1 << 30


@dataclass(frozen=True)
class ProcessPlace:
    """A process and its place.

    Attributes:
        component: actor, rollout or env.
        rank: within the component, from 0.
        node: machine, from 0.
        devices: GPUs of that machine; empty for the processor alone.
        cpus: logical CPUs that it may use; empty for all of them.
        numa_node: whose memory it should use; None on a machine with one node, or where it does not matter.
    """

    component: str
    rank: int
    node: int = 0
    devices: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    numa_node: int | None = None


@dataclass(frozen=True)
class Placement:
    """Where everything runs.

    Attributes:
        processes: actor, then rollout, then env, each by rank.
        mode: whether components share devices.
        machines: what each machine has, by node.
    """

    processes: tuple[ProcessPlace, ...]
    mode: Mode
    machines: tuple[Topology, ...]

    def of(self, component: str) -> tuple[ProcessPlace, ...]:
        """Return the processes of a component, by rank."""
        return tuple(process for process in self.processes if process.component == component)


def describe_machine(hardware: HardwareConfig) -> Topology:
    """Return the topology of described hardware.

    Logical CPUs are numbered as Linux usually does: the first threads of all cores, node after node, then the second
    ones. GPUs are spread over the nodes in order.
    """
    nodes: dict[int, tuple[int, ...]] = {}
    per_node = hardware.num_cores // hardware.num_numa_nodes
    for node in range(hardware.num_numa_nodes):
        first = range(node * per_node, (node + 1) * per_node)
        nodes[node] = tuple(
            cpu + thread * hardware.num_cores for thread in range(hardware.threads_per_core) for cpu in first
        )
    memory = int(hardware.gpu_memory_gib * GIB)
    gpus = tuple(
        Gpu(f"described:{gpu}", gpu * hardware.num_numa_nodes // hardware.num_gpus, hardware.name or "", memory)
        for gpu in range(hardware.num_gpus)
    )
    core_of = {cpu: cpu % hardware.num_cores for cpus in nodes.values() for cpu in cpus}
    return Topology(nodes, dict.fromkeys(nodes, per_node), gpus, core_of=core_of)


def machines_of(config: Config) -> tuple[Topology, ...]:
    """Return the machines of a configuration: as described, or this one."""
    cluster = config.cluster
    machine = read_topology() if cluster.hardware.name is None else describe_machine(cluster.hardware)
    return (machine,) * cluster.num_nodes


def solve(config: Config, machines: Sequence[Topology] | None = None) -> Placement:
    """Place every process of a valid configuration.

    Simulators are bound to a core each, on the NUMA node of the GPU that they feed as long as that has cores. Actor and
    rollout processes on a GPU may use the cores of its node, others all cores.

    Args:
        config: the run.
        machines: by node; None takes those of the configuration.

    Raises:
        EmbodrlError: the placement can't be had.
    """
    machines = machines_of(config) if machines is None else machines
    try:
        found = place_all(config)
    except PlacementError as error:
        raise EmbodrlError(f"cluster.component_placement: {error}", error.hint) from error
    places: list[ProcessPlace] = []
    for component in ("actor", "rollout"):
        for process in found[component]:
            node = _numa_node(machines[process.node], process)
            several = len(machines[process.node].nodes) > 1
            cpus = machines[process.node].cpus(node) if node is not None and several else ()
            places.append(
                ProcessPlace(
                    component, process.rank, process.node, process.devices, cpus, node if several and cpus else None
                )
            )
    places += _pin_simulators(config, found["env"], machines)
    return Placement(tuple(places), mode_of(found), tuple(machines))


def _pin_simulators(config: Config, processes: list[Process], machines: Sequence[Topology]) -> list[ProcessPlace]:
    places: dict[int, ProcessPlace] = {}
    for node, machine in enumerate(machines):
        here = [process for process in processes if process.node == node]
        near = [_numa_node(machine, process) for process in here]
        slots = assign_cpus(len(here), machine, near=near if any(n is not None for n in near) else None)
        for process, slot in zip(here, slots, strict=True):
            cpus = (slot.cpu,) if config.env.pin_cpus else ()
            numa = slot.numa_node if config.env.pin_cpus else None
            places[process.rank] = ProcessPlace("env", process.rank, node, process.devices, cpus, numa)
    return [places[process.rank] for process in processes]


def _numa_node(machine: Topology, process: Process) -> int | None:
    """Return the NUMA node of the GPUs of a process; None if they have several, or none."""
    nodes = {machine.gpus[device].numa_node for device in process.devices if device < len(machine.gpus)}
    return nodes.pop() if len(nodes) == 1 else None
