"""Algorithms that learn from a dataset alone: what they work with."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.base import Context, Finding, note, path_kind, rule, value_of

DATASET = "algorithm.off_policy.demos"
# What such an algorithm needs of other sections, and why.
NEEDS: tuple[tuple[str, object, str], ...] = (
    ("actor.training_backend", "native", "trains in one process"),
    ("actor.own_process", None, "trains in one process"),
    ("rollout.backend", "native", "evaluates in the process that trains"),
    ("rollout.own_process", None, "evaluates in the process that trains"),
    ("rollout.workflow", None, "has no rollouts"),
    ("rollout.publish_weights", False, "has no rollouts that others could act in"),
    ("runner.max_staleness", 0, "has no rollouts"),
    ("algorithm.kl.coef", 0, "keeps no reference policy"),
    ("algorithm.filter.enabled", False, "has no groups to drop"),
    ("algorithm.srpo.enabled", False, "takes its rewards from the dataset"),
    ("reward.fn", None, "takes its rewards from the dataset"),
    ("algorithm.decoupled.enabled", False, "has no ratios"),
    ("algorithm.recompute_logprobs", "auto", "has no ratios"),
)
READ = ("demos", "num_q", "critic_hidden_sizes", "layer_norm", "tau", "n_step")
"""Settings of ``algorithm.off_policy`` that IQL reads."""


@rule("algorithm", "actor", "rollout", "reward.fn", "runner.max_staleness", "cluster")
def offline_has_what_it_needs(context: Context) -> Iterator[Finding]:
    """Nothing is set that such an algorithm would have to ignore."""
    if not context.loss.offline:
        return
    others = ("algorithm.loss_type",)
    for key, wanted, reason in NEEDS:
        if value_of(context.config, key) != wanted:
            shown = "null" if wanted is None else str(wanted).lower()
            message = f"loss_type '{context.config.algorithm.loss_type}' {reason}"
            yield Finding(key, message, f"set it to {shown}", shown, others=others)
    if (placed := context.deployment) is not None and (placed.rolls_out_in_processes or placed.trains_in_processes):
        hint = "leave placements at their defaults, and cluster.launcher=process"
        yield Finding("cluster.component_placement", "offline algorithms run in one process", hint, others=others)


@rule(DATASET, "algorithm.off_policy.critic_hidden_sizes", "algorithm.loss_type")
def offline_has_a_dataset(context: Context) -> Iterator[Finding]:
    """What is learned from is named, and there."""
    settings = context.config.algorithm.off_policy
    if not context.loss.offline:
        return
    others = ("algorithm.loss_type",)
    if settings.demos is None:
        hint = f"set {DATASET} to a directory of `embodrl collect`"
        yield Finding(DATASET, "there is no dataset to learn from", hint, "a directory", others=others)
    elif path_kind(settings.demos) != "directory":
        message = f"there is no directory '{settings.demos}'"
        yield Finding(DATASET, message, "make it: embodrl collect collect.output_dir=...", "a directory")


@note("algorithm.off_policy", "algorithm.loss_type")
def offline_keys_without_effect(context: Context) -> Iterator[Finding]:
    """Settings of replay buffers and temperatures, which there are none of."""
    if not context.loss.offline:
        return
    for name in type(context.config.algorithm.off_policy).model_fields:
        key = f"algorithm.off_policy.{name}"
        if name not in READ and context.by_user(key):
            message = f"has no effect: loss_type '{context.config.algorithm.loss_type}' learns from a dataset alone"
            yield Finding(key, message, "leave it out")
