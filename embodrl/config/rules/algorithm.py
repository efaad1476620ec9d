"""PPO and related algorithms: estimators, levels, critic, groups, clipping, batches, schedule."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.other_systems import advice
from embodrl.config.rules.base import Context, divisors, note, rule
from embodrl.config.schema import AlgorithmConfig, OffPolicyConfig
from embodrl.config.schema.algorithm import ARGUMENTS
from embodrl.errors import EmbodrlError
from embodrl.names import is_misspelt, nearest
from embodrl.rule_set import Finding
from embodrl.specs import ADVANTAGES, LOSSES, MODELS, FunctionRegistry

USER_FUNCTIONS = "docs/algorithms.md"
PARTS = (("adv_type", ADVANTAGES), ("loss_type", LOSSES))


@rule("algorithm.adv_type", "algorithm.loss_type")
def parts_are_registered(context: Context) -> Iterator[Finding]:
    """Estimator and loss have registered names, or are custom functions with available parameters."""
    for key, table in PARTS:
        yield from unregistered(f"algorithm.{key}", getattr(context.config.algorithm, key), table)


def unregistered(key: str, name: str, table: FunctionRegistry) -> Iterator[Finding]:
    """Yield a finding unless a key names a registered function, or a custom one with available parameters."""
    if ":" in name and name not in table.names():
        try:
            table.entry(name)
        except EmbodrlError as error:
            yield Finding(key, error.message, error.hint or f"see {USER_FUNCTIONS}")
    elif name not in table:
        near = nearest(name, table.names())
        hint = f"write {key}={near}" if is_misspelt(name, near) else "see `embodrl list algorithms`"
        near, hint = advice(key, name) or (near, hint)
        yield Finding(key, f"there is no {table.kind} '{name}'", hint, ", ".join(table), near)


@rule("algorithm.adv_type", "algorithm.loss_type", "model.add_value_head")
def critic_is_complete(context: Context) -> Iterator[Finding]:
    """Values are predicted, trained and used, or none of these."""
    algorithm = context.config.algorithm
    if algorithm.adv_type not in ADVANTAGES or algorithm.loss_type not in LOSSES:
        return
    if context.estimator.off_policy != context.loss.learns_from_records:
        return  # a separate rule reports it
    adv = context.estimator.needs_values
    loss = context.loss.needs_values
    both = ("algorithm.adv_type", "algorithm.loss_type")
    if adv and not loss:
        message = (
            f"adv_type '{algorithm.adv_type}' needs values, but loss_type '{algorithm.loss_type}' never trains them"
        )
        hint = "set algorithm.loss_type=actor_critic"
        fitting = ", ".join(spec.name for spec in LOSSES.all() if spec.needs_values)
        yield Finding("algorithm.loss_type", message, hint, fitting, others=("algorithm.adv_type",))
    if loss and not adv:
        message = (
            f"loss_type '{algorithm.loss_type}' trains values, but adv_type '{algorithm.adv_type}' never uses them"
        )
        yield Finding("algorithm.loss_type", message, "set algorithm.loss_type=actor", others=("algorithm.adv_type",))
    can_have_one = context.family is None or context.family.value_head
    if (adv or loss) and not context.config.model.add_value_head and can_have_one:
        message = f"adv_type '{algorithm.adv_type}' with loss_type '{algorithm.loss_type}' needs a value head"
        yield Finding("model.add_value_head", message, "set model.add_value_head=true", "true", others=both)
    if not (adv or loss) and context.config.model.add_value_head:
        message = f"adv_type '{algorithm.adv_type}' and loss_type '{algorithm.loss_type}' do not train a value head"
        yield Finding("model.add_value_head", message, "set model.add_value_head=false", "false", others=both)


@rule("algorithm.adv_type", "algorithm.loss_type", "algorithm.value_loss_coef", "actor.optim.critic_warmup_iterations")
def critic_learns(context: Context) -> Iterator[Finding]:
    """A critic has a loss; without a critic there is nothing to warm up."""
    algorithm = context.config.algorithm
    warm_up = context.config.actor.optim.critic_warmup_iterations
    if algorithm.loss_type not in LOSSES:
        return
    if context.loss.needs_values:
        if algorithm.value_loss_coef == 0:
            message = "a weight of 0 leaves the value head, and with it the advantages, untrained"
            yield Finding(
                "algorithm.value_loss_coef", message, "set it to 0.5", "above 0", others=("algorithm.loss_type",)
            )
    elif warm_up:
        message = (
            f"{warm_up} iterations would train only the value head, and loss_type '{algorithm.loss_type}' has none"
        )
        hint = "set actor.optim.critic_warmup_iterations=0"
        yield Finding("actor.optim.critic_warmup_iterations", message, hint, "0", others=("algorithm.loss_type",))


@rule("algorithm.router_aux_loss_coef", "algorithm.loss_type", "model")
def routers_can_be_balanced(context: Context) -> Iterator[Finding]:
    """The load-balancing loss is of a mixture of experts that learns from rollouts."""
    key, family = "algorithm.router_aux_loss_coef", context.family
    if not context.config.algorithm.router_aux_loss_coef or family is None:
        return
    if context.loss.learns_from_records:
        message = f"has no effect: loss_type '{context.config.algorithm.loss_type}' does not read it"
        yield Finding(key, message, "set it to 0", "0", others=("algorithm.loss_type",))
    elif family.experts is None or family.experts(context.config.model) == 0:
        message = f"has no effect: this {family.name} is no mixture of experts, and has no router"
        yield Finding(key, message, "set it to 0", "0", others=("model.model_type",))


@rule("algorithm.critic.kind", "rollout.backend", "actor.training_backend")
def critic_network_has_its_engines(context: Context) -> Iterator[Finding]:
    """A critic of its own acts and trains where the policy's own modules do."""
    config = context.config
    if config.algorithm.critic.kind != "network" or not context.loss.needs_values:
        return
    others = ("algorithm.critic.kind",)
    for key, found, able in (
        ("rollout.backend", config.rollout.backend, ("native",)),
        ("actor.training_backend", config.actor.training_backend, ("native", "fsdp")),
    ):
        if found not in able:
            message = f"{found} has no critic that is a network of its own"
            yield Finding(key, message, "set algorithm.critic.kind=head", ", ".join(able), others=others)


