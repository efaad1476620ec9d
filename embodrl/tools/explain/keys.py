"""Facts about each configuration key: type, default, range, conditions, verbs and rules."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from embodrl.config.check import in_words, model_of, section_model, unknown_key, with_every_section
from embodrl.config.nodes import lookup
from embodrl.config.presets import groups, load, preset_file, presets
from embodrl.config.rules import Rule, shipped_rules
from embodrl.config.rules.verbs import COMMANDS
from embodrl.config.schema import AppliesIf, Config, EnvConfig, ModelConfig, env_settings, model_settings
from embodrl.config.schema.readers import readers
from embodrl.config.schema.section import Section
from embodrl.config.yaml_text import flow
from embodrl.pipelines.select import PipelineCheck
from embodrl.specs import ENVS, MODELS

CHOSEN_BY = {"env": "env.env_type", "model": "model.model_type"}
"""Sections with variants, and the key that selects the simulator or family of the variant."""
INDEX = re.compile(r"\[\w*\]|\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Setting:
    """A key or section, with the owners that share its definition.

    Attributes:
        key: dotted, without list indices.
        fields: enclosing sections, outermost first, and the field itself last.
        owners: simulators or families that have the setting; () if all do.
    """

    key: str
    fields: tuple[FieldInfo, ...]
    owners: tuple[str, ...] = ()

    @property
    def info(self) -> FieldInfo:
        return self.fields[-1]

    @property
    def model(self) -> type[BaseModel] | None:
        """The class of the section or list items; None for a value."""
        return model_of(self.info.annotation)

    @property
    def is_section(self) -> bool:
        """Whether it holds further keys, as opposed to a value or a list."""
        return self.model is not None and is_section(self.info.annotation)


def find(name: str) -> list[Setting]:
    """Return the definitions of a key or section: several if simulators or families differ; empty if unknown."""
    key = INDEX.sub("", name)
    top, _, rest = key.partition(".")
    schema = with_every_section(Config)
    if top not in CHOSEN_BY or not rest:
        fields = _fields(key, schema)
        return [Setting(key, fields)] if fields else []
    above = schema.model_fields[top]
    base, classes = _classes(top)
    common = _fields(rest, base)
    found: list[Setting] = [Setting(key, (above, *common))] if common else []
    for owner, cls in classes.items():
        fields = _fields(rest, cls)
        same = next((each for each in found if fields and _facts(each.info) == _facts(fields[-1])), None)
        if same is not None and same.owners:
            found[found.index(same)] = Setting(key, same.fields, (*same.owners, owner))
        elif fields and same is None:
            found.append(Setting(key, (above, *fields), (owner,)))
    return found


def _classes(section: str) -> tuple[type[BaseModel], dict[str, type[BaseModel]]]:
    """Return the shared class of ``env`` or ``model``, and the class of every simulator or family."""
    if section == "env":
        return EnvConfig, {name: env_settings(name) for name in ENVS}
    return ModelConfig, {name: model_settings(name) for name in MODELS}


def _fields(key: str, schema: type[BaseModel]) -> tuple[FieldInfo, ...]:
    """Return the fields on the path to a key; empty if the schema lacks it."""
    section, _, name = key.rpartition(".")
    model = section_model(section, schema)
    if model is None or name not in model.model_fields:
        return ()
    above = _fields(section, schema) if section else ()
    return (*above, model.model_fields[name])


def _facts(info: FieldInfo) -> tuple[object, ...]:
    return repr(info.annotation), repr(info.default), info.description, repr(info.metadata)


def children(setting: Setting) -> list[Setting]:
    """Return the keys and sections in a section, or in the items of a list; owner-specific ones last."""
    model = setting.model
    if model is None:
        return []
    found = [Setting(f"{setting.key}.{name}", (*setting.fields, info)) for name, info in model.model_fields.items()]
    if setting.key not in CHOSEN_BY:
        return found
    base, classes = _classes(setting.key)
    names = [name for cls in classes.values() for name in cls.model_fields if name not in base.model_fields]
    shared = [each for each in found if each.key.rpartition(".")[2] in base.model_fields]
    return [*shared, *(one for name in dict.fromkeys(names) for one in find(f"{setting.key}.{name}"))]


def nearest_key(name: str) -> str:
    """Return the nearest key of a name, as in the report of an unknown key; "" if none is near."""
    return unknown_key(INDEX.sub("", name), "", Config).nearest


def is_section(annotation: Any) -> bool:
    """Whether a field holds a section, as opposed to a list of sections."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def allowed(info: FieldInfo) -> str:
    """Return the allowed values of a key, in words: its type with the range, or its choices."""
    if model_of(info.annotation) is not None and not is_section(info.annotation):
        return "a list of mappings"
    return in_words(info.annotation, list(info.metadata))


def type_of(info: FieldInfo) -> str:
    """Return the type of a key in words, without its range."""
    return "a list of mappings" if model_of(info.annotation) is not None else in_words(info.annotation, [])


def default(info: FieldInfo) -> str:
    """Return the default of a key as YAML; "required" if there is none."""
    value: Any = info.default
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, tuple):
        items = cast(tuple[Any, ...], value)
        value = [item.model_dump() if isinstance(item, BaseModel) else item for item in items]
    return flow(value)


def conditions(info: FieldInfo) -> list[str]:
    """Return the settings under which a key or section has an effect, except facts about choices."""
    found = [each for each in info.metadata if isinstance(each, AppliesIf) and not each.reason]
    return [f"{each.key}{'=' * bool(each.values)}{' or '.join(map(flow, each.values))}" for each in found]


def facts_wanted(info: FieldInfo) -> list[str]:
    """Return why a key or section may have no effect with the chosen parts."""
    return [each.reason for each in info.metadata if isinstance(each, AppliesIf) and each.reason]


def in_presets(key: str) -> str:
    """Return which shipped presets of the key's section set it, and to what."""
    group, _, rest = key.partition(".")
    named: dict[str, list[str]] = {}
    for name in presets(group) if rest and group in groups() else ():
        node = lookup(load(preset_file(group, name))[0], rest)
        if node is not None and not node.children:
            named.setdefault(flow(node.plain()), []).append(name)
    return "; ".join(
        f"{group}={', '.join(names)} sets it to {value}"
        if len(names) == 1
        else f"{group}={', '.join(names)} set it to {value}"
        for value, names in named.items()
    )


def read_by(verbs: Collection[str] | None) -> str:
    """Return the verbs that read a field; "" for all."""
    return "" if verbs is None else ", ".join(sorted(verbs))


def rules_of(key: str) -> Iterator[tuple[str, Rule]]:
    """Yield ``("rule" or "note", rule)`` of the rules that read a key, its section, or keys in it.

    Rules that read a whole top-level section are listed at that section only.
    """
    shipped = shipped_rules()
    for kind, rules in (("rule", [*shipped.rules, PipelineCheck().rule]), ("note", shipped.notes)):
        for rule in rules:
            if any(_concerns(each, key) for each in rule.keys):
                yield kind, rule


def _concerns(read: str, key: str) -> bool:
    return read == key or ("." in key and read.startswith(f"{key}.")) or ("." in read and key.startswith(f"{read}."))


def verbs_of(setting: Setting) -> str:
    """Return the commands that read a key or section, by the innermost declaration; "" for all."""
    schema = cast(type[Section], with_every_section(Config))
    verbs = readers(setting.key, schema)
    return read_by(None if verbs is None else [COMMANDS.get(verb, verb) for verb in verbs])
