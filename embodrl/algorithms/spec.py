"""Built-in advantage estimators and losses, and the inputs available to custom ones. Imports no torch.

Shapes of the arguments are in docs/algorithms.md.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from embodrl.config.schema.algorithm import ARGUMENTS
from embodrl.config.schema.section import PositiveFloat, Section
from embodrl.specs import FunctionArguments, FunctionSpec

ESTIMATOR_ARGUMENTS = FunctionArguments(
    names=(
        *("rewards", "values", "valid", "terminated", "truncated", "bootstrap_values", "success", "task_id"),
        *("group_id", *ARGUMENTS["estimator"]),
    ),
    values=("values", "bootstrap_values"),
    groups=("group_id",),
)
LOSS_ARGUMENTS = FunctionArguments(
    names=(
        *("logprobs", "old_logprobs", "ref_logprobs", "prox_logprobs", "behavior_weights", "advantages", "valid"),
        *("entropy", "values", "old_values", "returns", "weights", "solved", "counts", "kl_coef", "kl_estimator"),
        "kl_weights",
        *("errors", "old_errors", *ARGUMENTS["loss"]),
    ),
    values=("values", "old_values", "returns"),
)

GAE = FunctionSpec(
    name="gae",
    target="embodrl.algorithms.advantages:gae",
    description="generalised advantage estimation",
    needs_values=True,
)
GRPO = FunctionSpec(
    name="grpo",
    target="embodrl.algorithms.groups:grpo",
    description="return of the episode less the mean of its group",
    needs_groups=True,
    sums_rewards=True,
    ignores=("gae_lambda",),
)
RLOO = FunctionSpec(
    name="rloo",
    target="embodrl.algorithms.groups:rloo",
    description="return of the episode less the mean of the others of its group",
    needs_groups=True,
    sums_rewards=True,
    ignores=("gae_lambda",),
)
REINFORCE_PP = FunctionSpec(
    name="reinforce_pp",
    target="embodrl.algorithms.groups:reinforce_pp",
    description="discounted rewards-to-go, without a baseline",
    ignores=("gae_lambda",),
)
ZERO = FunctionSpec(
    name="zero",
    target="embodrl.algorithms.advantages:zero",
    description="no advantage of any chunk: the KL to a teacher alone is learned from",
    ignores=("gae_lambda", "gamma"),
)

ACTOR_CRITIC = FunctionSpec(
    name="actor_critic",
    target="embodrl.algorithms.losses:actor_critic_loss",
    description="PPO clip with a value loss",
    needs_values=True,
)
ACTOR = FunctionSpec(
    name="actor", target="embodrl.algorithms.losses:actor_loss", description="PPO clip without a critic"
)
FPO = FunctionSpec(
    name="fpo",
    target="embodrl.algorithms.losses:actor_critic_loss",
    description="PPO clip with a value loss, with ratios of flow-matching losses",
    needs_values=True,
    family_kind="flow",
)
NONE = FunctionSpec(
    name="none",
    target="embodrl.algorithms.advantages:no_advantages",
    description="no advantages: for losses that learn from a replay buffer",
    off_policy=True,
    ignores=("gae_lambda",),
)
SAC = FunctionSpec(
    name="sac",
    target="embodrl.algorithms.off_policy:sac",
    description="soft actor-critic on a replay buffer, with demonstrations (RLPD) or without",
    off_policy=True,
    takes_interventions=True,
)
DAGGER = FunctionSpec(
    name="dagger",
    target="embodrl.algorithms.dagger:dagger",
    description="imitation of an expert's labels of the policy's observations (DAgger, HG-DAgger)",
    off_policy=True,
    imitates=True,
)


class NftConfig(Section):
    """Negative-aware fine-tuning of flow policies."""

    objective: Literal["weighted", "contrastive"] = Field(
        default="contrastive",
        description="contrastive: chunks rank the two mirrored velocities (pi-StepNFT); weighted: their squared errors,"
        " weighted by how good a chunk was (DiffusionNFT)",
    )
    beta: PositiveFloat = Field(default=1.0, description="factor on v - v_old when the velocity v is mirrored at v_old")
    max_advantage: PositiveFloat = Field(default=1.0, description="advantages beyond it count as this")


NFT = FunctionSpec(
    name="nft",
    target="embodrl.algorithms.nft:nft_loss",
    description="negative-aware fine-tuning of flow policies, without likelihoods",
    settings=NftConfig,
    family_kind="flow",
    parameters=(
        *("errors", "old_errors", "logprobs", "old_logprobs", "advantages", "valid", "logprob_type", "weights"),
        *("counts", *NftConfig.model_fields),
    ),
)