@rule("algorithm.reward_type", "model.value_head.output", "model.add_value_head")
def values_match_rewards(context: Context) -> Iterator[Finding]:
    """There is one value per reward."""
    config = context.config
    wanted = {"chunk_level": "chunk", "action_level": "action"}[config.algorithm.reward_type]
    if config.model.add_value_head and config.model.value_head.output != wanted:
        yield Finding(
            "model.value_head.output",
            f"reward_type '{config.algorithm.reward_type}' needs one value an {wanted}"
            if wanted == "action"
            else f"reward_type '{config.algorithm.reward_type}' needs one value a {wanted}",
            f"set model.value_head.output={wanted}, or change algorithm.reward_type",
            wanted,
            others=("algorithm.reward_type",),
        )


@rule("algorithm.reward_type", "algorithm.logprob_type", "algorithm.entropy_type", "model.num_action_chunks")
def levels_fit(context: Context) -> Iterator[Finding]:
    """Ratios are at most as coarse as the advantages that they multiply."""
    algorithm = context.config.algorithm
    if algorithm.reward_type != "action_level" or context.config.model.num_action_chunks == 1:
        return
    for key, value in (("logprob_type", algorithm.logprob_type), ("entropy_type", algorithm.entropy_type)):
        if value == "chunk_level":
            yield Finding(
                f"algorithm.{key}",
                "with reward_type 'action_level' each action has its own advantage; one number per chunk can't match",
                f"set algorithm.{key}=action_level, or algorithm.reward_type=chunk_level",
                "token_level, action_level",
                others=("algorithm.reward_type",),
            )


@rule("algorithm.adv_type", "algorithm.by_task", "algorithm.group_size")
def groups_for_group_estimators(context: Context) -> Iterator[Finding]:
    """Estimators that compare the episodes of a group need groups."""
    grouped = context.grouped_by
    if grouped and context.config.algorithm.group_size < 2:
        name = context.estimators[grouped].name
        message = f"adv_type '{name}' compares the episodes of a group; a group of 1 can't be compared"
        yield Finding("algorithm.group_size", message, "set it to 8", "at least 2", others=(grouped,))


