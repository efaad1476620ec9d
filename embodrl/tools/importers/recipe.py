"""Reads recipes in Hydra's form as plain YAML: instantiates nothing and runs no resolver."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from embodrl.config.nodes import MAX_TEXT, parse_scalar, read_yaml
from embodrl.errors import ConfigError

MAX_DEFAULTS = 4
"""Limit on nested includes."""
MAX_FILES = 64
"""Limit on included files of a recipe; further ones count as missing."""
MAX_REFERENCES = 8
"""Limit on nested interpolations."""
_DEFAULT = re.compile(r"([\w-]+(?:/[\w-]+)*)/([\w.-]+)(?:@([\w.]+))?")
_REFERENCE = re.compile(r"\$\{(\.*)([^${}]*)\}")


@dataclass
class HydraRecipe:
    """A recipe with its included files.

    Attributes:
        values: dotted key -> value; lists are values.
        missing: entries of ``defaults`` without a file.
        unresolved: keys whose interpolation points outside the recipe.
    """

    values: dict[str, object] = field(default_factory=dict[str, object])
    missing: list[str] = field(default_factory=list[str])
    unresolved: list[str] = field(default_factory=list[str])
    num_files: int = 0


def read_recipe(path: Path) -> HydraRecipe:
    """Read a recipe, the files of its ``defaults`` next to it, and its interpolations; raises ConfigError."""
    recipe = HydraRecipe()
    root = path.absolute().parent
    recipe.values = dict(_flat(_read(path, root, recipe, 0)))
    given = dict(recipe.values)
    for key, value in given.items():
        recipe.values[key] = _resolved(key, value, given, recipe)
    return recipe


def _read(path: Path, root: Path, recipe: HydraRecipe, depth: int) -> dict[str, object]:
    node, problems = read_yaml(path, str(path))
    if problems:
        raise ConfigError(problems)
    own = cast("dict[str, object]", node.plain())
    entries = own.pop("defaults", None)
    tree: dict[str, object] = {}
    for entry in cast("list[object]", entries) if isinstance(entries, list) else []:
        _include(entry, tree, root, recipe, depth)
    _merge(tree, own)
    return tree


def _include(entry: object, tree: dict[str, object], root: Path, recipe: HydraRecipe, depth: int) -> None:
    """Merge the file of an entry of ``defaults`` into a tree, at its package."""
    found = _DEFAULT.fullmatch(entry) if isinstance(entry, str) else None
    if found is None:  # _self_, or an override of Hydra's own groups
        return
    group, name, package = found.groups()
    path = root / group / f"{name}.yaml"
    if depth >= MAX_DEFAULTS or recipe.num_files >= MAX_FILES or not path.is_file():
        recipe.missing.append(str(entry))
        return
    recipe.num_files += 1
    inner: dict[str, object] = _read(path, root, recipe, depth + 1)
    for part in reversed((package or group.replace("/", ".")).split(".")):
        inner = dict[str, object]({part: inner})
    _merge(tree, inner)


def _merge(base: dict[str, object], extra: dict[str, object]) -> None:
    for key, value in extra.items():
        present = base.get(key)
        if isinstance(present, dict) and isinstance(value, dict):
            _merge(cast("dict[str, object]", present), cast("dict[str, object]", value))
        else:
            base[key] = value


def _flat(tree: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(cast("dict[str, object]", value), f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _resolved(key: str, value: object, values: dict[str, object], recipe: HydraRecipe) -> object:
    current, place = value, key
    for _ in range(MAX_REFERENCES):
        if not isinstance(current, str) or "${" not in current:
            return current
        whole = _REFERENCE.fullmatch(current)
        if whole is not None and (target := _target(whole, place)) in values:
            current, place = values[target], target
            continue
        # A null part is filled in by RLinf's launch script.
        parts = {found.group(): values.get(_target(found, place)) for found in _REFERENCE.finditer(current)}
        text = _REFERENCE.sub(lambda found, parts=parts: str(parts[found.group()]), current)
        if None in parts.values() or text == current or len(text) > MAX_TEXT:
            break
        current = parse_scalar(text)
    recipe.unresolved.append(key)
    return value


def _target(reference: re.Match[str], key: str) -> str:
    """Return the target of an interpolation at a key: one dot is its own mapping, each further one a level up."""
    dots, name = reference.groups()
    parts = key.split(".")
    return name if not dots else ".".join([*parts[: max(0, len(parts) - len(dots))], name])
