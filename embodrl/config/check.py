"""Type and range checks: pydantic errors as config problems."""

from __future__ import annotations

import contextlib
import json
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from embodrl.config.nodes import Node, copy, lookup, origin_of, put
from embodrl.config.other_systems import MEANT, advice, key_advice
from embodrl.config.schema import (
    Config,
    env_settings,
    model_settings,
    schema_for,
    sections_of,
    with_sections,
)
from embodrl.config.schema.optional import BY_NAME
from embodrl.config.schema.readers import Verb, settings_of
from embodrl.config.schema.section import NameOf, Section
from embodrl.errors import ConfigProblem, EmbodrlError
from embodrl.names import is_misspelt, nearest
from embodrl.specs import ADVANTAGES, DEFAULT_ENV, ENGINES, ENVS, LOSSES, MODELS, VERBS

TAGS = {"env": "env_type", "model": "model_type"}
"""Sections whose settings depend on one key, which names a spec."""


def schema_of(tree: Node) -> type[Config]:
    """Return the schema for the simulator, model, engines and optional sections that a tree names."""
    return schema_for(cast(dict[str, object], tree.plain()))


def with_every_section(schema: type[Config]) -> type[Config]:
    """Return the schema with the sections of all verbs, engines and protocols."""
    found = _sections_that_load("", (name for spec in VERBS.all() for name in spec.sections))
    engines = ("actor", (ENGINES,)), ("rollout", (ENGINES,))
    for path, registries in (
        *engines,
        ("algorithm", (ADVANTAGES, LOSSES)),
        *((path, (registry,)) for path, registry in BY_NAME.items()),
    ):
        section = cast(type[Section], section_model(path, schema))
        further = (name for registry in registries for name in registry if name not in section.model_fields)
        found[path] = with_sections(section, _sections_that_load(path, further))
    return with_sections(schema, found)


def _sections_that_load(path: str, names: Iterable[str]) -> dict[str, type[Section]]:
    """Return the optional sections by name, without broken packages, which are reported where they are used."""
    found: dict[str, type[Section]] = {}
    for name in names:
        with contextlib.suppress(EmbodrlError):
            found |= sections_of(path, (name,))
    return found


def shipped_schemas() -> list[type[Config]]:
    """Return schemas that together have every key of the simulators, models and features that ship with embodrl."""
    further: dict[str, object] = {name: {} for verb in VERBS.builtin for name in VERBS.entry(verb).sections}
    for section in ("actor", "rollout"):
        further[section] = {name: {} for name in ENGINES.builtin}
    further |= {path: {name: {} for name in registry.builtin} for path, registry in BY_NAME.items() if path != "model"}
    further["algorithm"] = {name: {} for name in sections_of("algorithm", (*ADVANTAGES.builtin, *LOSSES.builtin))}
    schemas = [schema_for({**further, "env": {"env_type": name}}) for name in ENVS.builtin]
    return [*schemas, *(schema_for({"model": {"model_type": name}}) for name in MODELS.builtin)]


def remove_settings_of_others(tree: Node, schema: type[Config]) -> list[ConfigProblem]:
    """Remove the settings of other simulators and models from a tree.

    Values from presets and unchanged defaults are dropped silently.

    Returns:
        A problem for each setting that the user set.
    """
    problems: list[ConfigProblem] = []
    for section, tag in TAGS.items():
        node = lookup(tree, section)
        own = section_model(section, schema)
        assert own is not None
        for name in [name for name in (node.children if node is not None else {}) if name not in own.model_fields]:
            owners = [spec for spec, settings in _settings_of(section).items() if name in settings.model_fields]
            if not owners:
                continue
            key = f"{section}.{name}"
            found = lookup(tree, key)
            assert found is not None
            chosen = lookup(tree, f"{section}.{tag}")
            chosen_name = chosen.plain() if chosen is not None else own.model_fields[tag].default
            put(tree, key, None)
            default = _settings_of(section)[owners[0]]().model_dump(mode="json")[name]
            # An unknown name is reported itself, so its settings are not.
            if chosen_name in _settings_of(section) and _is_set(found, default):
                has = f"{', '.join(owners)} {'has' if len(owners) == 1 else 'have'} it"
                near = nearest(name, list(own.model_fields), cutoff=0.75)
                is_meant = is_misspelt(name, near) and _accepts(f"{section}.{near}", found.plain(), schema)
                instead = f", or write {section}.{near}" if is_meant else ""
                problems.append(
                    ConfigProblem(
                        key,
                        f"{chosen_name} does not have this setting; {has}",
                        str(found.origin),
                        nearest=f"{section}.{near}" if near else "",
                        hint=f"remove it, or set {section}.{tag}={owners[0]}{instead}",
                        code="setting-of-another-type",
                    )
                )
    return problems


