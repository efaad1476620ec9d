"""Places of the processes that run nodes of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embodrl.deployment.grammar import PlacementError, ProcessPlace, assign, split_group
from embodrl.deployment.solver import Deployment, pools_of

if TYPE_CHECKING:
    from embodrl.config.schema import Config


def node_places(config: Config, name: str, deployment: Deployment) -> list[ProcessPlace]:
    """Return the places of a node in ``pipeline.placement``.

    Args:
        config: run configuration.
        name: name of the node.
        deployment: placement of the run, with its machines.

    Raises:
        PlacementError: there are no such devices, or no such node group.
    """
    label, ranks = split_group(config.pipeline.placement[name])
    pools = pools_of(config.cluster, [min(len(one.gpus), deployment.gpus_per_node) for one in deployment.machines])
    if label not in pools:
        known = ", ".join(filter(None, pools))
        raise PlacementError(f"unknown node group '{label}'", "define it in cluster.node_groups", known)
    return assign(name, ranks, pools[label])
