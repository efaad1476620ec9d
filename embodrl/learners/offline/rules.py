"""Rules of algorithms that learn from a dataset alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from embodrl.config.rules.base import Context, path_kind, value_of
from embodrl.config.schema import OffPolicyConfig
from embodrl.learners.offline.settings import offline_settings
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import MODELS

RULES = RuleSet()
DATA = "algorithm.off_policy.demos"
# Requirements on other sections, and their reasons.
NEEDS: tuple[tuple[str, object, str], ...] = (
    ("rollout.backend", "native", "evaluates in the main process"),
    ("rollout.own_process", None, "evaluates in the main process"),
    ("rollout.workflow", None, "has no rollouts"),
    ("rollout.publish_weights", False, "has no rollouts for other processes"),
    ("runner.max_staleness", 0, "has no rollouts"),
    ("algorithm.kl.coef", 0, "keeps no reference policy"),
    ("algorithm.filter.enabled", False, "has no groups to drop"),
    ("algorithm.srpo.enabled", False, "takes its rewards from the data"),
    ("reward.fn", None, "takes its rewards from the data"),
    ("reward.judge.url", None, "takes its rewards from the data"),
    ("algorithm.decoupled.enabled", False, "has no ratios"),
    ("algorithm.recompute_logprobs", "auto", "has no ratios"),
)
TD3_BC_NEEDS = (
    ("actor.precision", "fp32", "trains in float32"),
    ("rollout.precision", "fp32", "acts in float32"),
)
CRITICS = ("demos", "num_q", "critic_hidden_sizes", "layer_norm", "tau", "n_step")
READ = {
    "iql": CRITICS,
    "td3_bc": (*CRITICS, "subset", "policy_delay", "critic_warm_up", "shift_pixels"),
    "recap": ("demos",),
}
"""Settings of ``algorithm.off_policy`` that each loss reads."""


@RULES.rule("algorithm", "actor", "rollout", "reward.fn", "runner.max_staleness", "cluster")
def offline_has_what_it_needs(context: Context) -> Iterator[Finding]:
    """Settings that such an algorithm would ignore are rejected."""
    others = ("algorithm.loss_type",)
    for key, wanted, reason in NEEDS:
        if value_of(context.config, key) != wanted:
            shown = "null" if wanted is None else str(wanted).lower()
            message = f"loss_type '{context.config.algorithm.loss_type}' {reason}"
            yield Finding(key, message, f"set it to {shown}", shown, others=others)
    if context.gathers_in_processes:
        message = "offline algorithms evaluate in the main process"
        hint = "keep the default placement of rollout, and cluster.launcher=process"
        yield Finding("cluster.component_placement", message, hint, others=others)


@RULES.rule("algorithm.loss_type", "model.model_type", "model.small_actor.kind", "actor", "rollout.precision")
def td3_bc_has_an_actor(context: Context) -> Iterator[Finding]:
    """TD3+BC maximises Q through the policy's own actions, in float32."""
    config, family = context.config, context.family
    others = ("algorithm.loss_type",)
    if config.algorithm.loss_type != "td3_bc":
        return
    if family is not None and (not family.off_policy or config.model.small_actor.kind is not None):
        able = ", ".join(spec.name for spec in MODELS.all() if spec.off_policy)
        message = f"td3_bc needs actions that can be differentiated, which {family.name} does not have"
        hint = "choose model=mlp or model=cnn, or algorithm=iql"
        yield Finding("model.model_type", message, hint, able, others=others)
    for key, wanted, reason in TD3_BC_NEEDS:
        if value_of(config, key) != wanted:
            yield Finding(key, f"td3_bc {reason}", f"set it to {wanted}", wanted, others=others)


@RULES.rule("algorithm.loss_type", "reward.model")
def labels_need_no_rewards(context: Context) -> Iterator[Finding]:
    """RECAP reads a dataset's labels, which already include a reward model's judgement."""
    if context.config.algorithm.loss_type == "recap" and context.config.reward.model is not None:
        message = "recap reads the labels of a dataset, so reward.model would have no effect"
        hint = "set reward.model=null, and pass the model to `embodrl label --reward-model`"
        yield Finding("algorithm.loss_type", message, hint, others=("reward.model",))


@RULES.rule(DATA, "algorithm.off_policy.critic_hidden_sizes", "algorithm.loss_type")
def offline_has_data(context: Context) -> Iterator[Finding]:
    """The dataset is configured and exists."""
    settings = context.config.algorithm.off_policy
    others = ("algorithm.loss_type",)
    if settings.demos is None:
        hint = f"set {DATA} to a directory of `embodrl collect`"
        yield Finding(DATA, "there is no data to learn from", hint, "a directory", others=others)
    elif settings.demos not in context.made_before and path_kind(settings.demos) != "directory":
        message = f"there is no directory '{settings.demos}'"
        yield Finding(DATA, message, "create it: embodrl collect collect.output_dir=...", "a directory")


@RULES.rule("algorithm.offline.tag", DATA, "algorithm.loss_type")
def labels_are_there(context: Context) -> Iterator[Finding]:
    """RECAP reads labels, which `embodrl label` writes."""
    algorithm = context.config.algorithm
    data = algorithm.off_policy.demos
    tag = offline_settings(algorithm).tag
    if algorithm.loss_type != "recap" or data is None or path_kind(data) != "directory":
        return
    if path_kind(str(Path(data) / "meta" / f"advantages_{tag}.parquet")) != "file":
        message = f"{data} has no labels '{tag}'"
        yield Finding("algorithm.offline.tag", message, f"embodrl label {data} --tag {tag}", others=(DATA,))


@RULES.note("algorithm.off_policy", "algorithm.loss_type")
def offline_keys_without_effect(context: Context) -> Iterator[Finding]:
    """Settings of replay buffers and temperatures, which offline algorithms do not have."""
    loss = context.config.algorithm.loss_type
    for name in OffPolicyConfig.model_fields:
        if name not in READ.get(loss, ("demos",)) and context.by_user(key := f"algorithm.off_policy.{name}"):
            yield Finding(key, f"has no effect: loss_type '{loss}' does not read it", "leave it out")
