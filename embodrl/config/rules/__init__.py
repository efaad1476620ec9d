"""Cross-field rules, by subject. All of them run; each reports on its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from embodrl.config.rules import (
    actor,
    algorithm,
    cluster,
    data,
    env,
    families,
    libero,
    model,
    offload,
    pipeline,
    reward,
    rollout,
    rollout_processes,
    runner,
    simulators,
    sizes,
)
from embodrl.config.rules.base import NOTES, RULES, Context, Rule
from embodrl.errors import ConfigProblem

__all__ = [
    "NOTES",
    "RULES",
    "Context",
    "Report",
    "Rule",
    "actor",
    "algorithm",
    "cluster",
    "data",
    "env",
    "families",
    "libero",
    "model",
    "offload",
    "pipeline",
    "reward",
    "rollout",
    "rollout_processes",
    "run_rules",
    "runner",
    "simulators",
    "sizes",
]


@dataclass(frozen=True)
class Report:
    """What the rules found.

    Attributes:
        errors: forbidden.
        notes: allowed, but without effect or odd.
        obstacles: of a plan: why the run could not be started on this machine.
    """

    errors: list[ConfigProblem]
    notes: list[ConfigProblem]
    obstacles: list[ConfigProblem]


def run_rules(
    context: Context, invalid: set[str], planning: bool = False, further_rules: Sequence[Rule] = ()
) -> Report:
    """Run every rule whose keys have a valid type.

    Args:
        context: the values, with the schema's default where one was invalid, and where they came from.
        invalid: keys whose value was invalid.
        planning: nothing will be started, so what this machine lacks is an obstacle instead of an error.
        further_rules: of packages above this one.
    """

    def run(rules: Iterable[Rule]) -> list[ConfigProblem]:
        sound = [rule for rule in rules if not any(_overlap(key, bad) for key in rule.keys for bad in invalid)]
        return [context.problem(finding, rule.code) for rule in sound for finding in rule.check(context)]

    rules = [*RULES, *further_rules]
    later = [rule for rule in rules if planning and rule.here]
    notes = [note for note in NOTES if not (context.evaluating and note.is_about_training)]
    return Report(run(rule for rule in rules if rule not in later), run(notes), run(later))


def _overlap(key: str, bad: str) -> bool:
    return key == bad or key.startswith(f"{bad}.") or bad.startswith(f"{key}.")
