"""Verbs that read a setting, as declared in the schema with ``ReadBy``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from embodrl.config.schema.config import Config
from embodrl.config.schema.section import ReadBy, Section
from embodrl.specs import VERBS

Verb = str
"""Name of a verb with a configuration, as in ``ReadBy`` or ``embodrl.specs.VERBS``."""


@cache
def readers(key: str, schema: type[Section] = Config) -> frozenset[str] | None:
    """Return the verbs that read a key or a part of it, by the innermost declaration; None for all.

    Args:
        key: dotted key, also in the optional sections of verbs.
        schema: schema of the configuration, including additions of simulators, models and engines.
    """
    name, _, _ = key.partition(".")
    owners = () if name in Config.model_fields else (spec.name for spec in VERBS.all() if name in spec.sections)
    found = frozenset(owners) or None
    section: object = schema
    for part in key.split("."):
        if not (isinstance(section, type) and issubclass(section, Section)) or part not in section.model_fields:
            break
        info = section.model_fields[part]
        found = next((each.verbs for each in info.metadata if isinstance(each, ReadBy)), found)
        section = info.annotation
    return found


def reads(verb: Verb | None, key: str, schema: type[Section] = Config) -> bool:
    """Return whether a verb reads a key or a part of it; without a verb every key counts."""
    if verb is None:
        return True
    named = readers(key, schema)
    if named is None or verb in named:
        return True
    spec = VERBS.entry(verb) if verb in VERBS else None
    # A third-party verb that declares nothing may read anything.
    is_open = spec is not None and not spec.reads_as and verb not in VERBS.builtin
    return is_open or (spec is not None and spec.reads_as in named)


def settings_of(verb: Verb, schema: type[Section] = Config) -> list[str]:
    """Return the dotted keys of all settings that a verb reads."""
    return [key for key in _leaves(schema) if reads(verb, key, schema)]


def _leaves(schema: type[Section], prefix: str = "") -> Iterator[str]:
    for name, info in schema.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield from _leaves(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
