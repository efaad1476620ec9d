"""Wrong machines, node groups and placements."""

from __future__ import annotations

import importlib.util

from config_case import Wrong

from embodrl.config.rules.actor import has_megatron

PLACES = "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}"
MEGATRON = ("actor=megatron", PLACES, "cluster.device=cpu")
MEGATRON_MISSING = () if has_megatron() else ("actor.training_backend",)
RAY_MISSING = () if importlib.util.find_spec("ray") else ("cluster.launcher",)
TWO_ROLLOUTS = "cluster.component_placement={actor:0,rollout:'0:0-1',env:0}"

CLUSTER = [
    Wrong(
        "described hardware that is not here",
        "cluster.hardware.name",
        "but this machine has",
        ("cluster.hardware.name=big", "cluster.hardware.num_cores=60000"),
    ),
    Wrong(
        "GPUs that NUMA nodes can't share",
        "cluster.hardware.num_gpus",
        "7 / 2 NUMA nodes leaves 1",
        ("cluster.hardware.num_gpus=7", "cluster=8xh100"),
        more=("cluster.hardware.name",),
    ),
    Wrong("a run on several machines", "cluster.num_nodes", "knows this machine only", ("cluster.num_nodes=2",)),
    Wrong(
        "several machines and no Ray to join",
        "cluster.ray_address",
        "starts Ray on this machine alone",
        ("cluster.num_nodes=2", "cluster.launcher=ray"),
        more=RAY_MISSING,
    ),
    Wrong(
        "simulators on another machine than their policy",
        "cluster.component_placement",
        "rollout process 1 is on machine 1, and 1 of its 1 simulator process(es) on machine 0",
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
        "a main process that plays for two",
        "rollout.own_process",
        "cluster.component_placement has 2 of them",
        ("rollout.own_process=false", TWO_ROLLOUTS, "cluster.device=cpu"),
    ),
    Wrong(
        "a main process that plays for Ray",
        "rollout.own_process",
        "cluster.launcher is ray",
        ("rollout.own_process=false", "cluster=ray_local"),
        more=RAY_MISSING,
    ),
    Wrong(
        "a main process that trains for Ray",
        "actor.own_process",
        "the main process only says what happens",
        ("actor.own_process=false", "cluster=ray_local"),
        more=RAY_MISSING,
    ),
    Wrong(
        "weights shared between processes",
        "rollout.weight_sync",
        "share no memory with the main process",
        ("rollout.weight_sync=shared", "rollout.own_process=true"),
    ),
    Wrong(
        "weights sent to nobody",
        "rollout.weight_sync",
        "so there is nothing to synchronise",
        ("rollout.weight_sync=disk",),
    ),
    Wrong(
        "weights in the memory of another machine",
        "rollout.weight_sync",
        "there are rollout processes on machine 1",
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
        "has the machines 1-2, and there are 1",
        ("cluster.node_groups=[{label: fast, node_ranks: 1-2}]",),
    ),
    Wrong(
        "node group of a name that is taken",
        "cluster.node_groups.0.label",
        "can't be a label",
        ("cluster.node_groups=[{label: node, node_ranks: 0}]",),
    ),
    Wrong(
        "unknown node group",
        "cluster.component_placement",
        "there is no node group 'quick'",
        ("cluster.component_placement={actor:0,rollout:0,env:{node_group:quick,placement:0}}",),
    ),
    Wrong(
        "processes that do not go on",
        "cluster.component_placement",
        "the next is 1",
        ("cluster.component_placement={actor:0,rollout:0,env:'0:0,1:3-4'}",),
    ),
    Wrong(
        "simulators counted twice",
        "cluster.component_placement",
        "has 3 processes, and env.num_processes is 2",
        ("cluster.component_placement={actor:0,rollout:0,env:'0:0-2'}",),
    ),
    Wrong(
        "fsdp in the process that acts",
        "actor.own_process",
        "which nobody can act with",
        ("actor.own_process=false", "actor=fsdp"),
    ),
    Wrong(
        "two processes of fsdp on a GPU",
        "cluster.component_placement",
        "2 processes of the actor share GPU 0",
        ("cluster.component_placement={actor:'0:0-1',rollout:0,env:0}", "actor=fsdp", "cluster=1xh200"),
        more=("cluster.hardware.name",),
    ),
    Wrong(
        "layers cut without fsdp",
        "actor.tensor_parallel_size",
        "does not cut layers",
        ("actor.tensor_parallel_size=2",),
    ),
    Wrong(
        "layers with adapters cut",
        "actor.tensor_parallel_size",
        "low-rank adapters can't be cut",
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
        "1 actor process(es) / 2 leaves 1",
        ("actor.tensor_parallel_size=2", "actor=fsdp"),
    ),
    Wrong(
        "megatron in the process that acts",
        "actor.own_process",
        "the processes of megatron hold parts",
        ("actor.own_process=false", *MEGATRON),
        more=MEGATRON_MISSING,
    ),
    Wrong(
        "another model by megatron",
        "actor.training_backend",
        "'megatron' trains openvla, and model.model_type is 'pi0'",
        ("model.model_type=pi0", *MEGATRON),
    ),
    Wrong(
        "adapters by megatron",
        "actor.training_backend",
        "'megatron' has no low-rank adapters",
        ("model.trainable=lora", *MEGATRON),
    ),
    Wrong(
        "heads that can't be shared out",
        "actor.tensor_parallel_size",
        "model.architecture.num_attention_heads = 3: 3 / 2 leaves 1",
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
        "in main memory already",
        ("actor.fsdp.cpu_offload=true", "actor=fsdp", "cluster.device=cpu"),
    ),
]
