"""The built-in pipelines, one function each, from a configuration to a graph; the loss determines which one is used.

On-policy algorithms differ in their advantages and losses, which are settings, and share a graph::

    rollout -> (dynamic_sampling) -> reward -> (reference) -> (proximal) -> advantage -> train -> sync
"""

from __future__ import annotations

from embodrl.config.schema import Config
from embodrl.pipelines.graph import Pipeline
from embodrl.specs import PipelineSpec

NODES = "embodrl.pipelines.nodes"


def on_policy(config: Config) -> Pipeline:
    """Learn from each rollout and drop it.

    The nodes that evaluate the actions under other policies follow the rewards, since an episode without a reward is
    invalid and needs no forward pass.
    """
    names = ["rollout", "reward"]
    if config.algorithm.filter.enabled:  # uniform groups are replaced first
        names.insert(1, "dynamic_sampling")
    if config.algorithm.kl.coef > 0:
        names.append("reference")
    if config.needs_proximal:
        names.append("proximal")
    pipeline = _chain("on_policy", *names)
    pipeline.add_node("advantage", f"{NODES}:advantage", (names[-1],), "advantage")
    pipeline.add_node("train", f"{NODES}:train", (names[-1], "advantage"), "train")
    return pipeline.add_node("sync", f"{NODES}:sync", ("train",), "sync")


def off_policy(config: Config) -> Pipeline:
    """Store rollouts in the replay buffer, from which the update draws."""
    return _chain("off_policy", "rollout", "reward", "store", "train", "sync", train="train_off_policy")


def dagger(config: Config) -> Pipeline:
    """Let an expert label the policy's observations, and imitate all labels so far."""
    functions = {"store": "store_labels", "train": "train_off_policy"}
    return _chain("dagger", "rollout", "store", "train", "sync", **functions)


def offline(config: Config) -> Pipeline:
    """Learn from a dataset; no rollouts."""
    return _chain("offline", "train", "sync", train="train_offline")


def _chain(name: str, *nodes: str, **functions: str) -> Pipeline:
    """Return a linear pipeline; functions are called as nodes by default."""
    pipeline = Pipeline(name)
    before: tuple[str, ...] = ()
    for node in nodes:
        pipeline.add_node(node, f"{NODES}:{functions.get(node, node)}", before, node)
        before = (node,)
    return pipeline


ON_POLICY = PipelineSpec(
    name="on_policy", target=on_policy, description="advantages of each rollout: PPO, GRPO and similar"
)
OFF_POLICY = PipelineSpec(
    name="off_policy", target=off_policy, description="a replay buffer and critics: SAC and similar"
)
DAGGER = PipelineSpec(name="dagger", target=dagger, description="an expert labels the policy's observations")
OFFLINE = PipelineSpec(name="offline", target=offline, description="a dataset; no rollouts: IQL, RECAP")
