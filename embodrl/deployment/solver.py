"""Solves a configuration and a machine into a ``Deployment``: which process runs where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from embodrl.deployment.automatic import choices
from embodrl.deployment.grammar import (
    COMPONENTS,
    MACHINES,
    Mode,
    PlacementError,
    Pool,
    ProcessPlace,
    assign,
    make_pool,
    mode_of,
    parse_ranks,
    split_group,
)
from embodrl.deployment.topology import GIB, Gpu, Machine, Topology, assign_cpus, read_machine
from embodrl.errors import EmbodrlError
from embodrl.names import nearest
from embodrl.specs import ENGINES, LAUNCHERS

if TYPE_CHECKING:  # configuration rules read deployments, so this package is below the configuration
    from embodrl.config.schema import Config
    from embodrl.config.schema.cluster import ClusterConfig, HardwareConfig, NodeGroupConfig

# Stands for an unknown number of GPUs, so that the rest of the placement can be checked.
_MANY_GPUS = 100_000
SIMULATORS = "simulators"
"""Component of the servers that run simulators away from their rollout processes."""


@dataclass(frozen=True)
class Deployment:
    """The placement of a run. Workers read it instead of probing the machine, where they see only their own share.

    Attributes:
        processes: actor, rollout, env, those of ``pipeline.placement`` (``node_component``), and with
            ``runner.eval_async`` eval and eval_env, each by rank.
        mode: whether components share devices.
        machines: hardware of each machine, by node.
        gpus_per_node: GPUs of the machine with most that the components may use.
        num_cpus: logical CPUs of the driver's machine that the run may use.
        trains_in_processes: training runs outside the driver.
        rolls_out_in_processes: rollouts run outside the driver.
        reasons: reasons for the placement, where ``cluster.placement`` names one.
    """

    processes: tuple[ProcessPlace, ...]
    mode: Mode
    machines: tuple[Topology, ...]
    gpus_per_node: int
    num_cpus: int
    num_threads: int | None
    trains_in_processes: bool
    rolls_out_in_processes: bool
    reasons: tuple[str, ...] = ()

    def of(self, component: str) -> tuple[ProcessPlace, ...]:
        return tuple(process for process in self.processes if process.component == component)

    def simulators_of(self, rollout: ProcessPlace) -> tuple[ProcessPlace, ...]:
        """Return the simulators that a rollout process drives."""
        envs = self.of("env")
        size = len(envs) // len(self.of("rollout"))
        return envs[rollout.rank * size : (rollout.rank + 1) * size]

    @property
    def simulator_hosts(self) -> tuple[ProcessPlace, ...]:
        """Places of the servers that run simulators for rollout processes on other machines, one per set of devices."""
        if not self.rolls_out_in_processes:
            return ()
        far = {
            (env.node, env.devices): env
            for rollout in self.of("rollout")
            for env in self.simulators_of(rollout)
            if env.node != rollout.node
        }
        ordered = [far[key] for key in sorted(far)]
        return tuple(
            ProcessPlace(SIMULATORS, rank, env.node, env.devices, visible=env.visible)
            for rank, env in enumerate(ordered)
        )

    @property
    def acts_in_processes(self) -> bool:
        """Whether rollouts, or evaluation during training, run outside the driver."""
        return self.rolls_out_in_processes or bool(self.of("eval"))

    @property
    def main_component(self) -> Literal["actor", "rollout"] | None:
        """The driver's own component; None if it only drives the others."""
        if not self.rolls_out_in_processes:
            return "rollout"
        return None if self.trains_in_processes else "actor"

    @property
    def has_processes(self) -> bool:
        """Whether training or rollouts run outside the driver."""
        return self.trains_in_processes or self.rolls_out_in_processes

    @property
    def main_place(self) -> ProcessPlace | None:
        """The place of the driver's own component; None if it has none."""
        return None if self.main_component is None else self.of(self.main_component)[0]

    def threads_of(self, place: ProcessPlace) -> int:
        """Return the CPU threads available to an actor or rollout process, given its neighbours on the machine."""
        near = [other for other in self.of(place.component) if other.node == place.node]
        if self.num_threads is None and place.cpus:
            return max(1, len(place.cpus) // sum(other.cpus == place.cpus for other in near))
        return max(1, (self.num_threads or self.num_cpus) // len(near))


@dataclass(frozen=True)
class Unplaced:
    """A line ``names: text`` of ``cluster.component_placement`` that is invalid or impossible, and the reason.

    For ``cluster.placement=text`` without such lines ``names`` is empty.
    """

    names: str
    text: str
    reason: PlacementError


@dataclass(frozen=True)
class Solution:
    """Result of placing all components, so that rules can report all problems at once.

    Attributes:
        gpus_per_node: of the machine with most, described or counted; None if a GPU is required and this machine lists
            none.
        places: places of the components that could be placed.
        unplaced: lines that could not be placed.
        found: the deployment; None if a component is missing or the number of GPUs is unknown.
        planning: machines are only described, and need not exist.
        weighed: chosen with regard to memory; see ``preflight.placement``.
    """

    machine: Machine
    gpus_per_node: int | None
    places: Mapping[str, Sequence[ProcessPlace]]
    unplaced: tuple[Unplaced, ...]
    found: Deployment | None
    planning: bool = False
    weighed: bool = False

    @property
    def deployment(self) -> Deployment:
        """The deployment of a valid configuration; raises EmbodrlError if the placement is impossible."""
        if self.found is not None:
            return self.found
        for failure in self.unplaced:
            raise EmbodrlError(
                f"cluster.component_placement: {failure.reason}", failure.reason.hint, code="placement"
            ) from failure.reason
        raise EmbodrlError(
            "cluster.device=cuda: no GPU of NVIDIA or AMD found on this machine",
            "set cluster.device=auto, or describe another machine in cluster.hardware and `embodrl plan` for it",
            code="placement",
        )


def solve(config: Config, machine: Machine | None = None, planning: bool = False) -> Solution:
    """Place every process; types in ``config`` are valid, places may not be.

    Simulators are bound to one core each, on the NUMA node of the GPU they feed as long as it has free cores. Actor and
    rollout processes on a GPU may use the cores of its node, others all cores. With ``planning``, described machines
    need not exist: cores and GPUs are the description's. Where ``cluster.placement`` allows several placements, the
    fastest is taken.
    """
    return next(solutions(config, machine, planning))


def solutions(config: Config, machine: Machine | None = None, planning: bool = False) -> Iterator[Solution]:
    """Yield the placements that the configuration allows, as ``solve``; with ``cluster.placement`` the fastest first.

    There is at least one; several only with ``cluster.placement``.
    """
    machine = read_machine() if machine is None else machine
    gpus = _gpus_by_node(config.cluster, machine)
    if config.cluster.placement == "given" or gpus is None:
        yield _solution(config, gpus, machine, planning)
        return
    try:
        # By name, all machines are alike: it goes without node groups.
        for choice in choices(config, gpus[0]):
            cluster = config.cluster.model_copy(update={"component_placement": choice.places})
            placed = config.model_copy(update={"cluster": cluster})
            yield _solution(placed, gpus, machine, planning, choice.reasons)
    except PlacementError as error:
        yield Solution(machine, max(gpus), {}, (Unplaced("", config.cluster.placement, error),), None, planning)


def _solution(
    config: Config, gpus: tuple[int, ...] | None, machine: Machine, planning: bool, reasons: tuple[str, ...] = ()
) -> Solution:
    """Place every process as ``cluster.component_placement`` says."""
    cluster = config.cluster
    places, unplaced = _place(config, (_MANY_GPUS,) * cluster.num_nodes if gpus is None else gpus)
    found = None
    if gpus is not None and not unplaced and all(name in places for name in COMPONENTS):
        found = _deploy(config, places, _topologies(cluster, machine, planning), machine, gpus)
        found = replace(found, reasons=reasons)
    most = None if gpus is None else max(gpus)
    return Solution(machine, most, places, unplaced, found, planning)


def hardware_by_node(cluster: ClusterConfig) -> list[HardwareConfig]:
    """Return what is described of each machine: by its node group, else by ``cluster.hardware``.

    Raises:
        PlacementError: see ``nodes_of``.
    """
    found = [cluster.hardware] * cluster.num_nodes
    for group in cluster.node_groups:
        if group.hardware is not None:
            for node in nodes_of(cluster, group):
                found[node] = group.hardware
    return found


def _topologies(cluster: ClusterConfig, machine: Machine, planning: bool) -> tuple[Topology, ...]:
    """Return the hardware of each machine.

    A run reads its own machine, which is the first, and takes the others to be like it, unless their node group says
    what they have.
    """
    found: list[Topology] = []
    for node, hardware in enumerate(hardware_by_node(cluster)):
        known = hardware is not cluster.hardware and node > 0
        described = hardware.name is not None and (planning or known)
        found.append(describe_machine(hardware) if described else machine.topology)
    return tuple(found)


def _gpus_by_node(cluster: ClusterConfig, machine: Machine) -> tuple[int, ...] | None:
    """Return the number of GPUs of each machine; None if a GPU is required, and this machine lists none."""
    if cluster.device == "cpu":
        return (0,) * cluster.num_nodes
    try:
        described = hardware_by_node(cluster)
    except PlacementError:
        described = [cluster.hardware] * cluster.num_nodes  # the rule about node groups reports it
    unknown = not machine.gpus and cluster.device == "cuda"
    if unknown and any(hardware.name is None for hardware in described):
        return None
    return tuple(len(machine.gpus) if each.name is None else each.num_gpus for each in described)


def nodes_of(cluster: ClusterConfig, group: NodeGroupConfig) -> tuple[int, ...]:
    """Return the machines of a node group.

    Raises:
        PlacementError: their ranks are malformed, or name machines that do not exist.
    """
    place = parse_ranks(group.node_ranks)
    nodes = tuple(range(cluster.num_nodes)) if place is None else place.devices
    if max(nodes) >= cluster.num_nodes or ":" in group.node_ranks:
        raise PlacementError(
            f"node group '{group.label}' names the machines {group.node_ranks}, and there are {cluster.num_nodes}",
            "write all, or machines such as 0 or 0-1",
            f"all, 0 to {cluster.num_nodes - 1}",
        )
    return nodes


def pools_of(cluster: ClusterConfig, gpus: Sequence[int]) -> dict[str, Pool]:
    """Return the pools that places index, by label; "" is the whole cluster. ``gpus`` are numbers by machine.

    Raises:
        PlacementError: see ``nodes_of``.
    """
    pools = {"": make_pool(gpus), MACHINES: make_pool(gpus, label=MACHINES)}
    for group in cluster.node_groups:
        pools[group.label] = make_pool(gpus, nodes_of(cluster, group), group.label)
    return pools


def starts_everything(config: Config) -> bool:
    """Whether work that the driver could do also runs in processes of the launcher."""
    return LAUNCHERS.entry(config.cluster.launcher).starts_everything


def is_single(config: Config, component: str) -> bool:
    """Whether ``all`` is one process on one device, rather than a process on each."""
    if config.cluster.controllers > 1 and component in ("actor", "rollout"):
        return True
    if component == "rollout" and (config.actor.training_backend != "native" or starts_everything(config)):
        return False
    shards = ENGINES.entry(config.actor.training_backend).shards
    return component == "rollout" or (component == "actor" and not shards)


def _place(config: Config, gpus: Sequence[int]) -> tuple[dict[str, list[ProcessPlace]], tuple[Unplaced, ...]]:
    """Return the places of the components, without cores, and the lines that could not be placed."""
    try:
        pools = pools_of(config.cluster, gpus)
    except PlacementError:
        return {}, ()  # reported by the rule about node groups
    places: dict[str, list[ProcessPlace]] = {}
    unplaced: list[Unplaced] = []
    for names, text in config.cluster.component_placement.items():
        for name in (part.strip() for part in names.split(",")):
            if name not in COMPONENTS:
                continue
            try:
                places[name] = _place_component(config, name, text, pools)
            except PlacementError as error:
                unplaced.append(Unplaced(names, text, error))
                break
    return places, tuple(unplaced)


def _place_component(config: Config, component: str, text: str, pools: Mapping[str, Pool]) -> list[ProcessPlace]:
    label, ranks = _labelled(text, pools)
    count = config.env.num_processes if component == "env" else None
    return assign(component, ranks, pools[label], count, is_single(config, component))


def _labelled(text: str, pools: Mapping[str, Pool]) -> tuple[str, str]:
    """Return the label of a known pool, and the ranks, of a placement."""
    label, ranks = split_group(text)
    if label not in pools:
        near = nearest(label, [name for name in pools if name])
        raise PlacementError(
            f"unknown node group '{label}'",
            f"write {near}/{ranks}" if near else "define it in cluster.node_groups",
            ", ".join(name for name in pools if name),
        )
    return label, ranks


def node_places(config: Config, name: str, gpus: Sequence[int]) -> list[ProcessPlace]:
    """Return the places of a node in ``pipeline.placement``; ``gpus`` are the numbers of GPUs by machine.

    Raises:
        PlacementError: there are no such devices, or no such node group.
    """
    pools = pools_of(config.cluster, gpus)
    label, ranks = _labelled(config.pipeline.placement[name], pools)
    return assign(node_component(name), ranks, pools[label])


def node_component(name: str) -> str:
    """Return the component of a node's processes in a deployment."""
    return f"node_{name}"


def _deploy(
    config: Config,
    places: Mapping[str, Sequence[ProcessPlace]],
    machines: tuple[Topology, ...],
    machine: Machine,
    gpus: tuple[int, ...],
) -> Deployment:
    processes: list[ProcessPlace] = []
    for place in (*places["actor"], *places["rollout"]):
        topology = machines[place.node]
        node = _numa_node(topology, place)
        cpus = topology.cpus(node) if node is not None and len(topology.nodes) > 1 else ()
        visible = _visible(place, machine, gpus[place.node])
        processes.append(replace(place, cpus=cpus, numa_node=node if cpus else None, visible=visible))
    simulators = [replace(place, visible=_visible(place, machine, gpus[place.node])) for place in places["env"]]
    processes += _pin_simulators(config, simulators, machines)
    for name in config.pipeline.placement:
        with suppress(PlacementError):  # reported by the rule about placed nodes
            nodes = node_places(config, name, gpus)
            processes += [replace(place, visible=_visible(place, machine, gpus[place.node])) for place in nodes]
    if config.runner.eval_async:
        processes += _async_evaluation_places(config, processes, machines[0], machine, gpus[0])
    actor, rollout = ({(p.node, p.devices) for p in places[name]} for name in ("actor", "rollout"))
    native = config.actor.training_backend == "native"
    trains = (
        starts_everything(config) or actor != rollout if config.actor.own_process is None else config.actor.own_process
    )
    return Deployment(
        tuple(processes),
        mode_of(places),
        machines,
        max(gpus),
        machine.num_cpus,
        config.cluster.num_threads,
        trains_in_processes=config.cluster.controllers == 1 and (trains or not native),
        rolls_out_in_processes=(
            driver_cannot_act(config, places["rollout"])
            if config.rollout.own_process is None
            else config.rollout.own_process
        ),
    )


def _async_evaluation_places(
    config: Config, processes: Sequence[ProcessPlace], topology: Topology, machine: Machine, num_gpus: int
) -> list[ProcessPlace]:
    """Return the places of asynchronous evaluation and its simulators, on machine 0.

    It gets the first GPU without training or rollouts, else the GPU of the first rollout or actor process there. It has
    as many simulators as one rollout process, each on the least loaded core; ties go to a core near the GPU.
    """
    here = [place for place in processes if place.node == 0]
    policies = [place for name in ("rollout", "actor") for place in here if place.component == name]
    used = {device for place in policies for device in place.devices}
    idle = [device for device in range(num_gpus) if device not in used] if used else []
    devices = (idle[0],) if idle else next((place.devices[:1] for place in policies if place.devices), ())
    place = ProcessPlace("eval", 0, 0, devices)
    node = _numa_node(topology, place)
    cpus = topology.cpus(node) if node is not None and len(topology.nodes) > 1 else ()
    visible = _visible(place, machine, num_gpus)
    found = [replace(place, cpus=cpus, numa_node=node if cpus else None, visible=visible)]
    core_of = topology.core_of
    loads = Counter(core_of.get(cpu, cpu) for other in here if other.component == "env" for cpu in other.cpus)
    slots = [(cpu, numa) for numa, members in topology.nodes.items() for cpu in members]
    for rank in range(config.env.num_processes // sum(other.component == "rollout" for other in processes)):
        cpu, numa = min(slots, key=lambda slot: (loads[core_of.get(slot[0], slot[0])], slot[1] != node))
        loads[core_of.get(cpu, cpu)] += 1
        place = ProcessPlace("eval_env", rank, 0, devices, visible=visible)
        if config.env.pin_cpus:
            place = replace(place, cpus=(cpu,), numa_node=numa if len(topology.nodes) > 1 else None)
        found.append(place)
    return found


def driver_cannot_act(config: Config, rollouts: Sequence[ProcessPlace]) -> bool:
    """Whether rollouts need processes, since the driver is one process on machine 0."""
    return starts_everything(config) or len(rollouts) > 1 or rollouts[0].node > 0


def _visible(place: ProcessPlace, machine: Machine, num_gpus: int) -> str | None:
    """Return CUDA_VISIBLE_DEVICES of a process.

    Placements count the GPUs that the driver sees. On its own machine these may have other numbers, or names, in the
    driver's CUDA_VISIBLE_DEVICES; on other machines all GPUs are assumed visible. ``num_gpus`` are those of the
    process's machine.
    """
    if not place.devices:
        return "" if num_gpus else None
    names = machine.gpus if place.node == 0 else ()
    return ",".join(names[device] if device < len(names) else str(device) for device in place.devices)


def describe_machine(hardware: HardwareConfig) -> Topology:
    """Return the topology of described hardware.

    Logical CPUs are numbered as Linux usually does: the first threads of all cores, node after node, then the second
    ones. GPUs are spread over the nodes in order.
    """
    nodes: dict[int, tuple[int, ...]] = {}
    per_node = max(1, hardware.num_cores // hardware.num_numa_nodes)  # a rule refuses fewer
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


def _pin_simulators(
    config: Config, processes: Sequence[ProcessPlace], machines: Sequence[Topology]
) -> list[ProcessPlace]:
    places: dict[int, ProcessPlace] = {}
    for node, machine in enumerate(machines):
        here = [process for process in processes if process.node == node]
        near = [_numa_node(machine, process) for process in here]
        slots = assign_cpus(len(here), machine, near=near if any(n is not None for n in near) else None)
        for process, slot in zip(here, slots, strict=True):
            cpus = (slot.cpu,) if config.env.pin_cpus else ()
            numa = slot.numa_node if config.env.pin_cpus else None
            places[process.rank] = replace(process, cpus=cpus, numa_node=numa)
    return [places[process.rank] for process in processes]


def _numa_node(machine: Topology, process: ProcessPlace) -> int | None:
    """Return the NUMA node of a process's GPUs; None for none or several."""
    nodes = {machine.gpus[device].numa_node for device in process.devices if device < len(machine.gpus)}
    return nodes.pop() if len(nodes) == 1 else None