def _settings_of(section: str) -> dict[str, type[BaseModel]]:
    if section == "env":
        return {spec.name: env_settings(spec.name) for spec in ENVS.all()}
    return {spec.name: model_settings(spec.name) for spec in MODELS.all()}


def _is_set(node: Node, default: object) -> bool:
    """Return whether the user set a value: on the command line, or in a file to other than the default."""
    if node.children:
        inner = cast(dict[str, object], default) if isinstance(default, dict) else {}
        return any(_is_set(child, inner.get(name)) for name, child in node.children.items())
    return node.origin.kind == "argument" or (node.origin.by_user and node.plain() != default)


def validate(
    tree: Node, schema: type[Config], verb: Verb | None = None
) -> tuple[Config, set[str], list[ConfigProblem]]:
    """Validate a tree, which is not modified, against its schema; settings of ``verb`` are suggested first.

    Returns:
        The configuration, with schema defaults in place of invalid values; the replaced keys; the problems.
    """
    remaining = copy(tree)
    problems = remove_settings_of_others(remaining, schema)
    pruned = {problem.key for problem in problems}
    # Removing an invalid key may reveal another problem; the defaults alone have none.
    for _ in range(10):
        plain = remaining.plain()
        try:
            return Config.model_validate_json(json.dumps(plain)), pruned, problems
        except ValidationError as error:
            wrong = describe(error, tree, schema, verb)
        remaining = copy(remaining)
        for key, problem in wrong:
            problems.append(problem)
            pruned.add(key)
            prune(remaining, key)
    raise AssertionError("the schema's defaults are invalid")


def prune(tree: Node, key: str) -> None:
    """Remove a key; an invalid item removes its whole list."""
    parts = key.split(".")
    for depth in range(1, len(parts) + 1):
        parent = lookup(tree, ".".join(parts[:depth]))
        if parent is None:
            return
        if not isinstance(parent.value, dict) or depth == len(parts):
            put(tree, ".".join(parts[:depth]), None)
            return


def describe(
    error: ValidationError, tree: Node, schema: type[Config], verb: Verb | None = None
) -> list[tuple[str, ConfigProblem]]:
    """Return ``(key, problem)`` for each invalid key."""
    result: dict[str, ConfigProblem] = {}
    for item in error.errors(include_url=False)[:MAX_ERRORS]:
        key = _key(tree, item["loc"], item["type"])
        if key in result or any(known.startswith(f"{key}.") for known in result):
            continue  # pydantic reports each branch of a union, and a list as missing its invalid item
        node = lookup(tree, key)
        value = node.plain() if node is not None else None
        origin = str(origin_of(tree, key))
        if item["type"] == "extra_forbidden":
            result[key] = _unknown_here(key, origin, schema, tree, verb)
            continue
        allowed, options = allowed_values(key, schema)
        message = f"{_show(value)} {_reason(item, value)}"
        near = nearest(str(value), options) if options and isinstance(value, (str, bool, int)) else ""
        is_meant = is_misspelt(str(value), near)
        hint = f"write {key}={near}" if is_meant else _hint(item["type"], key, value, allowed)
        if isinstance(value, float) and item["type"] in ("int_type", "int_from_float") and value.is_integer():
            hint = f"write {key}={int(value)}; integers have no decimal point or exponent"
        near, hint = (advice(key, value) if isinstance(value, str) else None) or (near, hint)
        result[key] = ConfigProblem(key, message, origin, allowed, near, hint, code=_code(item["type"]))
    return list(result.items())


def _key(tree: Node, loc: tuple[int | str, ...], kind: str) -> str:
    """Return the dotted key of an error, without the parts that pydantic adds for union branches."""
    parts: list[str] = []
    for index, part in enumerate(loc):
        candidate = ".".join([*parts, str(part)])
        if lookup(tree, candidate) is None:
            break
        parts.append(str(part))
        if index == len(loc) - 1:
            break
    return ".".join(parts) or "(file)"


