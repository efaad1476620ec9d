"""Wrong machines, node groups and placements."""

from __future__ import annotations

from config_case import Wrong

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
    Wrong("more machines than one", "cluster.num_nodes", "a run is on one so far", ("cluster.num_nodes=2",)),
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
]
