"""Sections of optional features and other packages, present only where the configuration has keys of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import Field, create_model

from embodrl.config.schema.section import Section
from embodrl.errors import EmbodrlError
from embodrl.names import import_object
from embodrl.specs import ADVANTAGES, ENGINES, LAUNCHERS, LOSSES, SERVE_PROTOCOLS, SMALL_ACTORS, VERBS

S = TypeVar("S", bound=Section)
CHOSEN_BY = {
    "actor": ("training_backend",),
    "rollout": ("backend",),
    "serve": ("protocols",),
    "algorithm": ("adv_type", "loss_type", "by_task.adv_type"),
    "cluster": ("launcher",),
    "model": ("small_actor.kind",),
}
"""Extensible section -> its keys that name the sections in use."""
BY_NAME = {"serve": SERVE_PROTOCOLS, "cluster": LAUNCHERS, "model": SMALL_ACTORS}
"""Section -> registry whose entries bring sections of their names."""


def sections_of(path: str, names: Iterable[str]) -> dict[str, type[Section]]:
    """Return the section classes that registered parts bring for the given names.

    Args:
        path: parent section; "" for the whole configuration.
        names: names of keys; unknown ones are skipped.
    """
    wanted = list(names)
    if path == "":
        known = {name: section for spec in VERBS.all() for name, section in spec.sections.items()} if wanted else {}
        found: dict[str, object] = {name: known.get(name) for name in wanted}
    elif path in BY_NAME:
        registry = BY_NAME[path]
        found = {name: registry.entry(name).settings for name in wanted if name in registry}
    elif path == "algorithm":
        found = _sections_of_functions(wanted)
    else:
        fact = "training_settings" if path == "actor" else "rollout_settings"
        found = {name: getattr(ENGINES.entry(name), fact) for name in wanted if name in ENGINES}
    return {name: _class_of(name, section) for name, section in found.items() if section is not None}


def _sections_of_functions(wanted: Iterable[str]) -> dict[str, object]:
    """Return section -> settings; a name is a function's, or a section's that several functions share."""
    found: dict[str, object] = {}
    for name in wanted:
        # Not ``in functions``, which would import a module:function.
        specs = [functions.entry(name) for functions in (ADVANTAGES, LOSSES) if name in functions.names()]
        specs = specs or [spec for spec in LOSSES.all() if spec.section == name]
        found |= {spec.section or spec.name: spec.settings for spec in specs if spec.settings is not None}
    return found


def _class_of(name: str, section: object) -> type[Section]:
    try:
        found: object = import_object(section) if isinstance(section, str) else section
    except Exception as error:  # third-party packages may raise anything on import
        raise EmbodrlError(
            f"the settings of '{name}' can't be imported from  {section}: {type(error).__name__}: {error}",
            "fix or uninstall the package that declares them",
            code="entry-point-broken",
        ) from error
    if not isinstance(found, type) or not issubclass(found, Section):
        raise EmbodrlError(
            f"the settings of '{name}' are {found!r}, which is not derived from Section",
            "write class MySettings(Section) with a default for every field",
            code="settings-class-invalid",
        )
    return found


def present_in(path: str, section: Mapping[str, object], base: type[Section]) -> dict[str, type[Section]]:
    """Return the optional sections of a mapping: those with keys, and those in use."""
    names = [name for name in section if name not in base.model_fields]
    for chosen in (_value_at(section, key) for key in CHOSEN_BY.get(path, ())):
        items = cast(Iterable[object], chosen) if isinstance(chosen, (list, tuple)) else (chosen,)
        names += [name for name in items if isinstance(name, str)]
    return sections_of(path, (name for name in dict.fromkeys(names) if name not in base.model_fields))


def _value_at(section: Mapping[str, object], key: str) -> object:
    """Return the value of a key, or a list of the values that the items of a list have."""
    name, _, rest = key.partition(".")
    found = section.get(name)
    if not rest:
        return found
    if isinstance(found, (list, tuple)):
        items = cast(Iterable[object], found)
        return [_value_at(cast(Mapping[str, object], item), rest) for item in items if isinstance(item, Mapping)]
    return _value_at(cast(Mapping[str, object], found), rest) if isinstance(found, Mapping) else None


def with_sections(base: type[S], sections: Mapping[str, type[Section]]) -> type[S]:
    """Return the class extended by the given sections with their defaults; ``base`` itself if there are none."""
    return _with_sections(base, tuple(sorted(sections.items()))) if sections else base


@cache
def _with_sections(base: type[S], sections: tuple[tuple[str, type[Section]], ...]) -> type[S]:
    fields: dict[str, Any] = {
        name: (cls, Field(default=cls(), description=(inspect.getdoc(cls) or "").partition("\n")[0].rstrip(".")))
        for name, cls in sections
    }
    return create_model(base.__name__, __base__=base, **fields)


def section_in(section: Section, name: str, cls: type[S]) -> S:
    """Return an optional subsection; its defaults if the configuration has no keys of it."""
    found = getattr(section, name, None)
    return found if isinstance(found, cls) else cls()
