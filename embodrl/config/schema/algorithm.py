"""The typed configuration of algorithms: section ``algorithm``. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from embodrl.config.schema.section import (
    EPISODES,
    POLICY,
    AppliesIf,
    ArgumentOf,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    ReadBy,
    Section,
)

CRITIC = AppliesIf("loss.needs_values", reason="the loss has no critic")
LOSS = ArgumentOf("loss")
ESTIMATOR = ArgumentOf("estimator")


class SamplingConfig(Section):
    """How actions are drawn."""

    temperature: PositiveFloat = Field(default=0.5, description="of rollout and of the log-probs in training alike")
    top_k: NonNegativeInt = Field(default=0, description="most probable bins kept; 0 keeps all")


class KlConfig(Section):
    """Distance to the policy that the run began with."""

    coef: NonNegativeFloat = Field(
        default=0.0, description="weight; 0 for none, above 0 a copy of the trained weights is kept as the reference"
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="of the KL per token: k1 log ratio, k2 half its square, k3 1/ratio - 1 + log ratio"
    )
    placement: Literal["loss", "reward"] = Field(
        default="loss", description="added to the loss, or taken off the reward of each action"
    )


class FilterConfig(Section):
    """DAPO's dynamic sampling."""

    enabled: bool = Field(
        default=False, description="train only on groups whose success rate is above min_rate and below max_rate"
    )
    min_rate: Fraction = Field(default=0.0, description="groups with this success rate or less are dropped")
    max_rate: Fraction = Field(default=1.0, description="groups with this success rate or more are dropped")
    max_resamples: NonNegativeInt = Field(
        default=2,
        description="further rollouts to replace dropped groups; if that is too few, the batch is smaller",
    )


class BranchConfig(Section):
    """Groups that begin in the midst of an episode."""

    enabled: bool = Field(
        default=False,
        description="the environments of a group continue an episode of the present policy from one state of it, which"
        " is restored exactly; what led there is not trained on",
    )
    max_chunks: PositiveInt | None = Field(
        default=None,
        description="the state is one after 0 to this many chunks, equally likely; null: up to the last chunk of an"
        " episode",
    )


class SrpoConfig(Section):
    """Rewards of failures by their likeness to successes."""

    enabled: bool = Field(
        default=False, description="replace rewards by 1 for a success and less for a failure, by its distance to them"
    )
    encoder: str = Field(
        default="pixels", description="pixels (built in), vjepa2, or a custom module:function, frames to embeddings"
    )
    encoder_path: Annotated[PathText | None, AppliesIf("algorithm.srpo.encoder", ("vjepa2",))] = Field(
        default=None, description="directory with the weights of vjepa2"
    )
    num_frames: PositiveInt = Field(default=64, description="frames of an episode that the encoder sees")
    failure_scale: Fraction = Field(default=0.6, description="rewards of failures stay below it")
    steepness: PositiveFloat = Field(default=10.0, description="of the sigmoid from distance to reward")
    cluster_eps: PositiveFloat = Field(
        default=0.5, description="DBSCAN: distance of neighbours, root mean square over standardised dimensions"
    )
    cluster_min_samples: PositiveInt = Field(default=2, description="DBSCAN: neighbours that make a cluster")
    memory: NonNegativeInt = Field(
        default=64, description="successes of a task kept for rollouts that have none; 0 keeps none"
    )


class DecoupledConfig(Section):
    """Decoupled PPO, for rollouts of older policies."""

    enabled: bool = Field(
        default=False,
        description="clip against the policy at the start of the update (proximal) and weight each term by its"
        " probability over that of the policy that acted",
    )
    prox: Literal["recompute", "loglinear"] = Field(
        default="recompute",
        description="log-probs of the proximal policy: recompute them before the update, or loglinear, between those of"
        " the rollout and the present ones by version",
    )
    cap: float | None = Field(default=5.0, gt=1, description="largest weight; null for none")
    on_exceed: Annotated[Literal["mask", "clamp"], AppliesIf("algorithm.decoupled.cap")] = Field(
        default="mask", description="a weight above the cap becomes 0 (mask) or the cap (clamp)"
    )
    level: Literal["token", "chunk", "episode"] = Field(
        default="token",
        description="a weight for each token, chunk (product over its tokens) or episode (geometric mean); at the level"
        " of logprob_type or coarser",
    )

    @property
    def needs_proximal(self) -> bool:
        """Stale chunks need log-probs under the weights that their update begins with."""
        return self.enabled and self.prox == "recompute"


