"""Section ``cluster``: machines, devices and placement. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from embodrl.config.schema.section import (
    EPISODES,
    PROCESSES,
    RL,
    WORKERS,
    AppliesIf,
    GroupRanks,
    NameOf,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Ranks,
    Section,
)
from embodrl.specs import LAUNCHERS


class HardwareConfig(Section):
    """Identical machines, described instead of detected."""

    name: str | None = Field(
        default=None, description="name of the described machines; null uses this machine as it is"
    )
    num_gpus: NonNegativeInt = Field(
        default=0, le=1024, description="GPUs per machine, spread evenly over its NUMA nodes"
    )
    gpu_memory_gib: PositiveFloat = Field(default=80.0, description="memory per GPU")
    num_numa_nodes: PositiveInt = Field(default=1, le=1024, description="NUMA nodes per machine")
    num_cores: PositiveInt = Field(default=2, le=65_536, description="cores per machine, over all NUMA nodes")
    threads_per_core: PositiveInt = Field(default=1, le=64, description="hardware threads per core")
    memory_gib: PositiveFloat = Field(default=16.0, description="main memory per machine")


class NodeGroupConfig(Section):
    """A named group of machines."""

    label: str = Field(description="name used by placements; `node` is reserved for whole machines")
    node_ranks: Ranks = Field(default="all", description="machines, e.g. 0-1 or 0,2")
    hardware: HardwareConfig | None = Field(
        default=None, description="what these machines have, with a name; null: cluster.hardware"
    )


class ClusterConfig(Section):
    """Machines, devices and placement."""

    num_nodes: Annotated[PositiveInt, PROCESSES] = Field(
        default=1, le=10_000, description="number of machines; more than one needs launcher ray"
    )
    launcher: Annotated[str, NameOf(LAUNCHERS, "for_runs"), PROCESSES] = Field(
        default="process",
        description="launcher of actor and rollout processes; ray: as Ray actors, except for the main process",
    )
    ray_address: Annotated[
        str | None,
        AppliesIf("launcher.many_machines", reason="the launcher starts processes on this machine only"),
        PROCESSES,
    ] = Field(
        default=None, description="address of a Ray cluster, or auto for the one on this machine; null starts one here"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="device of the policy; auto uses a GPU if there is one; cuda is ROCm, too"
    )
    num_threads: PositiveInt | None = Field(
        default=None, description="torch threads of the policy; null uses all cores"
    )
    hardware: Annotated[HardwareConfig, AppliesIf("cluster.hardware.name")] = Field(
        default=HardwareConfig(), description="machines described here instead of detected"
    )
    node_groups: Annotated[tuple[NodeGroupConfig, ...], PROCESSES] = Field(
        default=(), description="named groups of machines"
    )
    component_placement: dict[str, GroupRanks] = Field(
        default={"actor,rollout,env": "all"},
        description="components to devices, e.g. `actor,rollout: 0`; all, ranks, or `LABEL/ranks` in a node group",
    )
    placement: Literal["given", "auto", "colocated", "disaggregated", "hybrid"] = Field(
        default="given",
        description="given: component_placement; else a placement that fills the cluster, which `embodrl plan train`"
        " explains: colocated (training and rollouts share all devices), disaggregated (each has its own), hybrid"
        " (simulators and the acting policy have their own, training all), auto (one of the first two)",
    )
    training_share: Annotated[
        float, AppliesIf("divides_devices", reason="training and rollouts share all devices"), WORKERS
    ] = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="training's share of the work, for devices that are divided; auto: as the first two iterations of"
        " an earlier run with these settings measured it, until then 0.5",
    )
    rebalance: Annotated[
        NonNegativeInt, AppliesIf("moves_devices", reason="no rollouts run on devices of their own while training"), RL
    ] = Field(
        default=0,
        description="over every so many iterations, without the first of its processes, measure training_share again;"
        " if another division of the devices fits and takes less than 90 % of the time by it, save, start the processes"
        " there and continue; 0: never",
    )
    heartbeat_timeout_s: Annotated[PositiveFloat, EPISODES] = Field(
        default=20.0,
        description="seconds without a heartbeat after which a process that is stopped, or uses neither processor nor"
        " disk, counts as hung: it is killed, and restarted where possible",
    )
    stall_timeout_s: Annotated[
        PositiveFloat, AppliesIf("deployment.has_processes", reason="the main process acts and trains"), PROCESSES
    ] = Field(
        default=600.0,
        description="seconds for which a call to an actor or rollout process may use neither processor nor disk",
    )
    collective_timeout_s: Annotated[
        PositiveFloat,
        AppliesIf("trains_collectively", reason="the main process trains, without collectives"),
        WORKERS,
    ] = Field(
        default=300.0,
        description="seconds for which a training process waits for the others in a collective call (fsdp, megatron),"
        " and a controller for the others",
    )
    controllers: Annotated[PositiveInt, RL] = Field(
        default=1,
        le=100_000,
        description="main processes of the run, each with its part of the simulators, rollouts and minibatches, whose"
        " gradients are summed; torchrun, or what sets its variables, starts them",
    )
    restart_window_s: Annotated[PositiveFloat, EPISODES] = Field(
        default=3600.0,
        description="restarts longer ago than this many seconds do not count towards max_restarts of env, rollout and"
        " actor",
    )
