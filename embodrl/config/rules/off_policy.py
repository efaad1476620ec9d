"""Algorithms that learn from a replay buffer: their requirements, and the consistency of their settings."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.base import Context, note, path_kind, rule, value_of
from embodrl.config.schema import OffPolicyConfig
from embodrl.rule_set import Finding
from embodrl.specs import LOSSES, MODELS

SECTION = "algorithm.off_policy"
# Requirements of these algorithms on other sections, with reasons.
NEEDS: tuple[tuple[str, object, str], ...] = (
    ("actor.precision", "fp32", "critics are trained in float32"),
    ("rollout.precision", "fp32", "the actor is trained in float32"),
    ("actor.param_dtype", "fp32", "targets move by less than half precision can represent"),
    ("rollout.backend", "native", "the actor's samples are reparameterised"),
    ("rollout.own_process", None, "rollouts are stored by the main process, which acts"),
    ("rollout.workflow", None, "workflows do not keep the last observation of an episode"),
    ("runner.max_staleness", 0, "rollouts that run ahead are not stored yet"),
    ("algorithm.kl.coef", 0, "the loss has no reference"),
    ("algorithm.filter.enabled", False, "there are no groups to drop"),
    ("algorithm.decoupled.enabled", False, "the loss has no ratios"),
    ("algorithm.recompute_logprobs", "auto", "the loss has no ratios"),
    ("model.freeze_vision", False, "replaying frozen vision features is not supported yet"),
    ("model.trainable", "all", "actor and encoder are trained together"),
)

CRITICS_ONLY = {"actor.precision", "rollout.precision", "actor.param_dtype", "model.freeze_vision", "model.trainable"}
"""Settings that an algorithm that imitates labels does not need."""


@rule("algorithm.adv_type", "algorithm.loss_type")
def estimator_and_loss_agree(context: Context) -> Iterator[Finding]:
    """A loss on a replay buffer uses no advantages, any other does."""
    algorithm = context.config.algorithm
    if context.loss.learns_from_records and not context.estimator.off_policy:
        message = f"loss_type '{algorithm.loss_type}' uses no advantages"
        yield Finding("algorithm.adv_type", message, "set it to none", "none", others=("algorithm.loss_type",))
    if context.estimator.off_policy and not context.loss.learns_from_records:
        message = f"adv_type '{algorithm.adv_type}' gives no advantages, which loss_type '{algorithm.loss_type}' needs"
        able = ", ".join(spec.name for spec in LOSSES.all() if spec.learns_from_records)
        hint = "set algorithm.adv_type=gae, or choose algorithm=sac"
        yield Finding("algorithm.loss_type", message, hint, able, others=("algorithm.adv_type",))


@rule("algorithm.loss_type", "model.model_type", "model.small_actor.kind")
def actor_can_be_differentiated(context: Context) -> Iterator[Finding]:
    """The actor maximises Q through its own actions."""
    family = context.family
    if context.config.model.small_actor.kind is not None:
        return
    if context.loss.off_policy and not context.loss.imitates and family is not None and not family.off_policy:
        able = ", ".join(spec.name for spec in MODELS.all() if spec.off_policy)
        message = f"loss_type '{context.config.algorithm.loss_type}' needs reparameterised actions, which"
        message += f" {family.name} does not have"
        hint = "put a small actor on it: algorithm=residual, or of flow policies dsrl; or choose model=mlp or model=cnn"
        yield Finding("model.model_type", message, hint, able, others=("algorithm.loss_type",))


@rule("algorithm", "actor", "rollout", "model", "runner.max_staleness", "cluster")
def off_policy_has_what_it_needs(context: Context) -> Iterator[Finding]:
    """No setting is used that such an algorithm would have to ignore."""
    if not context.loss.off_policy:
        return
    others = ("algorithm.loss_type",)
    for key, wanted, reason in NEEDS:
        if context.loss.imitates and key in CRITICS_ONLY:
            continue
        if value_of(context.config, key) != wanted:
            shown = "null" if wanted is None else str(wanted).lower()
            yield Finding(key, f"off-policy {reason}", f"set it to {shown}", shown, others=others)
    if context.gathers_in_processes:
        message = "off-policy algorithms roll out and store in the main process"
        hint = "leave the placement of rollout at its default, and cluster.launcher=process"
        yield Finding("cluster.component_placement", message, hint, others=others)


@rule("algorithm.off_policy", "algorithm.loss_type")
def off_policy_numbers_fit(context: Context) -> Iterator[Finding]:
    """The critic subset, the demonstration fraction and the buffer size are consistent."""
    settings = context.config.algorithm.off_policy
    if settings.subset > settings.num_q:
        message = f"a subset of {settings.subset} of {settings.num_q} critics"
        hint = f"set it to at most {settings.num_q}"
        yield Finding(f"{SECTION}.subset", message, hint, f"1 to {settings.num_q}", others=(f"{SECTION}.num_q",))
    if not settings.critic_hidden_sizes:
        yield Finding(f"{SECTION}.critic_hidden_sizes", "critics have no hidden layer", "set it to [256,256]")
    if not context.loss.off_policy:
        return
    fraction = f"{SECTION}.demo_fraction"
    if settings.demo_fraction and settings.demos is None:
        message = f"{settings.demo_fraction:.0%} of each batch are to be demonstrations, but none are named"
        hint = f"set {SECTION}.demos to a directory of `embodrl collect`, or {fraction}=0 (algorithm=sac)"
        yield Finding(f"{SECTION}.demos", message, hint, "a directory", others=(fraction,))
    elif settings.demos is not None and not settings.demo_fraction:
        message = "demonstrations are named, but no batch uses them"
        yield Finding(fraction, message, "set it to 0.5", "above 0, below 1", others=(f"{SECTION}.demos",))
    if settings.demo_fraction == 1:
        message = "nothing would be learned from the policy's own experience"
        yield Finding(fraction, message, "set it to 0.5", "0 to below 1")
    if settings.demos not in (None, *context.made_before) and path_kind(settings.demos) != "directory":
        message = f"no directory '{settings.demos}'"
        yield Finding(f"{SECTION}.demos", message, "make it: embodrl collect collect.output_dir=...", "a directory")


@rule("algorithm.off_policy.critic_reads", "algorithm.loss_type", "model", "env.include_state")
def critics_may_read_the_state_alone(context: Context) -> Iterator[Finding]:
    """Asymmetric critics of SAC belong to an actor that reads pictures, and there is a state."""
    key = f"{SECTION}.critic_reads"
    config, family = context.config, context.family
    if config.algorithm.off_policy.critic_reads == "features" or not context.loss.off_policy or family is None:
        return
    reads = family.uses_images
    if context.loss.name != "sac" or config.model.small_actor.kind is not None:
        message = "critics that read the state belong to SAC and RLPD, without a small actor"
        hint = "set it to features, or choose algorithm=sac or rlpd"
        yield Finding(key, message, hint, "features", others=("algorithm.loss_type", "model.small_actor.kind"))
    elif not (value_of(config, reads) if isinstance(reads, str) else reads):
        message = f"{family.name} reads nothing but the state, as these critics do"
        yield Finding(key, message, "set it to features, or choose model=cnn", "features", others=("model.model_type",))
    elif not config.env.include_state:
        message = "is false, but the critics read the state"
        hint = f"set it to true, or {key}=features"
        yield Finding("env.include_state", message, hint, "true", others=(key,))


@rule("algorithm.off_policy.shift_pixels", "algorithm.loss_type", "model")
def pictures_can_be_shifted(context: Context) -> Iterator[Finding]:
    """Shifts are of pictures in the replay buffer."""
    most = context.config.algorithm.off_policy.shift_pixels
    family = context.family
    if not most or not context.loss.off_policy or context.loss.imitates or family is None:
        return
    key = f"{SECTION}.shift_pixels"
    reads = family.uses_images
    if context.config.model.small_actor.kind is not None:
        message = "the replay buffer has features of the frozen policy, and no pictures"
        yield Finding(key, message, "set it to 0", "0", others=("model.small_actor.kind",))
    elif not (value_of(context.config, reads) if isinstance(reads, str) else reads):
        message = f"{family.name} reads no pictures"
        yield Finding(key, message, "set it to 0, or choose model=cnn", "0", others=("model.model_type",))


@rule("algorithm.bc_coef", "algorithm.off_policy.demos", "algorithm.loss_type")
def imitation_has_demonstrations(context: Context) -> Iterator[Finding]:
    """Demonstrations for an additional imitation loss are named and exist."""
    algorithm = context.config.algorithm
    demos = f"{SECTION}.demos"
    if not algorithm.bc_coef:
        return
    source = algorithm.off_policy.demos
    others = ("algorithm.bc_coef",)
    if context.loss.offline or context.loss.imitates:
        message = f"loss_type '{algorithm.loss_type}' already imitates"
        yield Finding("algorithm.bc_coef", message, "set it to 0", "0", others=("algorithm.loss_type",))
    elif source is None:
        message = "there are no demonstrations to imitate"
        hint = f"set {demos} to a directory of `embodrl collect`, or algorithm.bc_coef=0"
        yield Finding("algorithm.bc_coef", message, hint, "0", others=(demos,))
    elif context.loss.off_policy or source in context.made_before:
        return  # off-policy, they are in a buffer, which has its own rules
    elif path_kind(source) != "directory":
        hint = "make it: embodrl collect collect.output_dir=..."
        yield Finding(demos, f"no directory '{source}'", hint, "a directory", others=others)


@rule("algorithm.off_policy", "env.train", "model.num_action_chunks", "algorithm.rollout_epoch")
def replay_holds_a_rollout(context: Context) -> Iterator[Finding]:
    """The buffer has room for a rollout, with a last observation for each chunk in the worst case."""
    config = context.config
    if not context.loss.off_policy:
        return
    chunks = config.env.train.total_num_envs * config.rollout_chunks * config.algorithm.rollout_epoch
    if config.algorithm.off_policy.capacity < 2 * chunks:
        message = f"a rollout has {chunks} chunks, and with last observations up to {2 * chunks} to store"
        yield Finding(
            f"{SECTION}.capacity",
            message,
            f"set it to {20 * chunks}",
            f"at least {2 * chunks}",
            others=("env.train.total_num_envs", "env.train.max_steps_per_rollout_epoch"),
        )


@rule("algorithm.loss_type", "algorithm.off_policy", "env.train", "model.num_action_chunks")
def expert_labels_what_is_seen(context: Context) -> Iterator[Finding]:
    """DAgger and interventions have an expert, which is queried before every action."""
    config = context.config
    intervenes = config.algorithm.off_policy.interventions and context.loss.takes_interventions
    others = (f"{SECTION}.interventions" if intervenes else "algorithm.loss_type",)
    if not (context.loss.imitates or intervenes):
        return
    if config.model.num_action_chunks != 1:
        message = f"the expert is queried once per policy step, which is a chunk of {config.model.num_action_chunks}"
        yield Finding("model.num_action_chunks", f"{message} actions", "set it to 1", "1", others=others)
    if not config.env.train.auto_reset:
        message = "the expert would label states that no episode reaches any more"
        yield Finding("env.train.auto_reset", message, "set it to true", "true", others=others)
    if context.loss.imitates and config.algorithm.off_policy.demos is not None:
        message = "demonstrations can't be combined with the expert's labels yet"
        hint = "set it to null: with algorithm.dagger.beta=1 the first rollout is the expert's"
        yield Finding(f"{SECTION}.demos", message, hint, "null", others=others)


@rule("algorithm.off_policy", "algorithm.dagger", "algorithm.loss_type", "model.small_actor.kind")
def interventions_are_learned_from(context: Context) -> Iterator[Finding]:
    """Interventions have a gating rule, and serve SAC's critics and actor as demonstrations."""
    algorithm = context.config.algorithm
    key = f"{SECTION}.interventions"
    if not algorithm.off_policy.interventions:
        return
    if not context.loss.takes_interventions:
        message = "interventions are transitions of SAC's critics, in actions"
        hint = "choose algorithm=hil_serl, or set it to false"
        yield Finding(key, message, hint, "false", others=("algorithm.loss_type",))
        return
    if not algorithm.off_policy.demo_fraction:
        message = "the expert's actions would not be sampled: no batch uses demonstrations"
        yield Finding(f"{SECTION}.demo_fraction", message, "set it to 0.5", "above 0, below 1", others=(key,))
    if algorithm.off_policy.intervention_device is None and algorithm.dagger.gate_threshold is None:
        message = "nothing says when the expert takes control"
        hint = "set it to 0.3, or choose algorithm=hil_serl"
        yield Finding("algorithm.dagger.gate_threshold", message, hint, "above 0", others=(key,))


@note("algorithm.off_policy", "algorithm.dagger", "algorithm.loss_type")
def imitation_keys_without_effect(context: Context) -> Iterator[Finding]:
    """Settings of critics without critics, and of an expert that does not act."""
    loss = context.loss
    intervenes = context.config.algorithm.off_policy.interventions
    if not loss.imitates and not intervenes:
        if context.by_user("algorithm.dagger"):
            message = f"has no effect: loss_type '{context.config.algorithm.loss_type}' asks no expert"
            yield Finding("algorithm.dagger", message, "leave it out")
        return
    for name in OffPolicyConfig.model_fields if loss.imitates else ():
        if name not in ("utd", "warm_up", "capacity", "memory_gb", "demos") and context.by_user(f"{SECTION}.{name}"):
            yield Finding(f"{SECTION}.{name}", "has no effect: there are no critics", "leave it out")
