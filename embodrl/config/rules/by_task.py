"""Settings of single tasks: ``algorithm.by_task``."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.algorithm import unregistered
from embodrl.config.rules.base import Context, rule
from embodrl.names import is_misspelt, nearest
from embodrl.rule_set import Finding
from embodrl.specs import ADVANTAGES

KEY = "algorithm.by_task"


@rule(KEY, "env.tasks", "algorithm.kl.coef")
def tasks_of_settings_are_played(context: Context) -> Iterator[Finding]:
    """Settings of a task are for one that the run has, stand once, and set something."""
    tasks = context.config.env.tasks
    named: list[str] = []
    for index, each in enumerate(context.config.algorithm.by_task):
        key = f"{KEY}.{index}.task"
        if each.task not in tasks:
            near = nearest(each.task, list(tasks))
            hint = f"write {near}" if is_misspelt(each.task, near) else "name a task of env.tasks"
            message = f"the run does not play '{each.task}'"
            yield Finding(key, message, hint, ", ".join(tasks), near, others=("env.tasks",))
        elif each.task in named:
            yield Finding(key, f"the task '{each.task}' is named twice", "give all of its settings in one item")
        elif each.weight == each.kl_weight == 1 and not each.arguments():
            message = f"nothing is set for '{each.task}'"
            hint = "set its adv_type, gamma, gae_lambda, weight or kl_weight, or leave the item out"
            yield Finding(key, message, hint)
        elif each.kl_weight != 1 and not context.config.algorithm.kl.coef:
            message = "there is no KL to a reference that it would weight"
            hint = "set algorithm.kl.coef, or leave it out"
            yield Finding(f"{KEY}.{index}.kl_weight", message, hint, "1", others=("algorithm.kl.coef",))
        named.append(each.task)


@rule(KEY, "algorithm.loss_type")
def tasks_have_advantages(context: Context) -> Iterator[Finding]:
    """The estimators of tasks exist, and the one loss of the run trains what they read."""
    algorithm = context.config.algorithm
    loss = context.loss
    others = ("algorithm.loss_type",)
    if algorithm.by_task and loss.learns_from_records:
        message = f"loss_type '{algorithm.loss_type}' uses no advantages"
        yield Finding(KEY, message, "leave it out", "[]", others=others)
        return
    for index, each in enumerate(algorithm.by_task):
        key = f"{KEY}.{index}.adv_type"
        if each.adv_type is None:
            continue
        yield from unregistered(key, each.adv_type, ADVANTAGES)
        if each.adv_type not in ADVANTAGES:
            continue
        spec = ADVANTAGES.entry(each.adv_type)
        fitting = ", ".join(
            one.name for one in ADVANTAGES.all() if one.needs_values == loss.needs_values and not one.off_policy
        )
        if spec.off_policy:
            message = f"adv_type '{each.adv_type}' gives no advantages, which loss_type '{algorithm.loss_type}' needs"
            yield Finding(key, message, f"choose one of {fitting}", fitting, others=others)
        elif spec.needs_values != loss.needs_values:
            uses = "needs values, which" if spec.needs_values else "never uses the values that"
            trains = "never trains" if spec.needs_values else "trains"
            message = f"adv_type '{each.adv_type}' {uses} loss_type '{algorithm.loss_type}' {trains} for all tasks"
            hint = f"choose one of {fitting}, or another loss_type with an adv_type to it for every task"
            yield Finding(key, message, hint, fitting, others=others)


@rule(KEY, "algorithm.adv_type", "algorithm.kl", "algorithm.chunk_fraction")
def tasks_without_advantages_have_a_teacher(context: Context) -> Iterator[Finding]:
    """A task with the estimator zero learns from the KL: it has one, and its chunks are not dropped."""
    algorithm = context.config.algorithm
    for index, each in enumerate(algorithm.by_task):
        key = f"{KEY}.{index}.kl_weight"
        spec = context.estimators.get(f"{KEY}.{index}.adv_type", context.estimator)
        if each.kl_weight == 0 and spec.name == "zero":
            message = f"neither rewards nor a KL teach '{each.task}'"
            others = (f"{KEY}.{index}.adv_type" if each.adv_type else "algorithm.adv_type",)
            yield Finding(key, message, "leave it out, or give the task another adv_type", "above 0", others=others)
        if each.adv_type == "zero" and algorithm.chunk_fraction != 1:
            message = f"the chunks of '{each.task}' have the smallest advantages, 0, and are dropped first"
            hint = "set it to 1, or give the task another adv_type"
            yield Finding("algorithm.chunk_fraction", message, hint, "1", others=(f"{KEY}.{index}.adv_type",))


@rule(KEY, "algorithm.adv_type", "env.reward_mode")
def settings_of_tasks_are_read(context: Context) -> Iterator[Finding]:
    """The estimator of a task reads the discount and the lambda that are set for it."""
    config = context.config
    for index, each in enumerate(config.algorithm.by_task):
        name = each.adv_type or config.algorithm.adv_type
        spec = context.estimators.get(f"{KEY}.{index}.adv_type", context.estimator)
        others = (f"{KEY}.{index}.adv_type" if each.adv_type else "algorithm.adv_type",)
        for setting in each.arguments().keys() - {"adv_type"}:
            key = f"{KEY}.{index}.{setting}"
            if setting in spec.ignores or (spec.parameters is not None and setting not in spec.parameters):
                message = f"adv_type '{name}' reads no {setting}"
                yield Finding(key, message, "leave it out", "null", others=others)
            elif setting == "gamma" and config.env.reward_mode == "potential":
                message = "reward_mode 'potential' shapes the rewards of all tasks with algorithm.gamma"
                hint = "leave it out, or set env.reward_mode=dense_delta"
                yield Finding(key, message, hint, "null", others=("env.reward_mode",))
