"""A pipeline from outside the package: PPO with a node that shapes the rewards.

PYTHONPATH=examples/custom_pipeline embodrl train --config examples/custom_pipeline/config.yaml
PYTHONPATH=examples/custom_pipeline embodrl pipeline show --config examples/custom_pipeline/config.yaml
"""

from __future__ import annotations

from embodrl import Config, Pipeline, PipelineContext, TrajectoryBatch

NODES = "embodrl.pipelines.nodes"
COST = 0.01
"""Taken off for every action, so that a quick success is worth more than a slow one."""


def shape_rewards(context: PipelineContext, batch: TrajectoryBatch) -> tuple[TrajectoryBatch, dict[str, float]]:
    """Take the cost off every action that was simulated; the batch is this node's own copy, its tensors are shared."""
    batch.rewards = batch.rewards - COST * batch.valid
    return batch, {"reward/cost": COST * float(batch.valid.sum())}


def build(config: Config) -> Pipeline:
    """Return the pipeline; embodrl checks it before anything starts."""
    return (
        Pipeline("shaped")
        .add_node("rollout", f"{NODES}:rollout", role="rollout")
        .add_node("reward", f"{NODES}:reward", deps=("rollout",), role="reward")
        .add_node("shape_rewards", shape_rewards, deps=("reward",))
        .add_node("advantage", f"{NODES}:advantage", deps=("shape_rewards",), role="advantage")
        .add_node("train", f"{NODES}:train", deps=("shape_rewards", "advantage"), role="train")
        .add_node("sync", f"{NODES}:sync", deps=("train",), role="sync")
    )