class OffPolicyConfig(Section):
    """SAC and RLPD: critics, replay buffer, and how much is learned from it."""

    num_q: PositiveInt = Field(default=2, le=100, description="critics")
    subset: PositiveInt = Field(default=2, description="critics, drawn for each update, that give the target")
    target_q: Literal["min", "mean"] = Field(default="min", description="what of these critics is the target")
    actor_q: Literal["min", "mean"] = Field(default="min", description="what of all critics the actor climbs")
    critic_hidden_sizes: tuple[PositiveInt, ...] = Field(default=(256, 256), description="hidden units of a critic")
    layer_norm: bool = Field(default=True, description="LayerNorm before each ReLU of the critics")
    tau: float = Field(default=0.005, gt=0, le=1, description="what targets move towards the critics in an update")
    backup_entropy: bool = Field(default=True, description="the target counts the entropy of later actions")
    alpha: PositiveFloat = Field(default=1.0, description="temperature at the start")
    alpha_lr: PositiveFloat | None = Field(
        default=3e-4, description="learning rate of the temperature, towards target_entropy; null: it stays"
    )
    target_entropy: Annotated[float | None, AppliesIf("algorithm.off_policy.alpha_lr")] = Field(
        default=None, description="of a chunk, in nats; null: target_entropy_per_number times the numbers of a chunk"
    )
    target_entropy_per_number: Annotated[
        float, AppliesIf("algorithm.off_policy.alpha_lr"), AppliesIf("algorithm.off_policy.target_entropy", (None,))
    ] = Field(default=-1.0, description="of each number that the actor chooses, in nats, where target_entropy is null")
    utd: PositiveFloat = Field(default=1.0, le=1000, description="updates of the critics per chunk that was stored")
    policy_delay: PositiveInt = Field(default=1, description="updates of the critics per update of the actor")
    warm_up: NonNegativeInt = Field(default=1000, description="chunks that are stored before the first update")
    critic_warm_up: NonNegativeInt = Field(
        default=0, description="updates of the critics before the first one of the actor"
    )
    n_step: PositiveInt = Field(default=1, le=1000, description="chunks whose rewards a target adds up")
    capacity: PositiveInt = Field(default=1_000_000, description="observations that the replay buffer keeps at most")
    memory_gb: PositiveFloat = Field(
        default=1.0, description="memory that the replay buffer takes at most, which may be fewer than capacity"
    )
    demos: PathText | None = Field(
        default=None, description="directory of demonstrations with rewards, made by `embodrl collect`"
    )
    demo_fraction: Fraction = Field(default=0.0, description="part of each batch that comes from the demonstrations")
    interventions: bool = Field(
        default=False,
        description="who corrects the policy takes control, and its chunks are added to the demonstrations (HIL-SERL)",
    )
    intervention_device: Annotated[str | None, AppliesIf("algorithm.off_policy.interventions")] = Field(
        default=None,
        description="what a person corrects the policy with: keyboard, spacemouse, or a custom module:function; null: a"
        " scripted expert takes control where algorithm.dagger.gate_threshold says so",
    )


class DaggerConfig(Section):
    """DAgger, HG-DAgger and interventions: when an expert acts in the policy's place."""

    beta: Annotated[Fraction, AppliesIf("algorithm.dagger.gate_threshold", (None,))] = Field(
        default=1.0, description="probability that the expert acts, in the first iteration"
    )
    beta_decay: Annotated[Fraction, AppliesIf("algorithm.dagger.gate_threshold", (None,))] = Field(
        default=0.5, description="what the probability is multiplied with per iteration"
    )
    gate_threshold: Annotated[PositiveFloat | None, ReadBy("train", "store")] = Field(
        default=None,
        description="HG-DAgger: the expert acts where the policy's action is further from its own than this (root mean"
        " square over the dimensions), and only then labels; null: it labels everything, and acts as beta says",
    )
    gate_steps: Annotated[PositiveInt, AppliesIf("algorithm.dagger.gate_threshold"), ReadBy("train", "store")] = Field(
        default=5, description="policy steps for which the expert then keeps control"
    )


