"""Cross-field rules by subject. All of them run, and each reports independently."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from embodrl.config.check import schema_of
from embodrl.config.rules import (
    actor,
    algorithm,
    applies,
    by_task,
    cluster,
    controllers,
    data,
    env,
    evaluation,
    interface,
    model,
    off_policy,
    offload,
    pipeline,
    protocol,
    real_time,
    reward,
    rollout,
    rollout_processes,
    runner,
    sections,
    serve,
    simulators,
    sizes,
)
from embodrl.config.rules.base import NOTES, RULES, Context
from embodrl.config.rules.verbs import concerns, settings_of_other_verbs
from embodrl.config.schema import Config
from embodrl.config.schema.readers import Verb, reads
from embodrl.errors import ConfigProblem
from embodrl.names import import_object
from embodrl.rule_set import Rule, RuleSet
from embodrl.specs import ENGINES, ENVS, LAUNCHERS, LOSSES, MODELS, SERVE_PROTOCOLS, SMALL_ACTORS, VERBS, VerbSpec

__all__ = [
    "NOTES",
    "RULES",
    "Context",
    "Report",
    "Rule",
    "RuleSet",
    "actor",
    "algorithm",
    "applies",
    "by_task",
    "cluster",
    "controllers",
    "data",
    "env",
    "evaluation",
    "interface",
    "model",
    "off_policy",
    "offload",
    "pipeline",
    "protocol",
    "real_time",
    "reward",
    "rollout",
    "rollout_processes",
    "run_rules",
    "runner",
    "sections",
    "serve",
    "shipped_rules",
    "simulators",
    "sizes",
]


@dataclass(frozen=True)
class Report:
    """Findings of the rules.

    Attributes:
        errors: forbidden settings.
        notes: settings that are allowed but have no effect or a surprising one.
        obstacles: for a plan, reasons why the run could not start on this machine.
    """

    errors: list[ConfigProblem]
    notes: list[ConfigProblem]
    obstacles: list[ConfigProblem]


def run_rules(
    context: Context, invalid: set[str], verb: Verb | None = None, further_rules: Sequence[Rule] = ()
) -> Report:
    """Run every rule whose keys have a valid type.

    Args:
        context: values, with schema defaults in place of invalid ones, and their origins.
        invalid: keys with invalid values.
        verb: verb that the configuration is for; rules about settings that the verb does not read are skipped. ``plan``
            starts nothing, so it reports what this machine lacks as obstacles instead of errors. None checks
            everything.
        further_rules: rules of packages above this one.
    """

    schema = schema_of(context.tree)

    def run(rules: Iterable[Rule]) -> list[ConfigProblem]:
        sound = [rule for rule in rules if not any(_overlap(key, bad) for key in rule.keys for bad in invalid)]
        read = [rule for rule in sound if any(reads(verb, key, schema) for key in rule.keys)]
        found = ((rule, finding) for rule in read for finding in rule.check(context))
        return [context.problem(finding, rule.code) for rule, finding in found if concerns(verb, finding, schema)]

    protocols = [SERVE_PROTOCOLS.entry(name) for name in context.config.serve.protocols] if verb == "serve" else []
    engines = {spec.name: spec for spec in (context.training_engine, context.rollout_engine)}
    kind = context.config.model.small_actor.kind
    actor = SMALL_ACTORS.entry(kind) if kind is not None and kind in SMALL_ACTORS else None
    launcher = context.launcher
    chosen = (context.simulator, context.family, context.loss, actor, launcher, *engines.values(), *protocols)
    specs = [spec for spec in chosen if spec is not None]
    specs += _specs_of_verb(verb, context)
    sets = [_imported(rules) for spec in specs for rules in spec.rules]
    every = [*RULES, *(rule for one in sets for rule in one.rules), *further_rules]
    notes = [*NOTES, *(note for one in sets for note in one.notes)]
    later = [rule for rule in every if verb == "plan" and rule.machine_specific]
    others = () if verb is None else settings_of_other_verbs(verb, context, schema)
    refused = [context.problem(each, "") for each in others if each.key not in invalid]
    return Report(refused + run(rule for rule in every if rule not in later), run(notes), run(later))


def _specs_of_verb(verb: Verb | None, context: Context) -> list[VerbSpec]:
    """Return the verb's spec, if any, and those of whose sections the configuration has some that the verb reads."""
    own = [VERBS.entry(verb)] if verb is not None and verb in VERBS else []
    further = context.tree.children.keys() - Config.model_fields.keys()
    if not further:
        return own
    schema = schema_of(context.tree)
    read = {name for name in further if any(reads(verb, key, schema) for key in _keys(name, schema))}
    return own + [spec for spec in VERBS.all() if spec not in own and read & spec.sections.keys()]


def _keys(name: str, schema: type[Config]) -> list[str]:
    section = schema.model_fields[name].annotation if name in schema.model_fields else None
    return [f"{name}.{key}" for key in getattr(section, "model_fields", {})]


def _imported(rules: RuleSet | str) -> RuleSet:
    return import_object(rules) if isinstance(rules, str) else rules


def shipped_rules() -> RuleSet:
    """Return all rules that ship with embodrl, for the references in docs/."""
    registries = (ENVS, MODELS, ENGINES, LOSSES, SMALL_ACTORS, LAUNCHERS, SERVE_PROTOCOLS, VERBS)
    specs = [registry.entry(name) for registry in registries for name in registry.builtin]
    found = [_imported(rules) for spec in specs for rules in spec.rules]
    sets = {id(rules): rules for rules in found}.values()  # families share rule sets
    return RuleSet(
        [*RULES, *(rule for one in sets for rule in one.rules)], [*NOTES, *(note for one in sets for note in one.notes)]
    )


def _overlap(key: str, bad: str) -> bool:
    return key == bad or key.startswith(f"{bad}.") or bad.startswith(f"{key}.")