@rule("algorithm.pf_ppo", "algorithm.adv_type", "algorithm.by_task", "algorithm.loss_type")
def rows_are_drawn_for_ppo(context: Context) -> Iterator[Finding]:
    """Rows drawn by their rewards are no groups any more, and records are drawn by other means."""
    algorithm = context.config.algorithm
    if algorithm.pf_ppo.method is None:
        return
    if context.loss.learns_from_records:
        message = f"loss_type '{algorithm.loss_type}' does not train on a rollout"
        yield Finding("algorithm.pf_ppo.method", message, "set it to null", "null", others=("algorithm.loss_type",))
    elif grouped := context.grouped_by:
        name = context.estimators[grouped].name
        message = f"adv_type '{name}' balances the episodes of a group, which drawing would undo"
        hint = "set algorithm.pf_ppo.method=null, or choose algorithm=ppo"
        yield Finding("algorithm.pf_ppo.method", message, hint, "null", others=(grouped,))


@rule("algorithm.normalize_advantages", "algorithm.normalization_scope", "algorithm.group_size")
def groups_for_normalization(context: Context) -> Iterator[Finding]:
    """Normalisation within groups needs groups."""
    algorithm = context.config.algorithm
    if algorithm.normalize_advantages and algorithm.normalization_scope == "group" and algorithm.group_size < 2:
        message = "the episodes of a group would be normalised together, and a group of 1 always gives 0"
        hint = "set algorithm.group_size=8, or algorithm.normalization_scope=batch"
        yield Finding("algorithm.group_size", message, hint, "at least 2", others=("algorithm.normalization_scope",))


@rule("algorithm.filter", "algorithm.group_size")
def filter_keeps_something(context: Context) -> Iterator[Finding]:
    """The success-rate filter has groups, and a range that their success rates can fall into."""
    algorithm = context.config.algorithm
    selection = algorithm.filter
    size = algorithm.group_size
    if not selection.enabled:
        return
    if size < 2:
        message = "a group of 1 succeeds always or never, and the filter would drop either"
        yield Finding(
            "algorithm.group_size", message, "set it to 8", "at least 2", others=("algorithm.filter.enabled",)
        )
    elif not any(selection.min_rate < n / size < selection.max_rate for n in range(size + 1)):
        message = f"no success rate of {size} episodes is above {selection.min_rate:g} and below {selection.max_rate:g}"
        yield Finding(
            "algorithm.filter.max_rate",
            message,
            "set algorithm.filter.min_rate=0 and max_rate=1",
            others=("algorithm.filter.min_rate", "algorithm.group_size"),
        )


BRANCH = "algorithm.branch.enabled"


@rule(
    *("algorithm.branch", "algorithm.adv_type", "algorithm.by_task"),
    *("rollout.streaming", "rollout.workflow", "env.env_type"),
)
def branches_can_be_compared(context: Context) -> Iterator[Finding]:
    """Branching episodes are compared within their groups, in lockstep, from exactly restorable states."""
    config = context.config
    if not config.algorithm.branch.enabled:
        return
    for key, spec in context.estimators.items():
        if not spec.needs_groups:
            message = f"adv_type '{spec.name}' does not compare the episodes that continue from one state"
            able = ", ".join(name for name in ADVANTAGES if ADVANTAGES.entry(name).needs_groups)
            yield Finding(key, message, "set it to rloo, as algorithm=branch does", able, others=(BRANCH,))
    if config.rollout.streaming:
        message = "begins the episodes of each group at a reset"
        yield Finding("rollout.streaming", message, "set it to false", "false", others=(BRANCH,))
    if config.rollout.workflow is not None:
        message = "a workflow begins episodes itself, at resets"
        yield Finding("rollout.workflow", message, "leave it out", "null", others=(BRANCH,))
    batched = None if context.simulator is None else context.simulator.batched_by
    if batched is not None and getattr(config.env, batched[0]) == batched[1]:
        message = f"'{batched[1]}' simulates all environments at once, and has no per-environment state"
        yield Finding(f"env.{batched[0]}", message, "choose another value", f"not {batched[1]}", others=(BRANCH,))


