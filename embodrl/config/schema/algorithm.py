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
    """Sampling of actions."""

    temperature: PositiveFloat = Field(
        default=0.5, description="softmax temperature of rollouts and of log-probs in training"
    )
    top_k: NonNegativeInt = Field(default=0, description="most probable bins kept; 0 keeps all")


class KlConfig(Section):
    """KL to the reference policy: the initial one of the run, or ``algorithm.teacher``."""

    coef: NonNegativeFloat = Field(
        default=0.0,
        description="weight; 0 for none; above 0 the initial weights, or the teacher's, are kept as the reference",
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3",
        description="estimator of the KL per token: k1 log ratio, k2 half its square, k3 1/ratio - 1 + log ratio",
    )
    placement: Literal["loss", "reward"] = Field(
        default="loss", description="added to the loss, or subtracted from the reward of each action"
    )


class PfPpoConfig(Section):
    """PF-PPO: rows of a rollout are drawn again by their rewards."""

    method: Literal["pow", "max_min", "max_random"] | None = Field(
        default=None,
        description="weights of the rows (environments) of a rollout, by the sum of their rewards: pow: its absolute"
        " value to the given power; max_min: the best and the worst alone; max_random: the best four times as much as"
        " others; null: every row trains once",
    )
    power: Annotated[PositiveFloat, AppliesIf("algorithm.pf_ppo.method", ("pow",))] = Field(
        default=2.0, description="exponent of pow"
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
        description="additional rollouts to replace dropped groups; if these are too few, the batch is smaller",
    )


class BranchConfig(Section):
    """Groups that branch within an episode."""

    enabled: bool = Field(
        default=False,
        description="the environments of a group continue an episode of the current policy from one of its states,"
        " which is restored exactly; the steps before that state are not trained on",
    )
    max_chunks: PositiveInt | None = Field(
        default=None,
        description="branch after 0 to this many chunks, uniformly distributed; null: up to the last chunk of an"
        " episode",
    )


class SrpoConfig(Section):
    """SRPO: rewards of failures by their similarity to successes."""

    enabled: bool = Field(
        default=False,
        description="replace rewards by 1 for a success and less for a failure, depending on its distance to successes",
    )
    encoder: str = Field(
        default="pixels",
        description="pixels (built in), vjepa2, or a custom module:function that maps frames to embeddings",
    )
    encoder_path: Annotated[PathText | None, AppliesIf("algorithm.srpo.encoder", ("vjepa2",))] = Field(
        default=None, description="directory of the vjepa2 weights"
    )
    num_frames: PositiveInt = Field(default=64, description="frames of an episode that the encoder sees")
    failure_scale: Fraction = Field(default=0.6, description="upper bound of failures' rewards")
    steepness: PositiveFloat = Field(default=10.0, description="steepness of the sigmoid from distance to reward")
    cluster_eps: PositiveFloat = Field(
        default=0.5, description="DBSCAN: neighbour distance, root mean square over standardised dimensions"
    )
    cluster_min_samples: PositiveInt = Field(default=2, description="DBSCAN: neighbours that form a cluster")
    memory: NonNegativeInt = Field(
        default=64, description="successes per task kept for rollouts without any; 0 keeps none"
    )


class DecoupledConfig(Section):
    """Decoupled PPO, for rollouts of older policies."""

    enabled: bool = Field(
        default=False,
        description="clip against the policy at the start of the update (proximal), and weight each term by its"
        " probability ratio to the behaviour policy",
    )
    prox: Literal["recompute", "loglinear"] = Field(
        default="recompute",
        description="log-probs of the proximal policy: recompute: computed before the update; loglinear: interpolated"
        " by version between the rollout's and the current ones",
    )
    cap: float | None = Field(default=5.0, gt=1, description="maximum weight; null for none")
    min_weight: float | None = Field(
        default=None, gt=0, lt=1, description="minimum weight, which smaller ones become; null for none"
    )
    on_exceed: Annotated[Literal["mask", "clamp"], AppliesIf("algorithm.decoupled.cap")] = Field(
        default="mask", description="a weight above the cap becomes 0 (mask) or the cap (clamp)"
    )
    level: Literal["token", "chunk", "episode"] = Field(
        default="token",
        description="one weight per token, chunk (product over its tokens) or episode (geometric mean); the level of"
        " logprob_type or coarser",
    )

    @property
    def needs_proximal(self) -> bool:
        """Whether stale chunks need log-probs under the weights at the start of their update."""
        return self.enabled and self.prox == "recompute"


