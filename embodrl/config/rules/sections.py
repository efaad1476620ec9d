"""Sections that belong to registered parts."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.base import Context, note
from embodrl.config.schema.optional import CHOSEN_BY, sections_of
from embodrl.config.schema.section import Section
from embodrl.rule_set import Finding

WHERE = {
    "actor": "actor.training_backend",
    "rollout": "rollout.backend",
    "cluster": "cluster.launcher",
    "model": "model.small_actor.kind",
}
"""Section -> setting that selects the part whose section has an effect."""


@note(*WHERE)
def sections_have_what_brings_them(context: Context) -> Iterator[Finding]:
    """The section of an engine, launcher or small actor has no effect unless that part is chosen."""
    for group, key in WHERE.items():
        section: Section = getattr(context.config, group)
        chosen = {str(_value(section, name)) for name in CHOSEN_BY[group]}
        used = sections_of(group, chosen - {"None"})
        for name in sections_of(group, type(section).model_fields):
            if name not in used and context.by_user(f"{group}.{name}"):
                hint = f"leave it out, or choose it: {key}={name}"
                yield Finding(f"{group}.{name}", f"has no effect: {key} is {' and '.join(sorted(chosen))}", hint)


def _value(section: object, key: str) -> object:
    for name in key.split("."):
        section = getattr(section, name)
    return section
