"""Cross-field rules, by subject. All of them run; each reports on its own."""

from __future__ import annotations

from embodrl.config.nodes import Node
from embodrl.config.rules import (
    actor,
    algorithm,
    cluster,
    data,
    env,
    model,
    offload,
    pipeline,
    reward,
    rollout,
    rollout_processes,
    runner,
    simulators,
)
from embodrl.config.rules.base import NOTES, RULES, Context, Rule
from embodrl.config.schema import Config
from embodrl.errors import ConfigProblem

__all__ = [
    "NOTES",
    "RULES",
    "Rule",
    "actor",
    "algorithm",
    "cluster",
    "data",
    "env",
    "model",
    "offload",
    "pipeline",
    "reward",
    "rollout",
    "rollout_processes",
    "run_rules",
    "runner",
    "simulators",
]


def run_rules(
    config: Config,
    tree: Node,
    invalid: set[str],
    resuming: bool = False,
    planning: bool = False,
    collecting: bool = False,
) -> tuple[list[ConfigProblem], list[ConfigProblem]]:
    """Run every rule whose keys have a valid type.

    Args:
        config: the values; the schema's default where a value was invalid.
        tree: where the values came from.
        invalid: keys whose value was invalid.
        resuming: the weights come from a checkpoint, whatever the configuration names.
        planning: nothing will be started, so what this machine lacks is no problem.
        collecting: demonstrations will be collected, which needs experts.

    Returns:
        What is forbidden, and what is allowed but without effect or odd.
    """
    context = Context(config, tree, resuming, planning, collecting)
    sets = [spec.rules for spec in (context.simulator, context.family) if spec is not None]
    chosen = [rules for spec in sets for rules in spec]
    sound = [
        [rule for rule in rules if not any(_overlap(key, bad) for key in rule.keys for bad in invalid)]
        for rules in (
            [*RULES, *(rule for one in chosen for rule in one.rules)],
            [*NOTES, *(note for one in chosen for note in one.notes)],
        )
    ]
    errors, notes = (
        [context.problem(finding, rule.code) for rule in rules for finding in rule.check(context)] for rules in sound
    )
    return errors, notes


def _overlap(key: str, bad: str) -> bool:
    return key == bad or key.startswith(f"{bad}.") or bad.startswith(f"{key}.")