class AlgorithmConfig(Section):
    """PPO and related algorithms, and their parts."""

    adv_type: str = Field(default="gae", description="a name of `embodrl list algorithms`, or a custom module:function")
    loss_type: str = Field(
        default="actor_critic", description="a name of `embodrl list algorithms`, or a custom module:function"
    )
    reward_type: Annotated[Literal["chunk_level", "action_level"], ESTIMATOR, EPISODES] = Field(
        default="chunk_level", description="chunk_level sums the rewards of a chunk and has one value per chunk"
    )
    logprob_type: Annotated[Literal["token_level", "action_level", "chunk_level"], ArgumentOf("loss", alone=False)] = (
        Field(default="token_level", description="level of the importance ratio")
    )
    length_normalized_ratio: Annotated[
        bool, LOSS, AppliesIf("algorithm.logprob_type", ("action_level", "chunk_level"))
    ] = Field(default=False, description="the ratio of an action or chunk is the geometric mean over its tokens (GSPO)")
    entropy_type: Annotated[
        Literal["token_level", "action_level", "chunk_level"],
        AppliesIf("algorithm.entropy_bonus"),
        ArgumentOf("loss", alone=False),
    ] = Field(default="token_level", description="level of the entropy bonus")
    gamma: Annotated[Fraction, ESTIMATOR, EPISODES] = Field(
        default=0.97, description="discount per reward step (chunk or action)"
    )
    gae_lambda: Annotated[Fraction, ESTIMATOR] = Field(default=0.95, description="lambda of GAE")
    normalize_advantages: bool = Field(default=True, description="to zero mean and unit variance")
    normalization_scope: Annotated[Literal["batch", "group"], AppliesIf("algorithm.normalize_advantages")] = Field(
        default="batch", description="over all steps of the rollout, or over the episodes of each group"
    )
    min_group_std: Annotated[
        NonNegativeFloat,
        AppliesIf("algorithm.normalize_advantages"),
        AppliesIf("algorithm.normalization_scope", ("group",)),
    ] = Field(
        default=0.0,
        description="least standard deviation that normalization_scope=group divides by, in units of the reward",
    )
    bootstrap_type: Annotated[
        Literal["truncation", "none"],
        AppliesIf("estimator.needs_values", reason="the estimator uses no values"),
        ESTIMATOR,
    ] = Field(
        default="truncation",
        description="add gamma * V(last observation) where the step limit, not the task, ended an episode",
    )
    surrogate: Annotated[Literal["ratio", "log_ratio"], LOSS] = Field(
        default="ratio", description="what the advantage multiplies: the clipped ratio (PPO) or its logarithm (CPGD)"
    )
    clip_ratio_low: Annotated[float, LOSS] = Field(default=0.2, gt=0, lt=1, description="lower clip of the ratio")
    clip_ratio_high: Annotated[PositiveFloat, LOSS] = Field(default=0.28, description="upper clip of the ratio")
    clip_ratio_dual: Annotated[PositiveFloat | None, LOSS] = Field(
        default=None, description="with a negative advantage no ratio counts for more than this (dual clip)"
    )
    drift_coef: Annotated[NonNegativeFloat, LOSS] = Field(
        default=0.0, description="weight of the KL from the policy that acted (CPGD's policy drift)"
    )
    kl: Annotated[KlConfig, AppliesIf("algorithm.kl.coef")] = Field(
        default=KlConfig(), description="distance to the policy that the run began with"
    )
    value_clip: Annotated[PositiveFloat | None, CRITIC, LOSS] = Field(
        default=0.2, description="clip of the value change; null for none"
    )
    value_loss_coef: Annotated[NonNegativeFloat, CRITIC, LOSS] = Field(
        default=0.5, description="weight of the value loss"
    )
    huber_delta: Annotated[PositiveFloat | None, CRITIC, LOSS] = Field(
        default=None, description="beyond this error the value loss grows linearly; null for the square everywhere"
    )
    entropy_bonus: Annotated[NonNegativeFloat, LOSS] = Field(default=0.0, description="weight of the entropy")
    loss_agg: Literal["token_mean", "episode_mean", "fixed_length"] = Field(
        default="token_mean",
        description="each ratio counts the same, or each episode, or sums over episodes are divided by the rollout's"
        " length (Dr. GRPO)",
    )
    update_epoch: PositiveInt = Field(default=2, le=10_000, description="passes over a rollout")
    rollout_epoch: PositiveInt = Field(default=1, description="rollouts gathered one after the other for an update")
    group_size: PositiveInt = Field(default=1, description="environments that share an initial state")
    branch: Annotated[BranchConfig, AppliesIf("algorithm.branch.enabled")] = Field(
        default=BranchConfig(), description="groups that begin in the midst of an episode"
    )
    filter: Annotated[FilterConfig, AppliesIf("algorithm.filter.enabled")] = Field(
        default=FilterConfig(), description="dynamic sampling by success rate"
    )
    srpo: Annotated[SrpoConfig, AppliesIf("algorithm.srpo.enabled")] = Field(
        default=SrpoConfig(), description="rewards of failures by their likeness to successes"
    )
    decoupled: Annotated[DecoupledConfig, AppliesIf("algorithm.decoupled.enabled")] = Field(
        default=DecoupledConfig(), description="decoupled PPO, for rollouts of older policies"
    )
    recompute_logprobs: Literal["auto"] | bool = Field(
        default="auto",
        description="take the log-probs of all chunks, which ratios are relative to, from the engine that trains, by a"
        " forward pass before the update; auto: where another engine acts (rollout.backend vllm or remote)",
    )
    engine_weight_cap: float | None = Field(
        default=2.0,
        gt=1,
        description="with recompute_logprobs: each ratio is weighted by its probability in training over that in the"
        " rollout, at most this (truncated importance sampling); null: no weights",
    )
    target_kl: PositiveFloat | None = Field(
        default=None,
        description="end an update once the approximate KL per token to the policy that acted (decoupled: the proximal"
        " one) exceeds this",
    )
    chunk_fraction: PositiveFloat = Field(
        default=1.0,
        le=1,
        description="part of a rollout's chunks that get gradients, those with the largest absolute advantages; the"
        " others cost no forward or backward pass",
    )
    bc_coef: NonNegativeFloat = Field(
        default=0.0,
        description="weight of the imitation loss on demonstrations (behaviour cloning) in the loss of the policy; they"
        " are those of algorithm.off_policy.demos",
    )
    off_policy: OffPolicyConfig = Field(default=OffPolicyConfig(), description="SAC and RLPD")
    dagger: DaggerConfig = Field(default=DaggerConfig(), description="DAgger and HG-DAgger")
    sampling: Annotated[SamplingConfig, POLICY] = Field(default=SamplingConfig(), description="how actions are drawn")

    def arguments_of(self, kind: Literal["loss", "estimator"], needs_values: bool = True) -> dict[str, object]:
        """Return the settings that the function of a kind gets, with those that it brings.

        Args:
            kind: of the function.
            needs_values: there is a critic; without one its settings are left out.
        """
        fields = AlgorithmConfig.model_fields
        names = [name for name in ARGUMENTS[kind] if needs_values or CRITIC not in fields[name].metadata]
        chosen = self.loss_type if kind == "loss" else self.adv_type
        own = getattr(self, chosen, ()) if chosen not in fields else ()
        return {name: getattr(self, name) for name in names} | dict(own)


ARGUMENTS: dict[str, dict[str, ArgumentOf]] = {
    kind: {
        name: mark
        for name, info in AlgorithmConfig.model_fields.items()
        for mark in info.metadata
        if isinstance(mark, ArgumentOf) and mark.kind == kind
    }
    for kind in ("estimator", "loss")
}
"""Kind of functions -> the settings that they get."""
