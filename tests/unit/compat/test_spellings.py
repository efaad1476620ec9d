"""Code in the spelling of siiRL and verl runs as it is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from expect import raises_code

from embodrl.compat.siirl import NodeRole, NodeType, Pipeline
from embodrl.compat.verl import DataProto
from embodrl.config.schema import Config
from embodrl.errors import BatchError, BatchShapeError, PipelineError
from embodrl.pipelines.builtin import on_policy

NODES = "embodrl.pipelines.nodes"


def pipeline() -> Pipeline:
    """GRPO, as siiRL writes it."""
    kind, role = NodeType, NodeRole
    made = Pipeline("grpo_training_pipeline", "GRPO: Group Relative Policy Optimization")
    made.add_node("rollout", func=f"{NODES}:rollout", deps=[], node_type=kind.MODEL_INFERENCE, node_role=role.ROLLOUT)
    made.add_node("reward", func=f"{NODES}:reward", deps=["rollout"], node_type=kind.COMPUTE, node_role=role.REWARD)
    advantage, train = f"{NODES}:advantage", f"{NODES}:train"
    made.add_node("advantage", func=advantage, deps=["reward"], node_type=kind.COMPUTE, node_role=role.ADVANTAGE)
    both = ["reward", "advantage"]
    made.add_node("train", func=train, deps=both, node_type=kind.MODEL_TRAIN, node_role=role.ACTOR)
    return made


def test_a_pipeline_of_siirl_is_the_one_here() -> None:
    assert pipeline().build().nodes == on_policy(Config()).build().nodes


def test_nodes_without_a_counterpart_are_refused() -> None:
    with raises_code("pipeline-node-foreign", PipelineError, "MODEL_TRAIN", "CRITIC"):
        pipeline().add_node(
            "critic", f"{NODES}:train", ["advantage"], node_type=NodeType.MODEL_TRAIN, node_role=NodeRole.CRITIC
        )


def test_an_actor_that_only_computes_forward_does_not_train() -> None:
    made = Pipeline("ppo").add_node(
        "actor_old_log_prob",
        f"{NODES}:proximal",
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.ACTOR,
        only_forward_compute=True,
    )
    assert made.roles == {"actor_old_log_prob": "proximal"}


def test_a_batch_of_verl() -> None:
    batch = DataProto.from_dict(
        tensors={"obs": torch.arange(4.0)}, non_tensors={"task": ["a", "b", "c", "d"]}, meta_info={"temperature": 1.0}
    )
    assert len(batch) == 4 and batch.batch["obs"].shape == (4,) and batch.meta_info == {"temperature": 1.0}
    assert list(batch.non_tensor_batch["task"]) == ["a", "b", "c", "d"]
    assert [part.batch["obs"].tolist() for part in batch.chunk(2)] == [[0, 1], [2, 3]]
    with pytest.raises(BatchShapeError):
        batch.chunk(3)
    assert batch.repeat(2).batch["obs"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch.repeat(2, interleave=False).batch["obs"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    batch.reorder([3, 2, 1, 0])
    assert batch.batch["obs"].tolist() == [3, 2, 1, 0] and list(batch.objects["task"]) == ["d", "c", "b", "a"]
    assert len(DataProto.concat([batch, batch])) == 8
    selected = batch.select(batch_keys=["obs"], non_tensor_batch_keys=[])
    assert selected.names() == ["obs"] and selected.meta_info == {"temperature": 1.0}
    assert batch.select(meta_info_keys=[]).meta_info == {} and len(batch.select().names()) == 2
    popped = batch.pop(batch_keys=["obs"], meta_info_keys=["temperature"])
    assert popped.names() == ["obs"] and popped.meta_info == {"temperature": 1.0}
    assert batch.names() == ["task"] and batch.meta_info == {}


def test_unions_agree() -> None:
    left = DataProto.from_single_dict({"a": torch.ones(2), "task": np.array(["x", "y"], object)}, {"seed": 1})
    right = DataProto.from_single_dict({"a": torch.ones(2), "b": torch.zeros(2)}, {"step": 2})
    both = left.union(right)
    assert both.names() == ["a", "b", "task"] and both.meta == {"seed": 1, "step": 2}
    assert both is left  # as in verl, in place
    for other in (
        DataProto.from_dict({"a": torch.zeros(2)}),
        DataProto.from_dict({"c": torch.ones(2)}, None, {"seed": 3}),
    ):
        with pytest.raises(BatchError):
            left.union(other)
    steps = DataProto.from_dict({"a": torch.zeros(3, 2, 5)}, num_batch_dims=2)
    assert steps.num_steps == 3 and len(steps) == 2
