"""The built-in pipelines, one function each, from a configuration to a graph.

Most algorithms differ in their advantages and losses, which are settings, and share one graph:

    rollout -> reward -> (reference) -> (proximal) -> advantage -> train -> sync
"""

from __future__ import annotations

from embodrl.config.schema import Config
from embodrl.pipelines.graph import Pipeline
from embodrl.specs import PipelineSpec

NODES = "embodrl.pipelines.nodes"


def ppo(config: Config) -> Pipeline:
    """Proximal policy optimisation with a critic."""
    return _learn(_gather(Pipeline("ppo")), config, "rollout")


def grpo(config: Config) -> Pipeline:
    """Group-relative policy optimisation."""
    return _learn(_gather(Pipeline("grpo")), config, "rollout")


def rloo(config: Config) -> Pipeline:
    """REINFORCE with a leave-one-out baseline."""
    return _learn(_gather(Pipeline("rloo")), config, "rollout")


def reinforce_pp(config: Config) -> Pipeline:
    """REINFORCE++."""
    return _learn(_gather(Pipeline("reinforce_pp")), config, "rollout")


def gspo(config: Config) -> Pipeline:
    """Group sequence policy optimisation."""
    return _learn(_gather(Pipeline("gspo")), config, "rollout")


def cpgd(config: Config) -> Pipeline:
    """Clipped policy gradient optimisation with policy drift."""
    return _learn(_gather(Pipeline("cpgd")), config, "rollout")


def dapo(config: Config) -> Pipeline:
    """Decoupled clip and dynamic sampling policy optimisation: uniform groups are replaced before anything else."""
    return _learn(_sample(_gather(Pipeline("dapo"))), config, "dynamic_sampling")


def sac(config: Config) -> Pipeline:
    """Soft actor-critic: what was gathered goes to the replay buffer, from which the update draws."""
    pipeline = _gather(Pipeline("sac")).add_node("reward", f"{NODES}:reward", ("rollout",), "reward")
    pipeline.add_node("store", f"{NODES}:store", ("reward",), "store")
    pipeline.add_node("train", f"{NODES}:train_off_policy", ("store",), "train")
    return pipeline.add_node("sync", f"{NODES}:sync", ("train",), "sync")


def iql(config: Config) -> Pipeline:
    """Implicit Q-learning."""
    return _offline(Pipeline("iql"))


def recap(config: Config) -> Pipeline:
    """Advantage-conditioned imitation."""
    return _offline(Pipeline("recap"))


def dagger(config: Config) -> Pipeline:
    """Dataset aggregation: an expert labels what the policy sees, and the update imitates all labels so far."""
    pipeline = _gather(Pipeline("dagger")).add_node("store", f"{NODES}:store_labels", ("rollout",), "store")
    pipeline.add_node("train", f"{NODES}:train_off_policy", ("store",), "train")
    return pipeline.add_node("sync", f"{NODES}:sync", ("train",), "sync")


def srpo(config: Config) -> Pipeline:
    """Self-referential policy optimisation: its rewards are those of the reward node, its groups may be sampled."""
    pipeline = _gather(Pipeline("srpo"))
    if config.algorithm.filter.enabled:
        return _learn(_sample(pipeline), config, "dynamic_sampling")
    return _learn(pipeline, config, "rollout")


def _gather(pipeline: Pipeline) -> Pipeline:
    return pipeline.add_node("rollout", f"{NODES}:rollout", role="rollout")


def _offline(pipeline: Pipeline) -> Pipeline:
    pipeline.add_node("dataset", f"{NODES}:dataset", role="dataset")
    pipeline.add_node("train", f"{NODES}:train_offline", ("dataset",), "train")
    return pipeline.add_node("sync", f"{NODES}:sync", ("train",), "sync")


def _sample(pipeline: Pipeline) -> Pipeline:
    return pipeline.add_node("dynamic_sampling", f"{NODES}:dynamic_sampling", ("rollout",), "dynamic_sampling")


def _learn(pipeline: Pipeline, config: Config, source: str) -> Pipeline:
    """Add the nodes from the rewards of a batch to the new weights."""
    pipeline.add_node("reward", f"{NODES}:reward", (source,), "reward")
    batch = _add_logprobs(pipeline, config, "reward")
    pipeline.add_node("advantage", f"{NODES}:advantage", (batch,), "advantage")
    pipeline.add_node("train", f"{NODES}:train", (batch, "advantage"), "train")
    return pipeline.add_node("sync", f"{NODES}:sync", ("train",), "sync")


def _add_logprobs(pipeline: Pipeline, config: Config, batch: str) -> str:
    """Add the nodes that evaluate the actions under further policies, one after the other; return the last.

    They follow the rewards, since an episode without a reward is not valid and costs no forward pass.
    """
    if config.algorithm.kl.coef > 0:
        pipeline.add_node("reference", f"{NODES}:reference", (batch,), "reference")
        batch = "reference"
    if config.needs_proximal:
        pipeline.add_node("proximal", f"{NODES}:proximal", (batch,), "proximal")
        batch = "proximal"
    return batch


SRPO = PipelineSpec(
    name="srpo",
    target=srpo,
    description="rewards of failures by their likeness to successes",
    setting=("algorithm.srpo.enabled", True),
)
DAPO = PipelineSpec(
    name="dapo",
    target=dapo,
    description="groups with both successes and failures, from further rollouts",
    setting=("algorithm.filter.enabled", True),
)
CPGD = PipelineSpec(
    name="cpgd",
    target=cpgd,
    description="clipped log ratios and policy drift",
    setting=("algorithm.surrogate", "log_ratio"),
)
GSPO = PipelineSpec(
    name="gspo", target=gspo, description="one ratio per chunk", setting=("algorithm.length_normalized_ratio", True)
)
SAC = PipelineSpec(
    name="sac",
    target=sac,
    description="a replay buffer and critics of its own",
    setting=("algorithm.loss_type", "sac"),
)
IQL = PipelineSpec(
    name="iql",
    target=iql,
    description="a dataset and critics; no rollouts",
    setting=("algorithm.loss_type", "iql"),
)
RECAP = PipelineSpec(
    name="recap",
    target=recap,
    description="a dataset labelled by `embodrl label`; no rollouts",
    setting=("algorithm.loss_type", "recap"),
)
DAGGER = PipelineSpec(
    name="dagger",
    target=dagger,
    description="an expert labels what the policy sees",
    setting=("algorithm.loss_type", "dagger"),
)
PPO = PipelineSpec(name="ppo", target=ppo, description="a critic and GAE", setting=("algorithm.adv_type", "gae"))
GRPO = PipelineSpec(
    name="grpo", target=grpo, description="returns compared within groups", setting=("algorithm.adv_type", "grpo")
)
RLOO = PipelineSpec(
    name="rloo",
    target=rloo,
    description="returns less the mean of the others of the group",
    setting=("algorithm.adv_type", "rloo"),
)
REINFORCE_PP = PipelineSpec(
    name="reinforce_pp",
    target=reinforce_pp,
    description="rewards to come, without a baseline",
    setting=("algorithm.adv_type", "reinforce_pp"),
)
