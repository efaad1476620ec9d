"""Rules about ``store``."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.base import Context, path_kind
from embodrl.config.rules.real_time import person_can_correct
from embodrl.config.schema import DEVICES
from embodrl.envs.robot.spec import EXPERT
from embodrl.rule_set import Finding, RuleSet
from embodrl.store.config import store_settings

RULES = RuleSet()


@RULES.rule("store.intervention", "env.real_time", "env.env_type", "env.tasks", "algorithm.dagger")
def intervention_is_possible(context: Context) -> Iterator[Finding]:
    """The intervening expert exists, and a stand-in has a rule for when to intervene."""
    config = context.config
    name = store_settings(context.config).intervention
    if name is None:
        return
    key = "store.intervention"
    spec = context.simulator
    if name in DEVICES:
        yield from person_can_correct(context, key, name)
        return
    if name == EXPERT:
        tasks = None if spec is None else spec.expert_tasks
        missing = [] if tasks is None else [task for task in config.env.tasks if task not in tasks]
        if missing:
            message = f"{config.env.env_type} has no scripted expert of {', '.join(missing)}"
            yield Finding(key, message, "name a policy, keyboard or spacemouse", others=("env.tasks",))
    elif path_kind(name) != "directory":
        allowed = f"{EXPERT}, {', '.join(DEVICES)}, or the directory of a policy"
        yield Finding(key, f"no such directory: {name}", "correct the name", allowed)
    if config.algorithm.dagger.gate_threshold is None:
        message = "no rule says when a stand-in for a person intervenes"
        hint = "add algorithm=hg_dagger, or set algorithm.dagger.gate_threshold"
        yield Finding("algorithm.dagger.gate_threshold", message, hint, "above 0", others=(key,))