class RejectionConfig(Section):
    """Masks the policy loss where the behaviour policy is too far from the policy at the start of the update.

    KL to a reference, entropy bonus and value loss keep all data, as the denominators do.
    """

    metric: Literal["ratio", "k1", "k2", "k3"] | None = Field(
        default=None,
        description="measured from the log-probs of algorithm.decoupled or recompute_logprobs, l = logp_prox - logp_b:"
        " ratio exp(l), or an estimator of the KL to the behaviour policy, k1 -l, k2 l^2 / 2, k3 exp(l) - 1 - l; null"
        " rejects nothing",
    )
    level: Annotated[Literal["token", "chunk", "episode"], AppliesIf("algorithm.rejection.metric")] = Field(
        default="token",
        description="what is measured and rejected: single tokens, or chunks or episodes by the mean over their tokens"
        " (ratio: the geometric mean)",
    )
    lower: Annotated[float | None, AppliesIf("algorithm.rejection.metric")] = Field(
        default=None, description="reject what is below; null for no bound"
    )
    upper: Annotated[float | None, AppliesIf("algorithm.rejection.metric")] = Field(
        default=2.0, description="reject what is above; null for no bound"
    )


class CriticConfig(Section):
    """Critic of on-policy losses."""

    kind: Literal["head", "network"] = Field(
        default="head",
        description="head: an MLP on the policy's features (model.value_head); network: a small network of its own on"
        " pictures (64 x 64), state and task, which shares nothing with the policy",
    )
    hidden_sizes: Annotated[tuple[PositiveInt, ...], AppliesIf("algorithm.critic.kind", ("network",))] = Field(
        default=(256, 256), description="hidden units behind its encoder"
    )
    max_state_dim: Annotated[PositiveInt, AppliesIf("algorithm.critic.kind", ("network",))] = Field(
        default=64, description="numbers of the state that it reads; shorter states are padded with zeros"
    )


class OffPolicyConfig(Section):
    """SAC and RLPD: critics, replay buffer and update ratios."""

    num_q: PositiveInt = Field(default=2, le=100, description="number of critics")
    subset: PositiveInt = Field(default=2, description="critics sampled per update to compute the target")
    target_q: Literal["min", "mean"] = Field(default="min", description="reduction of these critics to the target")
    actor_q: Literal["min", "mean"] = Field(
        default="min", description="reduction of all critics to the actor's objective"
    )
    critic_hidden_sizes: tuple[PositiveInt, ...] = Field(default=(256, 256), description="hidden units of each critic")
    critic_reads: Literal["features", "state"] = Field(
        default="features",
        description="features: what the actor reads, pictures too, with the critics' gradients to the encoder; state:"
        " the whole state alone, also the simulator's part of it, while the actor's loss trains the encoder (asymmetric"
        " actor-critic, Pinto et al. 2017, arXiv 1710.06542)",
    )
    layer_norm: bool = Field(default=True, description="LayerNorm before each ReLU of the critics")
    tau: float = Field(
        default=0.005, gt=0, le=1, description="fraction that target networks move towards the critics per update"
    )
    backup_entropy: bool = Field(default=True, description="include the entropy of later actions in the target")
    alpha: PositiveFloat = Field(default=1.0, description="initial temperature")
    alpha_lr: PositiveFloat | None = Field(
        default=3e-4, description="learning rate of the temperature towards target_entropy; null keeps it constant"
    )
    target_entropy: Annotated[float | None, AppliesIf("algorithm.off_policy.alpha_lr")] = Field(
        default=None,
        description="target entropy of a chunk, in nats; null: target_entropy_per_number times the numbers in a chunk",
    )
    target_entropy_per_number: Annotated[
        float, AppliesIf("algorithm.off_policy.alpha_lr"), AppliesIf("algorithm.off_policy.target_entropy", (None,))
    ] = Field(
        default=-1.0, description="target entropy per number that the actor chooses, in nats, if target_entropy is null"
    )
    utd: PositiveFloat = Field(default=1.0, le=1000, description="critic updates per stored chunk")
    policy_delay: PositiveInt = Field(default=1, description="critic updates per actor update")
    warm_up: NonNegativeInt = Field(default=1000, description="chunks stored before the first update")
    critic_warm_up: NonNegativeInt = Field(default=0, description="critic updates before the first actor update")
    n_step: PositiveInt = Field(default=1, le=1000, description="chunks whose rewards a target sums")
    shift_pixels: NonNegativeInt = Field(
        default=0,
        description="largest random shift of the pictures in a batch, in pixels (DrQ; 4 at 84 pixels); 0: none",
    )
    capacity: PositiveInt = Field(default=1_000_000, description="maximum observations in the replay buffer")
    memory_gb: PositiveFloat = Field(
        default=1.0,
        description="maximum memory of the replay buffer in GB, which may hold fewer observations than capacity",
    )
    demos: PathText | None = Field(
        default=None, description="directory of demonstrations with rewards, made by `embodrl collect`"
    )
    demo_fraction: Fraction = Field(default=0.0, description="fraction of each batch taken from the demonstrations")
    interventions: bool = Field(
        default=False,
        description="a person or expert who corrects the policy takes control, and the chunks are added to the"
        " demonstrations (HIL-SERL)",
    )
    intervention_device: Annotated[str | None, AppliesIf("algorithm.off_policy.interventions")] = Field(
        default=None,
        description="device with which a person corrects the policy: keyboard, spacemouse, browser, or a custom"
        " module:function; null: a scripted expert takes control according to algorithm.dagger.gate_threshold",
    )


