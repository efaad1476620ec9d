"""`embodrl plan train`: the processes, batches and memory of a run, without starting it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace

from embodrl.config import LoadedConfig
from embodrl.config.schema import Config
from embodrl.deployment import Deployment, ProcessPlace, Topology
from embodrl.deployment.solver import hardware_by_node
from embodrl.preflight.placement import weighed
from embodrl.preflight.run_memory import ESTIMATED_BY, MemoryPlan, as_plain, chunks_of, plan_memory


@dataclass(frozen=True)
class BatchSizes:
    """The batch sizes of an iteration.

    Attributes:
        environments: over all simulators.
        environments_per_stage: environments decided at once by one rollout process.
        pipeline_stages: groups of environments of a rollout process.
        chunks_per_environment, chunks, environment_steps: per iteration; the steps are an upper bound.
        global_batch: chunks per optimizer step, over all actor processes.
        micro_batch: chunks per forward and backward pass.
        gradient_accumulation: passes per optimizer step, of one actor process.
    """

    environments: int
    environments_per_simulator: int
    simulators_per_rollout: int
    environments_per_stage: int
    pipeline_stages: int
    chunks_per_environment: int
    chunks: int
    environment_steps: int
    global_batch: int
    batch_per_actor: int
    micro_batch: int
    gradient_accumulation: int
    optimizer_steps: int


@dataclass(frozen=True)
class MachineKind:
    """Machines of one kind.

    Attributes:
        name: of the described hardware, or "this machine".
        described: described, not read.
        nodes: their numbers.
        machine: what each of them has.
    """

    name: str
    described: bool
    nodes: tuple[int, ...]
    machine: Topology


@dataclass(frozen=True)
class Plan:
    """A planned run.

    Attributes:
        obstacles: reasons for which `embodrl train` would refuse it on this machine today.
        warnings: oddities of the placement.
    """

    deployment: Deployment
    batches: BatchSizes
    memory: MemoryPlan
    obstacles: list[str]
    warnings: list[str]

    @property
    def fits(self) -> bool:
        """Whether every memory is large enough; False if the size of the model is unknown."""
        return not self.memory.not_estimated and all(memory.fits for memory in self.memory.memories)

    def as_json(self, config: Config) -> dict[str, object]:
        kinds = machine_kinds(config, self.deployment)
        return {
            "cluster": ", ".join(kind.name for kind in kinds),
            "num_nodes": config.cluster.num_nodes,
            "described": all(kind.described for kind in kinds),
            "machines": [{"name": kind.name, "nodes": list(kind.nodes)} for kind in kinds],
            "mode": self.deployment.mode,
            "placement_reasons": list(self.deployment.reasons),
            "processes": [_plain(place) for place in self.deployment.processes],
            "processes_per_device": per_device(self.deployment),
            "simulators_per_cpu": per_cpu(self.deployment),
            "batches": asdict(self.batches),
            "memory": as_plain(self.memory),
            "memory_not_estimated": self.memory.not_estimated,
            "num_parameters": self.memory.num_parameters or None,
            "tiny": self.memory.tiny,
            "public_size": self.memory.public_size,
            "memory_estimated_by": ESTIMATED_BY,
            "fits": self.fits,
            "hints": self.memory.hints,
            "obstacles": self.obstacles,
            "warnings": self.warnings,
        }


def make_plan(loaded: LoadedConfig) -> Plan:
    """Plan a run loaded for the verb plan; starts nothing and imports no simulator.

    Raises:
        EmbodrlError: the number of GPUs is unknown, or the model's files can't be read.
    """
    loaded = weighed(loaded)
    config = loaded.config
    deployment = loaded.deployment
    obstacles = [f"{problem.key}: {problem.message}" for problem in loaded.obstacles]
    memory = plan_memory(config, deployment)
    added = spread(config, deployment)
    if added and not all(one.fits for one in memory.memories):
        memory = replace(memory, hints=[f"{' '.join(added)} uses the idle GPUs", *memory.hints])
    return Plan(deployment, batches(config, deployment), memory, obstacles, warnings(deployment))


def machine_kinds(config: Config, deployment: Deployment) -> list[MachineKind]:
    """Return the kinds of machines of a cluster, in the order of their first machines."""
    described = hardware_by_node(config.cluster)
    kinds: list[MachineKind] = []
    for node, hardware in enumerate(described):
        if hardware in described[:node]:
            continue
        alike = tuple(other for other, each in enumerate(described) if each == hardware)
        name = hardware.name or "this machine"
        kinds.append(MachineKind(name, hardware.name is not None, alike, deployment.machines[node]))
    return kinds


def spread(config: Config, deployment: Deployment) -> tuple[str, ...]:
    """Return overrides that shard training and rollouts over all GPUs; () if no GPU is idle or can be added.

    Uses the largest number of GPUs that divides both simulators and batches.
    """
    actor = config.actor
    env = config.env
    used = {(p.node, device) for name in ("actor", "rollout") for p in deployment.of(name) for device in p.devices}
    gpus = sum(len(machine.gpus) for machine in deployment.machines)
    if len(used) == gpus or not deployment.of("actor")[0].devices or actor.training_backend not in ("native", "fsdp"):
        return ()
    sizes = (actor.global_batch_size, env.train.total_num_envs, env.eval.total_num_envs)
    number = next(number for number in range(gpus, 0, -1) if not any(size % number for size in sizes))
    if number <= len(used):
        return ()
    share = actor.global_batch_size // number
    found = ["cluster.placement=auto"]
    if actor.training_backend == "native":
        found.insert(0, "actor=fsdp")
    if env.num_processes % number:
        found.append(f"env.num_processes={number}")
    if actor.micro_batch_size > share:
        found.append(f"actor.micro_batch_size={share}")
    return tuple(found)


def _plain(place: ProcessPlace) -> dict[str, object]:
    """Return a place as plain values, without fields of the start message."""
    return {name: value for name, value in asdict(place).items() if name != "visible"}


def batches(config: Config, deployment: Deployment) -> BatchSizes:
    """Return the batch sizes of an iteration."""
    train = config.env.train
    actor = config.actor
    chunk = config.model.num_action_chunks
    rollouts = len(deployment.of("rollout"))
    actors = len(deployment.of("actor"))
    simulators = len(deployment.of("env"))
    chunks = chunks_of(config)
    stages = config.rollout.pipeline_stages
    share = actor.global_batch_size // max(1, actors // actor.tensor_parallel_size)
    return BatchSizes(
        environments=train.total_num_envs,
        environments_per_simulator=train.total_num_envs // simulators,
        simulators_per_rollout=simulators // rollouts,
        environments_per_stage=train.total_num_envs // (rollouts * stages),
        pipeline_stages=stages,
        chunks_per_environment=chunks // train.total_num_envs,
        chunks=chunks,
        environment_steps=chunks * chunk,
        global_batch=actor.global_batch_size,
        batch_per_actor=share,
        micro_batch=actor.micro_batch_size,
        gradient_accumulation=-(-share // actor.micro_batch_size),
        optimizer_steps=-(-chunks // actor.global_batch_size) * config.algorithm.update_epoch,
    )


def per_device(deployment: Deployment) -> dict[str, dict[str, int]]:
    """Return ``NODE:GPU`` -> component -> number of processes."""
    found: dict[str, dict[str, int]] = {
        f"{node}:{gpu}": {} for node, machine in enumerate(deployment.machines) for gpu in range(len(machine.gpus))
    }
    for place in deployment.processes:
        for device in place.devices:
            parts = found.setdefault(f"{place.node}:{device}", {})
            parts[place.component] = parts.get(place.component, 0) + 1
    return found


def per_cpu(deployment: Deployment) -> dict[str, int]:
    """Return ``NODE:CPU`` -> number of simulators bound to it."""
    simulators = (*deployment.of("env"), *deployment.of("eval_env"))
    bound = Counter(f"{p.node}:{p.cpus[0]}" for p in simulators if len(p.cpus) == 1)
    return dict(sorted(bound.items(), key=lambda item: tuple(map(int, item[0].split(":")))))


def warnings(deployment: Deployment) -> list[str]:
    """Return oddities: idle GPUs, simulators that share a core or feed a GPU of another NUMA node."""
    lines: list[str] = []
    for node, machine in enumerate(deployment.machines):
        policies = {
            d for name in ("actor", "rollout", "eval") for p in deployment.of(name) if p.node == node for d in p.devices
        }
        idle = len(machine.gpus) - len(policies)
        if idle and deployment.of("actor")[0].devices:
            lines.append(f"node {node}: {idle} of {len(machine.gpus)} GPUs have neither actor nor rollout")
        here = [p for p in deployment.of("env") if p.node == node]
        cores = sum(machine.num_cores.values())
        quota = machine.cpu_quota
        if len(here) > cores:
            lines.append(f"node {node}: {len(here)} simulators share {cores} cores")
        if quota is not None and quota < cores:
            lines.append(f"node {node}: of {cores} cores the container may use {quota:g}")
        far = sum(
            1
            for p in here
            if p.numa_node is not None
            and {machine.gpus[d].numa_node for d in p.devices if d < len(machine.gpus)} - {p.numa_node, None}
        )
        if far:
            lines.append(f"node {node}: {far} simulators feed a GPU of another NUMA node")
    return lines
