"""Wrong machines, node groups and placements."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from config_case import Wrong

import embodrl
from embodrl.hybrid_engines.training.megatron.spec import has_megatron

PLACES = "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}"
MEGATRON = ("actor=megatron", PLACES, "cluster.device=cpu")
MEGATRON_MISSING = () if has_megatron() else ("actor.training_backend",)
RAY_MISSING = () if importlib.util.find_spec("ray") else ("cluster.launcher",)
TINY = Path(embodrl.__file__).parent / "assets" / "openvla_tiny"
CONTROLLERS = ("cluster.controllers=2", "env.num_processes=2")
TWO_ROLLOUTS = "cluster.component_placement={actor:0,rollout:'0:0-1',env:0}"

CLUSTER = [
    Wrong(
        "a placement that is given and chosen",
        "cluster.placement",
        "there-is-one-placement",
        ("cluster.placement=auto", "cluster.component_placement={actor:0,rollout:0,env:0}"),
    ),
    Wrong(
        "described hardware that is not here",
        "cluster.hardware.name",
        "described-hardware-is-here",
        ("cluster.hardware.name=big", "cluster.hardware.num_cores=60000"),
    ),
    Wrong(
        "GPUs that NUMA nodes can't share",
        "cluster.hardware.num_gpus",
        "described-hardware-is-whole",
        ("cluster.hardware.num_gpus=7", "cluster=8xh100"),
        more=("cluster.hardware.name",),
    ),
    Wrong("a run on several machines", "cluster.num_nodes", "described-hardware-is-here", ("cluster.num_nodes=2",)),
    Wrong(
        "several machines and no Ray to join",
        "cluster.ray_address",
        "several-machines-are-there",
        ("cluster.num_nodes=2", "cluster.launcher=ray"),
        more=RAY_MISSING,
    ),
    Wrong(
        "simulators on another machine than their policy",
        "cluster.component_placement",
        "simulators-are-beside-their-rollout",
        (
            "cluster.component_placement={actor:0,rollout:0-1,env:0}",
            "env.num_processes=2",
            "cluster.device=cpu",
            "cluster.num_nodes=2",
            "cluster=ray_local",
            "cluster.ray_address=auto",
        ),
        more=RAY_MISSING,
    ),
    Wrong(
        "an interpreter of this machine for simulators on machines without a policy",
        "env.python",
        "simulators-are-beside-their-rollout",
        (
            "env.python=/usr/bin/python3",
            "cluster.component_placement={actor:0,rollout:0,env:1}",
            "cluster.device=cpu",
            "cluster.num_nodes=2",
            "cluster=ray_local",
            "cluster.ray_address=auto",
        ),
        more=RAY_MISSING,
    ),
    Wrong(
        "a main process that plays for two",
        "rollout.own_process",
        "several-rollouts-are-processes",
        ("rollout.own_process=false", TWO_ROLLOUTS, "cluster.device=cpu"),
    ),
    Wrong(
        "a main process that plays for Ray",
        "rollout.own_process",
        "several-rollouts-are-processes",
        ("rollout.own_process=false", "cluster=ray_local"),
        more=RAY_MISSING,
    ),
    Wrong(
        "a main process that trains for Ray",
        "actor.own_process",
        "parts-have-their-own-processes",
        ("actor.own_process=false", "cluster=ray_local"),
        more=RAY_MISSING,
    ),
    Wrong(
        "weights shared between processes",
        "rollout.weight_sync",
        "weights-get-there",
        ("rollout.weight_sync=shared", "rollout.own_process=true"),
    ),
    Wrong(
        "weights without a receiver",
        "rollout.weight_sync",
        "weights-get-there",
        ("rollout.weight_sync=disk",),
    ),
    Wrong(
        "patches without a receiver",
        "rollout.weight_patches",
        "patches-have-a-receiver",
        ("rollout.weight_patches=true",),
    ),
    Wrong(
        "patches on disk",
        "rollout.weight_patches",
        "patches-have-a-receiver",
        ("rollout.weight_patches=true", "rollout.weight_sync=disk", "rollout.own_process=true"),
    ),
    Wrong(
        "weights in the memory of another machine",
        "rollout.weight_sync",
        "weights-get-there",
        (
            "rollout.weight_sync=memory",
            "cluster.component_placement={actor:0,rollout:0-1,env:0-1}",
            "env.num_processes=2",
            "cluster.device=cpu",
            "cluster.num_nodes=2",
            "cluster=ray_local",
            "cluster.ray_address=auto",
        ),
        more=RAY_MISSING,
    ),
    Wrong(
        "node group beyond the machines",
        "cluster.node_groups.0.node_ranks",
        "node-groups-are-sound",
        ("cluster.node_groups=[{label: fast, node_ranks: 1-2}]",),
    ),
    Wrong(
        "node group of a name that is taken",
        "cluster.node_groups.0.label",
        "node-groups-are-sound",
        ("cluster.node_groups=[{label: node, node_ranks: 0}]",),
    ),
    Wrong(
        "hardware of a group without a name",
        "cluster.node_groups.0.hardware.name",
        "group-hardware-is-sound",
        ("cluster.node_groups=[{label: fast, node_ranks: 0, hardware: {num_gpus: 4}}]",),
    ),
    Wrong(
        "a machine that is two kinds",
        "cluster.node_groups.1.hardware",
        "group-hardware-is-sound",
        (
            "cluster.node_groups=[{label: a, node_ranks: 0, hardware: {name: x, num_cores: 1, memory_gib: 1}},"
            "{label: b, node_ranks: all, hardware: {name: y, num_cores: 1, memory_gib: 1}}]",
        ),
    ),
    Wrong(
        "cores of a group that are not spread evenly",
        "cluster.node_groups.0.hardware.num_cores",
        "described-hardware-is-whole",
        (
            "cluster.node_groups=[{label: a, node_ranks: 0,"
            " hardware: {name: x, num_cores: 1, num_numa_nodes: 2, memory_gib: 1}}]",
        ),
    ),
    Wrong(
        "hardware of a group that is not here",
        "cluster.node_groups.0.hardware.name",
        "described-hardware-is-here",
        ("cluster.node_groups=[{label: a, node_ranks: 0, hardware: {name: x, num_cores: 60000, memory_gib: 1}}]",),
    ),
    Wrong(
        "unknown node group",
        "cluster.component_placement",
        "places-exist",
        ("cluster.component_placement={actor:0,rollout:0,env:{node_group:quick,placement:0}}",),
    ),
    Wrong(
        "processes that do not continue",
        "cluster.component_placement",
        "places-exist",
        ("cluster.component_placement={actor:0,rollout:0,env:'0:0,1:3-4'}",),
    ),
    Wrong(
        "simulators counted twice",
        "cluster.component_placement",
        "places-exist",
        ("cluster.component_placement={actor:0,rollout:0,env:'0:0-2'}",),
    ),
    Wrong(
        "fsdp in the process that acts",
        "actor.own_process",
        "parts-have-their-own-processes",
        ("actor.own_process=false", "actor=fsdp"),
    ),
    Wrong(
        "two processes of fsdp on a GPU",
        "cluster.component_placement",
        "parts-have-a-device-a-process",
        ("cluster.component_placement={actor:'0:0-1',rollout:0,env:0}", "actor=fsdp", "cluster=1xh200"),
        more=("cluster.hardware.name",),
    ),
    Wrong(
        "layers cut without fsdp",
        "actor.tensor_parallel_size",
        "layers-can-be-cut",
        ("actor.tensor_parallel_size=2",),
    ),
    Wrong(
        "layers with adapters cut",
        "actor.tensor_parallel_size",
        "layers-can-be-cut",
        (
            "actor.tensor_parallel_size=2",
            "actor=fsdp",
            "model.trainable=lora",
            "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}",
        ),
    ),
    Wrong(
        "processes that do not divide",
        "actor.tensor_parallel_size",
        "layers-can-be-cut",
        ("actor.tensor_parallel_size=2", "actor=fsdp"),
    ),
    Wrong(
        "another model by megatron",
        "actor.training_backend",
        "megatron-can-train",
        ("model.model_type=pi0", *MEGATRON),
    ),
    Wrong(
        "imitation by megatron",
        "actor.training_backend",
        "backend-runs-the-update",
        (
            *("algorithm.loss_type=dagger", "algorithm=dagger", "model.num_action_chunks=1"),
            *("actor.optim.critic_warmup_iterations=0", *MEGATRON),
        ),
    ),
    Wrong(
        "adapters by megatron",
        "actor.training_backend",
        "backend-trains-adapters",
        ("model.trainable=lora", *MEGATRON),
    ),
    Wrong(
        "another optimizer by megatron",
        "actor.optim.fn",
        "megatron-has-its-own-optimizer",
        ("actor.optim.fn=torch.optim:SGD", *MEGATRON),
        more=MEGATRON_MISSING,
    ),
    Wrong(
        "a rate that the schedule replaces",
        "actor.optim.arguments",
        "optimizer-can-be-made",
        ("actor.optim.fn=torch.optim:SGD", "actor.optim.arguments={lr: 100.0}"),
    ),
    Wrong(
        "an optimizer that does not take an argument",
        "actor.optim.arguments",
        "optimizer-can-be-made",
        ("actor.optim.fn=torch.optim:SGD", "actor.optim.arguments={momentun: 0.9}"),
    ),
    Wrong(
        "a teacher of another family by megatron",
        "algorithm.teacher",
        "megatron-has-copies-for-teachers",
        ("algorithm.teacher={tmp}/teacher", "algorithm.kl.coef=0.1", *MEGATRON),
        more=MEGATRON_MISSING,
    ),
    Wrong(
        "heads that can't be shared out",
        "actor.tensor_parallel_size",
        "megatron-cuts-evenly",
        (
            "model.architecture.num_attention_heads=3",
            "model.architecture.hidden_size=96",
            "model.warm_start=null",
            *MEGATRON,
        ),
        more=MEGATRON_MISSING,
    ),
    Wrong(
        "offload from a CPU",
        "actor.fsdp.cpu_offload",
        "offload-needs-a-gpu",
        ("actor.fsdp.cpu_offload=true", "actor=fsdp", "cluster.device=cpu"),
    ),
    Wrong(
        "several controllers without a launcher",
        "cluster.controllers",
        "controllers-are-launched",
        ("cluster.controllers=2", "env.num_processes=2"),
        names="torchrun",
    ),
    Wrong(
        "several controllers that share a rollout",
        "runner.eval_async",
        "controllers-share-a-run",
        ("runner.eval_async=true", "cluster.controllers=2", "env.num_processes=2"),
        more=("cluster.controllers",),
    ),
    Wrong(
        "controllers that move the weights they act with",
        "rollout.enable_offload",
        "controllers-share-a-run",
        ("rollout.enable_offload=true", "actor=fsdp", "cluster.controllers=2", "env.num_processes=2"),
        more=("cluster.controllers",),
    ),
    Wrong(
        "a teacher of the policy's shapes in controllers that share weights",
        "algorithm.teacher",
        "sharded-controllers-share-no-teacher",
        (f"algorithm.teacher={TINY}", "algorithm.kl.coef=0.1", "model=openvla", "actor=fsdp", *CONTROLLERS),
        more=("cluster.controllers",),
    ),
]