def _show(value: object) -> str:
    if isinstance(value, (dict, list)):
        return f"this {'mapping' if isinstance(value, dict) else 'list'}"
    if isinstance(value, str):
        return f"the text '{value if len(value) <= 200 else value[:200] + '...'}'"
    return (
        {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else repr(value)
    )


MAX_ERRORS = 50
"""Problems reported per configuration: further ones usually stem from one broken list, and each takes milliseconds."""
REASONS = {
    "int_type": "is not an integer",
    "int_from_float": "is not an integer",
    "float_type": "is not a number",
    "bool_type": "is not true or false",
    "string_type": "is not text",
    "tuple_type": "is not a list",
    "model_type": "is not a mapping",
    "model_attributes_type": "is not a mapping",
    "dict_type": "is not a mapping",
    "finite_number": "is not a finite number",
    "literal_error": "is not one of the allowed values",
    "greater_than": "is too small",
    "greater_than_equal": "is too small",
    "less_than": "is too large",
    "less_than_equal": "is too large",
    "too_short": "has too few items",
    "too_long": "has too many items",
    "missing": "has too few items",
}


def _code(kind: str) -> str:
    if kind == "literal_error":
        return "config-choice"
    if kind in ("too_short", "too_long", "missing"):
        return "config-length"
    if kind.startswith(("greater_than", "less_than")) or kind == "finite_number":
        return "config-range"
    return "config-type" if kind in REASONS else "config-value"


def _reason(item: Any, value: Any) -> str:
    return REASONS.get(item["type"], f"is refused: {item['msg']}")


def _hint(kind: str, key: str, value: object, allowed: str) -> str:
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type"):
        if value.lower() in ("yes", "no", "on", "off"):
            return "write true or false"
        return "write the value without quotes" if _is_number(value) else f"give {allowed}"
    if kind == "string_type":
        text = str(value).lower() if isinstance(value, bool) else value
        shell = "" if key[-1].isdigit() else f" in YAML, \"{key}='{text}'\" in a shell"
        quoted = f"put it in quotes: '{text}'{shell}"
        return quoted if not isinstance(value, (dict, list, type(None))) else "give a single text"
    if kind in ("tuple_type",):
        return f"write a list: [{value}]" if not isinstance(value, dict) else "write a list: [...]"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        example = key.split(".")[-1]
        if isinstance(value, str) and "." not in key:
            return f"choose a preset as 'presets: {{{key}: {value}}}' in a file, or {key}={value} on the command line"
        if isinstance(value, str) and ":" in value:
            return f"quote it, since shells expand braces: '{key}={{NAME: VALUE, NAME: VALUE}}'"
        if example.isdigit() or kind == "dict_type":
            return "write a mapping: {KEY: VALUE}"
        return f"set the keys below it, as {key}.KEY=VALUE or '{example}: {{KEY: VALUE}}'"
    if kind == "finite_number":
        return "give a finite number" + (", or null to disable it" if "null" in allowed else "")
    one = "one of: " if kind == "literal_error" and ", " in allowed else ""
    return f"give {one}{allowed}" if allowed else f"see `embodrl explain {key}`"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.lower() in ("true", "false")
    return True


def unknown_key(
    key: str, origin: str, schema: type[Config], verb: Verb | None = None, value: object = None
) -> ConfigProblem:
    """Return the problem of a key that the schema lacks; settings of the verb are suggested first.

    The nearest key is only named, unless the key is a misspelling of it and the value fits: setting a key other than
    the intended one would silently change the run.
    """
    section, _, name = key.rpartition(".")
    schema = with_every_section(schema)
    model = section_model(section, schema)
    names = list(model.model_fields) if model is not None else []
    known = schema_keys(schema)
    own = [] if verb is None else settings_of(verb, schema)
    elsewhere = [full for full in known if full.rpartition(".")[2] == name]
    near = nearest(name, names)
    meant = MEANT.get(name.lower(), "") if section == "" and name not in Config.model_fields else ""
    if meant in known:
        near = meant
    elif elsewhere and (not near or section == ""):
        near = min(elsewhere, key=lambda full: (full not in own, full.count(".")))
    elif near and section:
        near = f"{section}.{near}"
    if not near:
        # A distant name in another section does not help, so it has to be nearer than one in the same section.
        near = _of_a_near_name(name, own) or _of_a_near_name(name, known)
    where = f"the section '{section}'" if section else "the configuration"
    leaf = near.rpartition(".")[2]
    listed = _lists_keys(section if names else "")
    hint = f"remove it; {listed}"
    if (near and near == meant) or (is_misspelt(name, leaf) and _accepts(near, value, schema)):
        hint = f"write {near}"
    elif near:
        hint = f"{listed}; the nearest name may mean something else"
    if not section and near in names and is_misspelt(name, near) and model_of(schema.model_fields[near].annotation):
        hint = f"write {near}.KEY=VALUE, or {near}=PRESET for a preset"
    return ConfigProblem(key, f"no such key in {where}", origin, ", ".join(names), near, hint, "config-unknown-key")


def _lists_keys(section: str) -> str:
    """Return the command that lists the keys of a section, or "" for the configuration itself."""
    return f"`embodrl explain {section}` lists its keys" if section else "`embodrl config show` prints all keys"


def _accepts(key: str, value: object, schema: type[BaseModel]) -> bool:
    section, _, name = key.rpartition(".")
    model = section_model(section, schema)
    if model is None:
        return False
    try:
        model.model_validate_json(json.dumps({name: value}))
    except ValidationError as error:  # other fields of the section may be missing
        return all(item["loc"][:1] != (name,) for item in error.errors(include_url=False))
    return True


def _of_a_near_name(name: str, keys: list[str]) -> str:
    leaf = nearest(name, sorted({full.rpartition(".")[2] for full in keys}), cutoff=0.75)
    return next((full for full in keys if full.rpartition(".")[2] == leaf), "") if leaf else ""


def _unknown_here(key: str, origin: str, schema: type[Config], tree: Node, verb: Verb | None) -> ConfigProblem:
    """Return the problem of an unknown key, considering keys of other systems and of the chosen simulator."""
    node = lookup(tree, key)
    problem = unknown_key(key, origin, schema, verb, None if node is None else node.plain())
    known = key_advice(key, lambda full: lookup(tree, full) is not None)
    if known is not None:
        return replace(problem, nearest=known[0], hint=known[1])
    chosen = lookup(tree, "env.env_type")
    name = DEFAULT_ENV if chosen is None else str(chosen.value)
    if key.startswith("env.") and not problem.nearest and name in ENVS and ENVS.entry(name).own_settings:
        return replace(problem, hint=ENVS.entry(name).own_settings.format(name=key.removeprefix("env.")))
    return problem


def section_model(key: str, schema: type[BaseModel]) -> type[BaseModel] | None:
    """Return the schema class of a section; list indices are skipped."""
    model: type[BaseModel] | None = schema
    for part in [p for p in key.split(".") if p and not p.isdigit()]:
        if model is None or part not in model.model_fields:
            return None
        model = model_of(model.model_fields[part].annotation)
    return model


def model_of(annotation: object) -> type[BaseModel] | None:
    """Return the section class inside an annotation, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := model_of(arg)) is not None), None)


def schema_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted names of all keys and sections."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        keys.append(prefix + name)
        inner = model_of(info.annotation)
        if inner is not None:
            keys += schema_keys(inner, f"{prefix}{name}.")
    return keys


def allowed_values(key: str, schema: type[BaseModel]) -> tuple[str, list[str]]:
    """Return the allowed values of a key in words, and its options if it is an enumeration."""
    parts = key.split(".")
    indices = 0
    while parts and parts[-1].isdigit():
        parts.pop()
        indices += 1
    section = ".".join(parts[:-1])
    name = parts[-1] if parts else ""
    model = section_model(section, schema)
    if model is None or name not in model.model_fields:
        return "", []
    info = model.model_fields[name]
    annotation: object = info.annotation
    for _ in range(indices):
        inner = [arg for arg in get_args(annotation) if arg is not Ellipsis]
        annotation = inner[0] if inner else annotation
    metadata = [] if indices else list(info.metadata)
    return in_words(annotation, metadata), options_of(annotation, metadata)


def options_of(annotation: object, metadata: Sequence[Any] = ()) -> list[str]:
    """Return the literal values in an annotation, as written in YAML, and the names of a registry."""
    named = next((found for found in metadata if isinstance(found, NameOf)), None)
    if named is not None:
        return named.names()
    if get_origin(annotation) is typing.Annotated:
        base, *extra = get_args(annotation)
        return options_of(base, extra)
    if get_origin(annotation) is Literal:
        return [_yaml(value) for value in get_args(annotation)]
    if get_origin(annotation) in (Union, types.UnionType):
        return [option for arg in get_args(annotation) for option in options_of(arg)]
    return []


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


NAMES: dict[object, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def _bound(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def in_words(annotation: object, metadata: list[Any]) -> str:
    """Describe a type and its bounds in words."""
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        base, *extra = get_args(annotation)
        return in_words(base, [*extra, *metadata])
    if origin in (Union, types.UnionType):
        return " or ".join(in_words(arg, metadata if arg is not type(None) else []) for arg in get_args(annotation))
    named = next((found for found in metadata if isinstance(found, NameOf)), None)
    if named is not None:
        return ", ".join(named.names())
    if origin is Literal:
        return ", ".join(_yaml(value) for value in get_args(annotation))
    bounds = [item for meta in metadata for item in [*getattr(meta, "metadata", []), meta]]
    limits = [
        f"{word} {_bound(getattr(bound, name))}"
        for bound in bounds
        for name, word in BOUNDS.items()
        if hasattr(bound, name)
    ]
    if origin is tuple:
        args = get_args(annotation)
        many = len(args) == 2 and args[1] is Ellipsis
        least = next((bound.min_length for bound in bounds if hasattr(bound, "min_length")), 0)
        number = (f"at least {least}" if least else "any number of") if many else str(len(args))
        return f"a list of {number} item{'s' if number != 'at least 1' else ''}, each {in_words(args[0], [])}"
    if origin is dict:
        return "a mapping of text to text"
    name = NAMES.get(annotation, "")
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with the keys {', '.join(annotation.model_fields)}"
    return " ".join([name, " and ".join(limits)]).strip()
