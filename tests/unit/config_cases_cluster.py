"""Wrong machines, node groups and placements."""

from __future__ import annotations

import importlib.util

from config_case import Wrong

PLACES = "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}"
MEGATRON = ("actor=megatron", PLACES, "cluster.device=cpu")
MEGATRON_MISSING = () if importlib.util.find_spec("megatron") else ("actor.training_backend",)

CLUSTER = [
    Wrong(
        "described hardware that is not here",
        "cluster.hardware.name",
        "but this machine has",
        ("cluster.hardware.name=big", "cluster.hardware.num_cores=100000"),
    ),
    Wrong(
        "GPUs that NUMA nodes can't share",
        "cluster.hardware.num_gpus",
        "7 / 2 NUMA nodes leaves 1",
        ("cluster.hardware.num_gpus=7", "cluster=8xh100"),
        more=("cluster.hardware.name",),
    ),
    Wrong("a run on several machines", "cluster.num_nodes", "a run is on one so far", ("cluster.num_nodes=2",)),
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
