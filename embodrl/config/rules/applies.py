"""Settings that have no effect without another one, as declared in the schema with ``AppliesIf``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import reduce

from embodrl.config.rules.base import Context, note, value_of
from embodrl.config.schema import AppliesIf, Config, Section
from embodrl.rule_set import Finding

FACTS = ("loss", "estimator", "deployment", "launcher", "trains_collectively")
"""Context attributes that conditions may name."""


@note(*Config.model_fields)
def setting_applies(context: Context) -> Iterator[Finding]:
    """A setting has an effect in combination with the others."""
    for key, conditions in conditional_settings(context.config):
        if context.by_user(key) and value_of(context.config, key) is not None:
            idle = (each for each in conditions if each.key != key and not _holds(each, context))
            yield from (_finding(key, each, context) for each in [*idle][:1])


def conditional_settings(
    section: Section, prefix: str = "", above: tuple[AppliesIf, ...] = ()
) -> Iterator[tuple[str, tuple[AppliesIf, ...]]]:
    """Yield the conditional settings of a section with their conditions."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        key = f"{prefix}{name}"
        conditions = (*above, *(each for each in info.metadata if isinstance(each, AppliesIf)))
        if isinstance(value, Section):
            yield from conditional_settings(value, f"{key}.", conditions)
        elif conditions:
            yield key, conditions


def _holds(condition: AppliesIf, context: Context) -> bool:
    root, *names = condition.key.split(".")
    found = getattr(context if root in FACTS else context.config, root)
    return found is None or condition.holds(reduce(getattr, names, found))


def _finding(key: str, condition: AppliesIf, context: Context) -> Finding:
    if condition.reason:
        return Finding(key, f"has no effect: {condition.reason}", "leave it out")
    wanted = f"={_shown(condition.values[0])}" if condition.values else ""
    value = _shown(value_of(context.config, condition.key))
    return Finding(key, f"has no effect: {condition.key} is {value}", f"leave it out, or set {condition.key}{wanted}")


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
