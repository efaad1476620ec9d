"""Machines, devices and placement."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from embodrl.config.rules.base import Context, divisors, multiples, note, rule
from embodrl.config.schema import Config
from embodrl.config.schema.cluster import ClusterConfig, HardwareConfig, NodeGroupConfig
from embodrl.deployment.grammar import COMPONENTS, MACHINES, PlacementError, ProcessPlace
from embodrl.deployment.solver import is_single, nodes_of
from embodrl.deployment.topology import GIB
from embodrl.names import is_misspelt, nearest
from embodrl.rule_set import Finding
from embodrl.specs import LAUNCHERS

KEY = "cluster.component_placement"
# The driver and the kernel use the rest of a machine's nominal memory.
USABLE = 0.9
Places = Mapping[str, Sequence[ProcessPlace]]


@rule(KEY)
def components_are_placed_once(context: Context) -> Iterator[Finding]:
    """Every component is placed exactly once."""
    seen: list[str] = []
    for names in context.config.cluster.component_placement:
        at = f"{KEY}.{names}"
        for name in (part.strip() for part in names.split(",")):
            if name not in COMPONENTS:
                near = nearest(name, list(COMPONENTS))
                hint = f"write {near}" if is_misspelt(name, near) else "remove it"
                message = f"no component '{name}' (in '{names}')"
                if name == "reward":
                    message = f"rewards are computed by the main process (in '{names}')"
                    hint = "leave it out"
                yield Finding(KEY, message, hint, ", ".join(COMPONENTS), near, at=at)
            elif name in seen:
                message = f"the component '{name}' is placed twice"
                yield Finding(KEY, message, "name it in one line only", "once each", at=at)
            seen.append(name)
    missing = [name for name in COMPONENTS if name not in seen]
    if missing:
        hint = "add a line for it, e.g. '" + ",".join(missing) + ": all'"
        yield Finding(KEY, f"no placement for {', '.join(missing)}", hint, f"all of {', '.join(COMPONENTS)}")


@rule("cluster.placement", KEY, "cluster.node_groups")
def there_is_one_placement(context: Context) -> Iterator[Finding]:
    """The placement is given by device or by name."""
    named = context.config.cluster.placement
    if named == "given":
        return
    for key in (KEY, "cluster.node_groups"):
        if context.by_user(key):
            message = f"is '{named}', which chooses devices from the whole cluster"
            yield Finding(
                "cluster.placement", message, f"leave out {key}, or cluster.placement", "given", others=(key,)
            )


@rule("cluster.node_groups", "cluster.num_nodes")
def node_groups_are_sound(context: Context) -> Iterator[Finding]:
    """Node groups have different labels and existing machines."""
    cluster = context.config.cluster
    labels = [group.label for group in cluster.node_groups]
    for index, group in enumerate(cluster.node_groups):
        key = f"cluster.node_groups.{index}"
        if group.label in (*labels[:index], MACHINES, "") or "/" in group.label:
            message = f"'{group.label}' can't be a label: it is taken, empty or contains a slash"
            yield Finding(f"{key}.label", message, "give each group a unique name", f"text other than '{MACHINES}'")
        try:
            nodes_of(cluster, group)
        except PlacementError as error:
            yield Finding(f"{key}.node_ranks", str(error), error.hint, error.allowed, others=("cluster.num_nodes",))


@rule("cluster.node_groups", "cluster.num_nodes")
def group_hardware_is_sound(context: Context) -> Iterator[Finding]:
    """Hardware of a node group has a name, and a machine is described once."""
    cluster = context.config.cluster
    described: dict[int, NodeGroupConfig] = {}
    for index, group in enumerate(cluster.node_groups):
        key = f"cluster.node_groups.{index}.hardware"
        hardware = group.hardware
        if hardware is None:
            continue
        if hardware.name is None:
            yield Finding(f"{key}.name", "is missing, and a description has one", "name the machines", "text", at=key)
            continue
        for node in _nodes(cluster, group):
            other = described.setdefault(node, group)
            if other.hardware != hardware:
                message = f"describes machine {node} as '{hardware.name}', and group '{other.label}' otherwise"
                yield Finding(key, message, "describe a machine in one group only", "one description of a machine")
                break


def _nodes(cluster: ClusterConfig, group: NodeGroupConfig) -> tuple[int, ...]:
    """Return the machines of a group; () where another rule reports that there are no such machines."""
    try:
        return nodes_of(cluster, group)
    except PlacementError:
        return ()


def _descriptions(cluster: ClusterConfig) -> dict[str, HardwareConfig]:
    """Return the described kinds of machines by key."""
    groups = {f"cluster.node_groups.{i}.hardware": group.hardware for i, group in enumerate(cluster.node_groups)}
    found = {"cluster.hardware": cluster.hardware, **groups}
    return {key: each for key, each in found.items() if each is not None and each.name is not None}


def _description_of_the_first(cluster: ClusterConfig) -> tuple[str, HardwareConfig]:
    """Return the description of the machine on which a run starts, with its key."""
    for index, group in enumerate(cluster.node_groups):
        if group.hardware is not None and 0 in _nodes(cluster, group):
            return f"cluster.node_groups.{index}.hardware", group.hardware
    return "cluster.hardware", cluster.hardware


@rule(KEY, "cluster.placement", "cluster", "actor.training_backend", "rollout.backend", "env.num_processes")
def places_exist(context: Context) -> Iterator[Finding]:
    """Placements are readable, name existing devices and suit the backends; batches and simulators divide evenly."""
    for failure in context.solution.unplaced:
        names = failure.names
        reason = failure.reason
        if not names:
            message = f"is '{failure.text}': {reason}"
            yield Finding("cluster.placement", message, reason.hint, reason.allowed, others=("cluster.device",))
            continue
        message = f"'{names}: {failure.text}' is invalid or cannot be satisfied: {reason}"
        yield Finding(KEY, message, reason.hint, reason.allowed, others=("cluster.device",), at=f"{KEY}.{names}")
    yield from shares_are_even(context.config, context.solution.places)


@rule("cluster.hardware", "cluster.num_nodes", "cluster.node_groups", "cluster.device", machine_specific=True)
def described_hardware_is_here(context: Context) -> Iterator[Finding]:
    """Described hardware matches this machine, on which training runs."""
    cluster = context.config.cluster
    machine = context.solution.machine
    if cluster.num_nodes > 1 and not context.launcher.many_machines:
        able = " or ".join(spec.name for spec in LAUNCHERS.all() if spec.many_machines)
        message = f"is {cluster.num_nodes}, and the launcher '{cluster.launcher}' knows only this machine"
        hint = f"set cluster.launcher={able}, or num_nodes to 1; `embodrl plan train` plans for any number"
        yield Finding("cluster.num_nodes", message, hint, f"1, or launcher {able}", others=("cluster.launcher",))
    key, hardware = _description_of_the_first(cluster)
    if hardware.name is None:
        return
    facts = [
        (hardware.num_gpus, 0 if cluster.device == "cpu" else len(machine.gpus), "GPU(s)"),
        (hardware.num_cores, machine.num_cpus, "cores"),
        (hardware.memory_gib * USABLE, machine.memory_bytes / GIB, "GiB of memory"),
    ]
    missing = [f"{there:.0f} of {wanted:.0f} {what}" for wanted, there, what in facts if there < wanted]
    if missing:
        yield Finding(
            f"{key}.name",
            f"'{hardware.name}' is described, but this machine has {', '.join(missing)}",
            "set cluster=local, or run it on such a machine; `embodrl plan train` works without one",
            "null, or hardware that is here",
        )


@rule(KEY, "cluster", "actor.training_backend", "rollout.backend", "env.num_processes", machine_specific=True)
def native_is_one_process(context: Context) -> Iterator[Finding]:
    """Backends can use their devices: native ones are one process on one device."""
    config = context.config
    found = context.solution.places
    backends = {
        "actor": ("actor.training_backend", config.actor.training_backend),
        "rollout": ("rollout.backend", config.rollout.backend),
    }
    for name, (key, backend) in backends.items():
        processes = found.get(name, [])
        devices = {(p.node, device) for p in processes for device in (p.devices or (-1,))}
        if name == "rollout" and any(len(process.devices) > 1 for process in processes):
            message = f"a rollout process gets several devices, and {key} '{backend}' acts on one"
            yield Finding(KEY, message, "use one process per device, e.g. rollout: 0-3", "a process per device")
        if name == "actor" and is_single(config, name) and (len(processes) > 1 or len(devices) > 1):
            message = f"{name} gets {len(devices)} device(s) and {len(processes)} process(es), but {key}"
            message += f" '{backend}' is 1 process on 1 device"
            yield Finding(KEY, message, f"place {name} on 0, or on all", "all, or one device", others=(key,))
    if context.launcher.starts_everything:
        return
    actor = found.get("actor", [])
    rollout = found.get("rollout", [])
    if config.actor.own_process is not False or not (is_single(config, "rollout") and len(actor) == len(rollout) == 1):
        return
    where = [(p.node, p.devices) for p in (actor[0], rollout[0])]
    if where[0] != where[1]:
        at = [f"{p.component} on {_name(p)}" for p in (actor[0], rollout[0])]
        yield Finding(
            KEY,
            f"{' and '.join(at)}: with actor.own_process=false, rollout.backend '{config.rollout.backend}' acts with"
            " the weights of the actor, in its process",
            "write 'actor,rollout: 0', or leave actor.own_process out",
            "the same device for both",
            others=("rollout.backend", "actor.own_process"),
        )


def _name(process: ProcessPlace) -> str:
    devices = ", ".join(map(str, process.devices))
    return f"device {devices}" if process.devices else f"the processor of node {process.node}"


def shares_are_even(config: Config, found: Places) -> Iterator[Finding]:
    """Yield what can't be divided evenly among several rollout or actor processes."""
    rollouts = len(found.get("rollout", []))
    actors = len(found.get("actor", []))
    stages = config.rollout.pipeline_stages
    simulators = config.env.num_processes
    groups = rollouts * stages
    if rollouts > 1 and simulators % groups:
        yield Finding(
            "env.num_processes",
            f"{rollouts} rollout processes x {stages} pipeline stage(s) = {groups} groups of simulators:"
            f" {simulators} / {groups} leaves {simulators % groups}",
            f"set env.num_processes to {multiples(simulators, groups)}",
            f"a multiple of {groups}",
            others=(KEY, "rollout.pipeline_stages"),
        )
    actor = config.actor
    # Processes that share layers process the same chunks.
    actors = max(1, actors // actor.tensor_parallel_size)
    share = actor.global_batch_size // actors
    if actors > 1 and actor.global_batch_size % actors:
        yield Finding(
            "actor.global_batch_size",
            f"{actor.global_batch_size} chunks over {actors} actor processes with chunks of their own:"
            f" {actor.global_batch_size} / {actors} leaves {actor.global_batch_size % actors}",
            f"set it to {multiples(actor.global_batch_size, actors * actor.micro_batch_size)}",
            f"a multiple of {actors} x {actor.micro_batch_size} = {actors * actor.micro_batch_size}",
            others=(KEY,),
        )
    elif actors > 1 and share % actor.micro_batch_size:
        yield Finding(
            "actor.micro_batch_size",
            f"{actor.global_batch_size} chunks / {actors} actor processes = {share} each, and {share} /"
            f" {actor.micro_batch_size} leaves {share % actor.micro_batch_size}",
            f"set it to {divisors(share, actor.micro_batch_size)}",
            f"a divisor of {share}",
            others=("actor.global_batch_size", KEY),
        )


@rule("cluster.hardware", "cluster.device", "cluster.node_groups")
def described_hardware_is_whole(context: Context) -> Iterator[Finding]:
    """GPUs and cores are spread evenly over NUMA nodes, and a requested GPU is described."""
    cluster = context.config.cluster
    described = _descriptions(cluster)
    for at, hardware in described.items():
        for key, count in (("num_gpus", hardware.num_gpus), ("num_cores", hardware.num_cores)):
            if count % hardware.num_numa_nodes:
                yield Finding(
                    f"{at}.{key}",
                    f"{count} / {hardware.num_numa_nodes} NUMA nodes leaves {count % hardware.num_numa_nodes}",
                    f"set it to {multiples(count, hardware.num_numa_nodes)}",
                    f"a multiple of {hardware.num_numa_nodes}",
                    others=(f"{at}.num_numa_nodes",),
                )
    hardware = cluster.hardware
    if cluster.device == "cuda" and hardware.name is not None and not any(h.num_gpus for h in described.values()):
        yield Finding(
            "cluster.device",
            f"is cuda, and '{hardware.name}' has no GPU",
            "set cluster.hardware.num_gpus, or cluster.device=auto",
            "auto, cpu",
            others=("cluster.hardware.num_gpus",),
        )


@rule("actor.param_dtype", "actor.precision")
def device_has_the_dtype(context: Context) -> Iterator[Finding]:
    """Weights in bf16 are multiplied in bf16."""
    actor = context.config.actor
    if actor.param_dtype == "bf16" and actor.precision == "fp32":
        message = "weights in bf16 can't be computed with in fp32 precision"
        hint = "set actor.precision=auto and rollout.precision=auto, or actor.param_dtype=fp32"
        yield Finding("actor.precision", message, hint, "auto, bf16", others=("actor.param_dtype",))


MASTERS = "actor.optim.master_weights"


@note("actor.param_dtype", "actor.optim", "actor.training_backend", "cluster", "model.trainable")
def bf16_weights_lose_updates(context: Context) -> Iterator[Finding]:
    """Small updates of bf16 weights are rounded away unless the optimizer holds float32 copies."""
    actor = context.config.actor
    model = context.config.model
    if actor.param_dtype != "bf16" or model.trainable == "lora":
        return
    if actor.optim.master_weights is False and context.training_engine.keeps_masters:
        message = f"is false: weights that train (model.trainable={model.trainable}) exist only in bf16, and 80 to"
        message += " 90 % of the movement is rounded away at learning rates of 1e-5 and below"
        yield Finding(MASTERS, message, "leave it out, or set model.trainable=lora, whose adapters stay in float32")


@rule(MASTERS, "actor.training_backend", "actor.param_dtype", "model.trainable")
def masters_have_a_use(context: Context) -> Iterator[Finding]:
    """Float32 copies are requested only for weights in half precision."""
    actor = context.config.actor
    if not context.training_engine.keeps_masters:
        return
    if actor.optim.master_weights is True and (actor.param_dtype == "fp32" or context.config.model.trainable == "lora"):
        message = "is true, but all trained weights are already in float32"
        yield Finding(MASTERS, message, "leave it out", "auto", others=("actor.param_dtype", "model.trainable"))


@note("cluster.num_threads")
def threads_have_cores(context: Context) -> Iterator[Finding]:
    """More threads than cores slow each other down."""
    threads = context.config.cluster.num_threads
    cores = os.cpu_count() or 1
    if threads is not None and threads > cores:
        yield Finding("cluster.num_threads", f"{threads} threads share {cores} cores", f"set it to {cores}, or null")
