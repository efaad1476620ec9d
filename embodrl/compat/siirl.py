"""siiRL's spelling of a pipeline (``siirl.execution.dag``); nodes keep embodrl's form, ``fn(context, *outputs)``.

Imports no torch, since pipelines are checked together with the configuration.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Self

from embodrl.errors import PipelineError
from embodrl.pipelines import graph


class NodeType(enum.Enum):
    """What a node does."""

    COMPUTE = "compute"
    MODEL_INFERENCE = "model_inference"
    MODEL_TRAIN = "model_train"
    DATA_LOAD = "data_load"


class NodeRole(enum.Enum):
    """Whose work a node does."""

    DEFAULT = "default"
    ROLLOUT = "rollout"
    DYNAMIC_SAMPLING = "dynamic_sampling"
    REWARD = "reward"
    REFERENCE = "reference"
    ADVANTAGE = "advantage"
    ACTOR = "actor"
    CRITIC = "critic"


_ROLES = {
    (NodeType.MODEL_INFERENCE, NodeRole.ROLLOUT): "rollout",
    (NodeType.MODEL_INFERENCE, NodeRole.REFERENCE): "reference",
    (NodeType.MODEL_INFERENCE, NodeRole.ACTOR): "proximal",
    (NodeType.MODEL_TRAIN, NodeRole.REFERENCE): "reference",
    (NodeType.MODEL_TRAIN, NodeRole.ACTOR): "train",
    (NodeType.COMPUTE, NodeRole.REWARD): "reward",
    (NodeType.COMPUTE, NodeRole.ADVANTAGE): "advantage",
    (NodeType.COMPUTE, NodeRole.DYNAMIC_SAMPLING): "dynamic_sampling",
    (NodeType.COMPUTE, NodeRole.DEFAULT): "compute",
}
"""Type and role of siiRL -> role here."""


class Pipeline(graph.Pipeline):
    """A pipeline whose nodes are added as in siiRL; weights are sent after the node that trains, as there.

    Args:
        pipeline_id: for messages and drawings.
        description: of it, for readers.
    """

    def __init__(self, pipeline_id: str, description: str = "") -> None:
        super().__init__(pipeline_id)
        self.description = description

    def add_node(  # pyright: ignore[reportIncompatibleMethodOverride]  (another spelling is the point)
        self,
        node_id: str,
        func: Callable[..., object] | str,
        deps: Sequence[str] | None = None,
        *,
        node_type: NodeType = NodeType.COMPUTE,
        node_role: NodeRole = NodeRole.DEFAULT,
        only_forward_compute: bool = False,
        retry_limit: int = 0,
    ) -> Self:
        """Add a node; see ``embodrl.Pipeline.add_node``.

        Args:
            node_id: its name.
            func: a function, ``module:function`` or ``module:Class.method``.
            deps: nodes that run before.
            node_type: what it does.
            node_role: whose work it does.
            only_forward_compute: the node of the actor computes log-probs, and does not train.
            retry_limit: further attempts after it has raised.

        Raises:
            PipelineError: the name is taken, or there is no such node here.
        """
        kind = NodeType(node_type)
        if only_forward_compute and kind is NodeType.MODEL_TRAIN:
            kind = NodeType.MODEL_INFERENCE
        role = _ROLES.get((kind, NodeRole(node_role)))
        if role is None:
            raise PipelineError(
                f"node '{node_id}' is of type {kind.name} with role {node_role.name}, which has no counterpart",
                "critics are trained by the node that trains the actor, and data are loaded by the rollout; use one of "
                + ", ".join(f"{kind.name}/{own.name}" for kind, own in _ROLES),
                code="pipeline-node-foreign",
            )
        super().add_node(node_id, func, deps or (), role, retry_limit)
        if role == "train":
            super().add_node("sync", "embodrl.pipelines.nodes:sync", (node_id,), "sync")
        return self