class DaggerConfig(Section):
    """DAgger, HG-DAgger and interventions: when an expert acts instead of the policy."""

    beta: Annotated[Fraction, AppliesIf("algorithm.dagger.gate_threshold", (None,))] = Field(
        default=1.0, description="probability that the expert acts in the first iteration"
    )
    beta_decay: Annotated[Fraction, AppliesIf("algorithm.dagger.gate_threshold", (None,))] = Field(
        default=0.5, description="factor applied to this probability at every iteration"
    )
    gate_threshold: Annotated[PositiveFloat | None, ReadBy("train", "store")] = Field(
        default=None,
        description="HG-DAgger: the expert acts where the policy's action differs from its own by more than this"
        " (root mean square over the dimensions), and labels only these steps; null: it labels every step, and acts"
        " according to beta",
    )
    gate_steps: Annotated[PositiveInt, AppliesIf("algorithm.dagger.gate_threshold"), ReadBy("train", "store")] = Field(
        default=5, description="policy steps for which the expert keeps control afterwards"
    )
    expert: PathText | None = Field(
        default=None,
        description="directory of a policy that labels and acts as the expert, for example one that learned by reward"
        " from the simulator's state; null: the simulator's scripted expert",
    )


class TaskAlgorithmConfig(Section):
    """The advantages of one of several tasks."""

    task: str = Field(description="name in env.tasks")
    adv_type: str | None = Field(
        default=None, description="advantage estimator of this task; null: algorithm.adv_type", min_length=1
    )
    gamma: Fraction | None = Field(default=None, description="its discount per reward step; null: algorithm.gamma")
    gae_lambda: Fraction | None = Field(default=None, description="its lambda of GAE; null: algorithm.gae_lambda")
    weight: PositiveFloat = Field(
        default=1.0, description="factor on its advantages, after their normalisation: the weight of its policy loss"
    )
    kl_weight: NonNegativeFloat = Field(
        default=1.0,
        le=1e6,
        description="factor on algorithm.kl.coef; 0 for no KL, as where only other tasks have a teacher",
    )

    def arguments(self) -> dict[str, object]:
        """Return the settings of section ``algorithm`` that it replaces."""
        own = {"adv_type": self.adv_type, "gamma": self.gamma, "gae_lambda": self.gae_lambda}
        return {name: value for name, value in own.items() if value is not None}