@rule("algorithm.branch", "env.max_episode_steps", "model.num_action_chunks")
def branches_begin_within_episodes(context: Context) -> Iterator[Finding]:
    """A state within an episode has a chunk before it and one after it."""
    config = context.config
    keys = ("env.max_episode_steps", "model.num_action_chunks")
    if not config.algorithm.branch.enabled:
        return
    steps = config.env.max_episode_steps
    chunk = config.model.num_action_chunks
    chunks = -(-steps // chunk)
    if chunks == 1:
        message = f"an episode of {steps} steps is one chunk of {chunk}, so it has no inner state to branch from"
        hint = f"set it to at most {steps - 1}, or choose algorithm=rloo"
        yield Finding(keys[1], message, hint, f"below {steps}", others=(keys[0], BRANCH))
    elif config.branch_chunks >= chunks:
        message = f"{steps} steps in chunks of {chunk} are {chunks} chunks: after {config.branch_chunks} none is left"
        hint = f"set it to at most {chunks - 1}, or leave it out"
        yield Finding("algorithm.branch.max_chunks", message, hint, f"1 to {chunks - 1}, null", others=keys)


@rule("algorithm.clip_ratio_dual", "algorithm.clip_ratio_high")
def dual_clip_is_the_outer_one(context: Context) -> Iterator[Finding]:
    """The dual clip lies beyond the upper clip of the ratio."""
    algorithm = context.config.algorithm
    dual = algorithm.clip_ratio_dual
    upper = 1 + algorithm.clip_ratio_high
    if dual is not None and dual <= upper:
        message = f"ratios up to 1 + clip_ratio_high = {upper:g} are within the range, and {dual:g} would cut into it"
        yield Finding(
            "algorithm.clip_ratio_dual",
            message,
            "set it to 3",
            f"above {upper:g}",
            others=("algorithm.clip_ratio_high",),
        )


@rule("algorithm.decoupled", "algorithm.logprob_type")
def decoupled_level_fits(context: Context) -> Iterator[Finding]:
    """The behaviour weight is not finer than the ratio, and is available where it is needed."""
    algorithm = context.config.algorithm
    decoupled = algorithm.decoupled
    if not decoupled.enabled:
        return
    if decoupled.level == "token" and algorithm.logprob_type != "token_level":
        yield Finding(
            "algorithm.decoupled.level",
            f"a weight per token can't be multiplied with a ratio of logprob_type '{algorithm.logprob_type}'",
            "set algorithm.decoupled.level=chunk, or algorithm.logprob_type=token_level",
            "chunk, episode",
            others=("algorithm.logprob_type", "algorithm.decoupled.enabled"),
        )
    if decoupled.level == "episode" and decoupled.prox == "loglinear":
        yield Finding(
            "algorithm.decoupled.prox",
            "loglinear uses the current log-probs of a minibatch, which does not have all chunks of an episode",
            "set algorithm.decoupled.prox=recompute, or algorithm.decoupled.level=chunk",
            "recompute",
            others=("algorithm.decoupled.level",),
        )


@rule("algorithm.rejection", "algorithm.decoupled", "algorithm.recompute_logprobs", "algorithm.logprob_type", "rollout")
def rejection_fits(context: Context) -> Iterator[Finding]:
    """What is rejected can be measured, and is not finer than the ratio."""
    algorithm = context.config.algorithm
    rejection = algorithm.rejection
    if rejection.metric is None:
        return
    key = "algorithm.rejection"
    if not algorithm.decoupled.enabled and not context.config.recomputes_logprobs:
        message = "measures by the log-probs at the start of an update, which are not computed"
        hint = "set algorithm.decoupled.enabled=true, or algorithm.recompute_logprobs=true"
        yield Finding(f"{key}.metric", message, hint, "null", others=("algorithm.recompute_logprobs",))
    lower, upper = rejection.lower, rejection.upper
    if upper is None and lower is not None and lower <= 0 and rejection.metric != "k1":
        message = f"rejects nothing: '{rejection.metric}' is never below 0"
        yield Finding(f"{key}.lower", message, "raise it, or set algorithm.rejection.upper", "above 0")
    elif lower is None and upper is None:
        yield Finding(f"{key}.upper", "rejects nothing: both bounds are null", "set it, or algorithm.rejection.lower")
    elif lower is not None and upper is not None and lower >= upper:
        others = (f"{key}.upper",)
        yield Finding(f"{key}.lower", f"rejects everything: it is not below {upper:g}", "lower it", others=others)
    elif upper is not None and upper <= 0 and rejection.metric != "k1":
        message = f"rejects everything: '{rejection.metric}' is never below 0"
        yield Finding(f"{key}.upper", message, "raise it", "above 0", others=(f"{key}.metric",))
    if algorithm.adv_type == "zero":
        message = "masks the policy loss, which adv_type 'zero' leaves out"
        yield Finding(f"{key}.metric", message, "leave one of them out", "null", others=("algorithm.adv_type",))
    if rejection.level == "token" and algorithm.logprob_type != "token_level":
        message = f"tokens can't be taken from a ratio of logprob_type '{algorithm.logprob_type}'"
        others = ("algorithm.logprob_type", f"{key}.metric")
        yield Finding(f"{key}.level", message, "set it to chunk", "chunk, episode", others=others)
    if rejection.level == "episode" and algorithm.decoupled.enabled and algorithm.decoupled.prox == "loglinear":
        message = "a minibatch of loglinear log-probs does not have all chunks of an episode"
        hint = "set it to chunk, or algorithm.decoupled.prox=recompute"
        yield Finding(f"{key}.level", message, hint, "token, chunk", others=("algorithm.decoupled.prox",))


def _not_taken_by_the_loss(context: Context, *names: str) -> list[str]:
    """Return the given names that a user's loss has no parameters for."""
    taken = context.loss.parameters
    return [] if taken is None else [name for name in names if name not in taken]


@rule("algorithm.decoupled", "algorithm.recompute_logprobs", "algorithm.loss_type", "rollout.backend")
def decoupled_reaches_the_loss(context: Context) -> Iterator[Finding]:
    """A user's loss applies the behaviour weights."""
    algorithm = context.config.algorithm
    missing = _not_taken_by_the_loss(context, "prox_logprobs", "behavior_weights")
    if algorithm.decoupled.enabled and missing:
        yield Finding(
            "algorithm.loss_type",
            f"algorithm.decoupled is enabled, and the loss has no parameter {' or '.join(missing)} to apply it with",
            f"name both in its signature (see {USER_FUNCTIONS}), or set algorithm.decoupled.enabled=false",
            others=("algorithm.decoupled.enabled",),
        )
    elif context.config.recomputes_logprobs and missing:
        yield Finding(
            "algorithm.loss_type",
            f"log-probs are recomputed, and the loss has no parameter {' or '.join(missing)} to use them with",
            f"name both in its signature (see {USER_FUNCTIONS}), or set algorithm.recompute_logprobs=false",
            others=("algorithm.recompute_logprobs", "rollout.backend"),
        )


@rule("algorithm.recompute_logprobs", "algorithm.decoupled", "rollout.backend")
def recomputed_is_not_interpolated(context: Context) -> Iterator[Finding]:
    """Log-probs of the proximal policy come from one source."""
    decoupled = context.config.algorithm.decoupled
    if context.config.recomputes_logprobs and decoupled.enabled and decoupled.prox == "loglinear":
        message = "log-probs are recomputed by the engine that trains, and loglinear interpolates instead"
        hint = "set algorithm.decoupled.prox=recompute, or algorithm.recompute_logprobs=false"
        others = ("algorithm.recompute_logprobs", "rollout.backend")
        yield Finding("algorithm.decoupled.prox", message, hint, "recompute", others=others)


@note("algorithm.recompute_logprobs", "rollout.backend")
def engines_disagree(context: Context) -> Iterator[Finding]:
    """Ratios between two engines do not start at 1."""
    backend = context.config.rollout.backend
    if backend != "native" and not context.config.recomputes_logprobs:
        message = f"is false: ratios are relative to log-probs of {backend}, and are not 1 before the first step"
        yield Finding("algorithm.recompute_logprobs", message, "leave it out, and watch train/logprob_mismatch")


@rule("algorithm.kl", "algorithm.by_task", "algorithm.loss_type")
def kl_reaches_the_loss(context: Context) -> Iterator[Finding]:
    """A user's loss adds the KL to the reference policy."""
    algorithm = context.config.algorithm
    kl = algorithm.kl
    weighted = "kl_weights" in algorithm.kl_parameters
    if missing := _not_taken_by_the_loss(context, *algorithm.kl_parameters):
        yield Finding(
            "algorithm.loss_type",
            f"algorithm.kl.coef is {kl.coef:g}, and the loss has no parameter {' or '.join(missing)} to add a KL with",
            f"name all in its signature (see {USER_FUNCTIONS}), or set algorithm.kl.placement=reward or kl.coef=0"
            f"{', without kl_weight' if weighted else ''}",
            others=("algorithm.kl.coef", "algorithm.kl.placement", *(("algorithm.by_task",) if weighted else ())),
        )


@rule("algorithm.loss_type", "model.model_type")
def loss_fits_the_family(context: Context) -> Iterator[Finding]:
    """A loss that reads family-specific outputs, e.g. velocities, is used with that family."""
    family = context.family
    kind = context.loss.family_kind
    if kind and family is not None and family.kind != kind:
        message = f"loss_type '{context.config.algorithm.loss_type}' needs a {kind} policy, and {family.name} is none"
        able = ", ".join(spec.name for spec in MODELS.all() if spec.kind == kind)
        hint = f"choose algorithm=ppo or grpo, or a {kind} policy"
        yield Finding("model.model_type", message, hint, able, others=("algorithm.loss_type",))


@rule("algorithm.sampling")
def sampling_explores(context: Context) -> Iterator[Finding]:
    """A policy that always takes the most probable action has no gradient."""
    if context.config.algorithm.sampling.top_k == 1:
        message = "the one bin kept has probability 1, so there is nothing to explore and no gradient"
        yield Finding("algorithm.sampling.top_k", message, "set it to 0, which keeps all", "0, or 2 and above")


@rule("env.train", "model.num_action_chunks", "algorithm.rollout_epoch", "algorithm.filter", "actor.global_batch_size")
def batches_fill_rollouts(context: Context) -> Iterator[Finding]:
    """A rollout is a whole number of optimizer steps."""
    config = context.config
    train = config.env.train
    batch = config.actor.global_batch_size
    if not train.auto_reset or config.algorithm.filter.enabled or context.loss.learns_from_records:
        return  # the number of chunks is known only after the rollout; batches are made as even as possible
    chunks = config.rollout_chunks
    total = train.total_num_envs * chunks * config.algorithm.rollout_epoch
    if total % batch:
        yield Finding(
            "actor.global_batch_size",
            f"a rollout has {train.total_num_envs} environments x {chunks} chunks x {config.algorithm.rollout_epoch}"
            f" epochs = {total} chunks, and {total} / {batch} leaves {total % batch}",
            f"set it to {divisors(total, batch)}, or change env.train.total_num_envs or max_steps_per_rollout_epoch",
            f"a divisor of {total}",
            others=(
                "env.train.total_num_envs",
                "env.train.max_steps_per_rollout_epoch",
                "model.num_action_chunks",
                "algorithm.rollout_epoch",
            ),
        )


@rule("actor.global_batch_size", "actor.micro_batch_size")
def micro_batches_fill_batches(context: Context) -> Iterator[Finding]:
    """An optimizer step is a whole number of micro-batches."""
    actor = context.config.actor
    rest = actor.global_batch_size % actor.micro_batch_size
    if rest:
        yield Finding(
            "actor.micro_batch_size",
            f"actor.global_batch_size = {actor.global_batch_size} is not a multiple of {actor.micro_batch_size}:"
            f" {actor.global_batch_size} / {actor.micro_batch_size} leaves {rest}",
            f"set it to {divisors(actor.global_batch_size, actor.micro_batch_size)}",
            f"a divisor of {actor.global_batch_size}",
            others=("actor.global_batch_size",),
        )


@rule("actor.precision", "rollout.precision")
def precisions_agree(context: Context) -> Iterator[Finding]:
    """Rollout and training compute log-probs in the same precision."""
    actor = context.config.actor.precision
    rollout = context.config.rollout.precision
    if actor != rollout:
        message = f"rollouts in '{rollout}' and training in '{actor}' disagree about log-probs, so no ratio starts at 1"
        hint = f"set rollout.precision={actor}, or both to auto"
        yield Finding("rollout.precision", message, hint, actor, others=("actor.precision",))


WARM_UPS = ("actor.optim.critic_warmup_iterations", "actor.optim.lr_warmup_iterations")


def warm_up_findings(context: Context) -> Iterator[Finding]:
    """Yield the problems of the warm-up lengths."""
    optim = context.config.actor.optim
    iterations = context.config.runner.max_iterations
    critic = optim.critic_warmup_iterations
    rate = optim.lr_warmup_iterations
    others = ("runner.max_iterations",)
    if critic >= iterations:
        message = f"the policy would never train: the critic's warm-up takes {critic} of {iterations} iterations"
        hint = f"set it below {iterations}, or raise runner.max_iterations"
        yield Finding(WARM_UPS[0], message, hint, f"0 to {iterations - 1}", others=others)
    elif critic + rate > iterations:
        message = f"the learning rate would never reach its peak: {critic} critic-only iterations, then {rate}"
        message += f" of warm-up, are more than the {iterations} of the run"
        hint = f"set it to at most {iterations - critic}, or raise runner.max_iterations"
        yield Finding(WARM_UPS[1], message, hint, f"0 to {iterations - critic}", others=(WARM_UPS[0], *others))


@rule(*WARM_UPS, "runner.max_iterations")
def chosen_warm_ups_end(context: Context) -> Iterator[Finding]:
    """Warm-ups that the user chose end before the run does."""
    yield from (finding for finding in warm_up_findings(context) if context.by_user(finding.key))


@note(*WARM_UPS, "runner.max_iterations")
def default_warm_ups_end(context: Context) -> Iterator[Finding]:
    """In a very short run the default warm-ups take up all iterations."""
    yield from (finding for finding in warm_up_findings(context) if not context.by_user(finding.key))


@note("algorithm.kl")
def kl_has_a_gradient(context: Context) -> Iterator[Finding]:
    """As a loss, k1 has no expected gradient."""
    kl = context.config.algorithm.kl
    if kl.coef and kl.placement == "loss" and kl.estimator == "k1":
        message = "in the loss the gradient of k1 is 0 on average; only its value estimates the KL"
        yield Finding("algorithm.kl.estimator", message, "set it to k2 or k3, or algorithm.kl.placement=reward")


@note("algorithm", "rollout.backend")
def algorithm_keys_without_effect(context: Context) -> Iterator[Finding]:
    """Settings that have no effect in combination with others."""
    for key, idle, reason in _inert(context):
        if idle and context.by_user(key):
            yield Finding(key, f"has no effect: {reason}", "leave it out")


LOSS_KEYS = {name: name for name, mark in ARGUMENTS["loss"].items() if mark.alone} | {"weights": "loss_agg"}
ESTIMATOR_KEYS = {name: name for name in ARGUMENTS["estimator"]}
ON_POLICY = ("logprob_type", "update_epoch", "target_kl", "normalize_advantages", "chunk_fraction")


def _inert(context: Context) -> Iterator[tuple[str, bool, str]]:
    """Yield algorithm keys, whether they have no effect, and the reason."""
    config = context.config
    algorithm = config.algorithm
    estimators = context.estimators.values()
    loss = context.loss
    own = "every task of env.tasks has an adv_type in algorithm.by_task"
    yield "algorithm.adv_type", "algorithm.adv_type" not in context.estimators, own
    adv_type = f"adv_type is '{algorithm.adv_type}'"
    recorded = f"loss_type '{algorithm.loss_type}' learns from recorded data"
    for name in (*LOSS_KEYS.values(), *ON_POLICY):
        yield f"algorithm.{name}", loss.learns_from_records, recorded
    on_policy = f"loss_type '{algorithm.loss_type}' learns only from its rollouts"
    for name in OffPolicyConfig.model_fields:
        read = loss.learns_from_records or (name == "demos" and algorithm.bc_coef > 0)
        yield f"algorithm.off_policy.{name}", not read, on_policy
    for name in (
        set(type(algorithm).model_fields)
        - set(AlgorithmConfig.model_fields)
        - {each.section or each.name for each in (*estimators, loss)}
    ):
        owners = [
            each.name for kind in (ADVANTAGES, LOSSES) for each in kind.all() if name in (each.name, each.section)
        ]
        yield f"algorithm.{name}", True, f"neither adv_type nor loss_type is {' or '.join(owners)}"
    yield "algorithm.gae_lambda", all("gae_lambda" in each.ignores for each in estimators), adv_type
    gammas = {algorithm.gamma, *(each.gamma for each in algorithm.by_task if each.gamma is not None)}
    summed = all(each.sums_rewards for each in estimators) and gammas == {1}
    yield "algorithm.reward_type", summed, f"{adv_type} and gamma is 1"
    weighted = config.recomputes_logprobs and not algorithm.decoupled.enabled
    yield "algorithm.engine_weight_cap", not weighted, "no log-probs are recomputed, or decoupled.cap counts"
    # A user's function gets only the settings that its parameters name.
    for parts, keys in ((estimators, ESTIMATOR_KEYS), ((loss,), LOSS_KEYS)):
        for name, key in keys.items():
            unread = all(part.parameters is not None and name not in part.parameters for part in parts)
            yield f"algorithm.{key}", unread, f"your function has no parameter '{name}'"
    unread = loss.parameters is not None and "kl_estimator" not in loss.parameters and algorithm.kl.placement == "loss"
    yield "algorithm.kl.estimator", unread, "your function has no parameter 'kl_estimator'"