class AlgorithmConfig(Section):
    """PPO and related algorithms, and their components."""

    adv_type: str = Field(
        default="gae",
        description="advantage estimator: a name from `embodrl list algorithms`, or a custom module:function",
    )
    by_task: tuple[TaskAlgorithmConfig, ...] = Field(
        default=(),
        description="settings of single tasks, e.g. [{task: PushCube-v1, adv_type: rloo}]; the advantages of each task"
        " of env.tasks are then estimated and normalised by themselves; what is not set is as in algorithm",
    )
    loss_type: str = Field(
        default="actor_critic", description="loss: a name from `embodrl list algorithms`, or a custom module:function"
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
    critic_lambda: Annotated[Fraction | None, CRITIC, ESTIMATOR] = Field(
        default=None, description="lambda of the critic's targets (VAPO: 1); null: that of the advantages"
    )
    lambda_length_alpha: Annotated[PositiveFloat | None, CRITIC, ESTIMATOR] = Field(
        default=None,
        description="lambda of the advantages is 1 - 1 / (alpha * steps of the episode), at least 0 (VAPO); null:"
        " gae_lambda",
    )
    normalize_advantages: bool = Field(default=True, description="normalise advantages to zero mean and unit variance")
    normalization_scope: Annotated[Literal["batch", "group"], AppliesIf("algorithm.normalize_advantages")] = Field(
        default="batch", description="normalise over all steps of the rollout, or over the episodes of each group"
    )
    min_group_std: Annotated[
        NonNegativeFloat,
        AppliesIf("algorithm.normalize_advantages"),
        AppliesIf("algorithm.normalization_scope", ("group",)),
    ] = Field(
        default=0.0,
        description="minimum standard deviation used by normalization_scope=group, in units of the reward",
    )
    bootstrap_type: Annotated[
        Literal["truncation", "none"],
        AppliesIf("estimator.needs_values", reason="the estimator uses no values"),
        ESTIMATOR,
    ] = Field(
        default="truncation",
        description="add gamma * V(last observation) where an episode ended by the step limit, not by the task",
    )
    surrogate: Annotated[Literal["ratio", "log_ratio"], LOSS] = Field(
        default="ratio", description="factor of the advantage: the clipped ratio (PPO) or its logarithm (CPGD)"
    )
    clip_ratio_low: Annotated[float, LOSS] = Field(default=0.2, gt=0, lt=1, description="lower clip of the ratio")
    clip_ratio_high: Annotated[PositiveFloat, LOSS] = Field(default=0.28, description="upper clip of the ratio")
    clip_ratio_dual: Annotated[PositiveFloat | None, LOSS] = Field(
        default=None, description="bound on the ratios of negative advantages (dual clip); null for none"
    )
    drift_coef: Annotated[NonNegativeFloat, LOSS] = Field(
        default=0.0, description="weight of the KL from the behaviour policy (CPGD's policy drift)"
    )
    kl: Annotated[KlConfig, AppliesIf("algorithm.kl.coef")] = Field(
        default=KlConfig(), description="KL to the reference policy"
    )
    teacher: Annotated[PathText | None, AppliesIf("algorithm.kl.coef")] = Field(
        default=None,
        description="directory of a policy that is the reference of algorithm.kl (on-policy distillation), of any size,"
        " and any family with the same inputs and actions; null: the initial policy of the run",
    )
    critic: Annotated[CriticConfig, CRITIC] = Field(default=CriticConfig(), description="critic")
    value_clip: Annotated[PositiveFloat | None, CRITIC, LOSS] = Field(
        default=0.2, description="clip of the value change; null for none"
    )
    value_loss_coef: Annotated[NonNegativeFloat, CRITIC, LOSS] = Field(
        default=0.5, description="weight of the value loss"
    )
    huber_delta: Annotated[PositiveFloat | None, CRITIC, LOSS] = Field(
        default=None, description="error above which the value loss grows linearly (Huber); null: squared error"
    )
    entropy_bonus: Annotated[NonNegativeFloat, LOSS] = Field(default=0.0, description="weight of the entropy bonus")
    positive_coef: Annotated[NonNegativeFloat, LOSS] = Field(
        default=0.0, description="weight of the negative log-likelihood of the actions of solved episodes (VAPO)"
    )
    router_aux_loss_coef: NonNegativeFloat = Field(
        default=0.0,
        description="weight of the load-balancing loss of a mixture of experts (transformers' router_aux_loss_coef,"
        " whose value in config.json is not read: 0.001 in Mixtral's); 0 for none",
    )
    loss_agg: Literal["token_mean", "episode_mean", "fixed_length"] = Field(
        default="token_mean",
        description="token_mean weights all ratios equally, episode_mean all episodes; fixed_length divides sums over"
        " episodes by the rollout's length (Dr. GRPO)",
    )
    update_epoch: PositiveInt = Field(default=2, le=10_000, description="passes over a rollout")
    rollout_epoch: PositiveInt = Field(default=1, description="consecutive rollouts per update")
    group_size: PositiveInt = Field(default=1, description="environments that share an initial state")
    branch: Annotated[BranchConfig, AppliesIf("algorithm.branch.enabled")] = Field(
        default=BranchConfig(), description="groups that branch within an episode"
    )
    filter: Annotated[FilterConfig, AppliesIf("algorithm.filter.enabled")] = Field(
        default=FilterConfig(), description="dynamic sampling by success rate"
    )
    pf_ppo: Annotated[PfPpoConfig, AppliesIf("algorithm.pf_ppo.method")] = Field(
        default=PfPpoConfig(), description="rows drawn again by their rewards"
    )
    srpo: Annotated[SrpoConfig, AppliesIf("algorithm.srpo.enabled")] = Field(
        default=SrpoConfig(), description="rewards of failures by their similarity to successes"
    )
    decoupled: Annotated[DecoupledConfig, AppliesIf("algorithm.decoupled.enabled")] = Field(
        default=DecoupledConfig(), description="decoupled PPO, for rollouts of older policies"
    )
    rejection: Annotated[RejectionConfig, AppliesIf("algorithm.rejection.metric")] = Field(
        default=RejectionConfig(),
        description="masks of the policy loss for old data and data of other engines, beside their weights; KL, entropy"
        " bonus and value loss keep them",
    )
    recompute_logprobs: Literal["auto"] | bool = Field(
        default="auto",
        description="recompute the log-probs of all chunks with the training engine before the update, as the"
        " reference of ratios; auto: if another engine acts (rollout.backend vllm or remote)",
    )
    engine_weight_cap: float | None = Field(
        default=2.0,
        gt=1,
        description="with recompute_logprobs: weight each ratio by its training probability over its rollout"
        " probability, up to this cap (truncated importance sampling); null: no weights",
    )
    target_kl: PositiveFloat | None = Field(
        default=None,
        description="stop an update once the approximate KL per token to the behaviour policy (decoupled: the"
        " proximal one) exceeds this",
    )
    chunk_fraction: PositiveFloat = Field(
        default=1.0,
        le=1,
        description="fraction of a rollout's chunks that get gradients, chosen by the largest absolute advantages;"
        " the others cost no forward or backward pass",
    )
    bc_coef: NonNegativeFloat = Field(
        default=0.0,
        description="weight of the imitation loss (behaviour cloning) in the policy loss; the demonstrations are"
        " those in algorithm.off_policy.demos",
    )
    off_policy: OffPolicyConfig = Field(default=OffPolicyConfig(), description="SAC and RLPD")
    dagger: DaggerConfig = Field(default=DaggerConfig(), description="DAgger and HG-DAgger")
    sampling: Annotated[SamplingConfig, POLICY] = Field(default=SamplingConfig(), description="sampling of actions")

    @property
    def kl_parameters(self) -> tuple[str, ...]:
        """Parameters with which a loss adds the KL to the reference; none if it does not add one."""
        if not self.kl.coef or self.kl.placement != "loss":
            return ()
        weighted = any(each.kl_weight != 1 for each in self.by_task)
        return ("ref_logprobs", "kl_coef", *(("kl_weights",) if weighted else ()))

    def arguments_of(self, kind: Literal["loss", "estimator"], needs_values: bool = True) -> dict[str, object]:
        """Return the settings passed to the loss or estimator; ``needs_values=False`` omits the critic's."""
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
"""Kind of function -> settings passed to it."""
