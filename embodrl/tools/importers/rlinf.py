"""Translates an RLinf recipe to our settings, with the outcome of each of its keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, TypeAdapter, ValidationError

from embodrl.config.check import schema_of, section_model
from embodrl.config.compose import check_choice, compose
from embodrl.config.nodes import Node, lookup
from embodrl.config.rlinf import (
    RlinfKey,
    Settings,
    UnsupportedValue,
    algorithm_preset,
    env_preset,
    find_key,
    model_preset,
)
from embodrl.tools.importers.recipe import HydraRecipe, read_recipe

Group = Literal["mapped", "default", "meaningless", "unsupported", "unread"]
GROUPS: dict[Group, str] = {
    "mapped": "mapped",
    "default": "equal to our default",
    "meaningless": "not applicable",
    "unsupported": "unsupported",
    "unread": "not read by RLinf either",
}


@dataclass(frozen=True)
class KeyAnswer:
    """Outcome of a key of the recipe: our settings as ``key=value``, or a note on why there are none."""

    key: str
    value: object
    group: Group
    ours: str = ""
    note: str = ""

    def line(self) -> str:
        value = "null" if self.value is None else str(self.value)
        shown = value if len(value) <= 60 else f"{value[:57]}..."
        return (
            f"{self.key} = {shown}"
            + (f" -> {self.ours}" if self.ours else "")
            + (f"  ({self.note})" if self.note else "")
        )


@dataclass
class Import:
    """An RLinf recipe translated to our settings.

    Attributes:
        presets: group -> preset; all of them exist.
        missing: unavailable group, suite or tasks -> RLinf's name; the user chooses.
        settings: dotted key -> value, where different from the presets.
        answers: one per key of the recipe.
    """

    recipe: HydraRecipe
    presets: dict[str, str] = field(default_factory=dict[str, str])
    missing: dict[str, str] = field(default_factory=dict[str, str])
    settings: Settings = field(default_factory=dict[str, object])
    answers: list[KeyAnswer] = field(default_factory=list[KeyAnswer])

    def count(self, group: Group) -> int:
        return sum(answer.group == group for answer in self.answers)

    @property
    def num_read(self) -> int:
        return len(self.answers) - self.count("unread")

    @property
    def share(self) -> float:
        """Fraction of the keys read by RLinf that are kept, i.e. not unsupported."""
        return 1.0 - self.count("unsupported") / self.num_read if self.num_read else 1.0

    def document(self) -> dict[str, object]:
        """Return the configuration: ``presets`` and values.

        Names without a counterpart are kept as RLinf's, so that validation fails until the user chooses, rather than
        running something else.
        """
        groups = {group: name for group, name in self.missing.items() if "." not in group}
        tree: dict[str, object] = {"presets": {**self.presets, **groups}}
        refused = {key: [name] if key == "env.tasks" else name for key, name in self.missing.items() if "." in key}
        for key, value in {**self.settings, **refused}.items():
            *sections, name = key.split(".")
            place = tree
            for section in sections:
                place = cast("dict[str, object]", place.setdefault(section, {}))
            place[name] = value
        return tree


def import_rlinf(path: Path) -> Import:
    """Translate a recipe; raises ConfigError if it can't be read."""
    recipe = read_recipe(path)
    chosen = _presets(recipe)
    presets = {group: name for group, name in chosen.items() if _exists(group, name)}
    missing = {group: name for group, name in chosen.items() if group not in presets}
    result = Import(recipe, presets, missing)
    tree = compose([f"{group}={name}" for group, name in presets.items()], None).tree
    for key, value in recipe.values.items():
        answer = _answer(key, value, recipe, tree, result.settings)
        result.answers.append(answer)
        if answer.group == "unsupported" and key in _CHOSEN and "env" in presets:
            result.missing[_CHOSEN[key]] = str(value)
    return result


_CHOSEN = {"env.train.init_params.id": "env.tasks", "env.train.task_suite_name": "env.suite"}
"""Keys that choose the simulation -> our key; without a counterpart, the preset's value would run instead."""


def _exists(group: str, name: str) -> bool:
    return check_choice(group, name, "") is None


def _presets(recipe: HydraRecipe) -> dict[str, str]:
    values = recipe.values
    env = str(values.get("env.train.env_type", values.get("env.eval.env_type", "")))
    model = str(values.get("actor.model.model_type") or values.get("actor.model.model_name") or "")
    loss = str(values.get("algorithm.loss_type") or "")
    chosen = {
        "env": env_preset(values) or env,
        "model": model_preset(values) or model,
        "algorithm": algorithm_preset(values) or loss,
    }
    return {group: name for group, name in chosen.items() if name}


def _answer(key: str, value: object, recipe: HydraRecipe, tree: Node, settings: Settings) -> KeyAnswer:
    entry = find_key(key)
    if entry is None:
        return KeyAnswer(key, value, "unsupported", note="not known; RLinf may have added it since")
    if entry.kind in ("meaningless", "unread"):
        return KeyAnswer(key, value, entry.kind, note=_note(entry))
    if entry.kind == "unsupported":
        group: Group = "default" if value in entry.neutral else "unsupported"
        return KeyAnswer(key, value, group, note="" if group == "default" else _note(entry))
    if key in recipe.unresolved:
        return KeyAnswer(
            key, value, "unsupported", note=f"its interpolation points outside the recipe; set {entry.ours}"
        )
    try:
        found = _with_cameras(entry.settings(value, recipe.values), tree)
    except UnsupportedValue as reason:
        return KeyAnswer(key, value, "unsupported", note=str(reason))
    return _mapped(key, value, found, tree, settings, entry)


def _mapped(key: str, value: object, found: Settings, tree: Node, settings: Settings, entry: RlinfKey) -> KeyAnswer:
    """Keep the settings that differ from the presets, or from another key's request."""
    new = {
        ours: given for ours, given in found.items() if ours in settings or _default(ours, tree) != _comparable(given)
    }
    for ours, given in new.items():
        if reason := _refusal(ours, given, tree):
            return KeyAnswer(key, value, "unsupported", note=f"{ours}={given} is refused: {reason}")
    settings |= new
    if new:
        return KeyAnswer(key, value, "mapped", ", ".join(f"{ours}={given}" for ours, given in new.items()))
    chooses = entry.note.startswith("chooses")
    return KeyAnswer(key, value, "mapped" if chooses else "default", note=entry.note if chooses else "")


def _note(entry: RlinfKey) -> str:
    nearest = f"nearest: {entry.ours}" if entry.ours else ""
    return "; ".join(filter(None, (entry.note, nearest)))


def _with_cameras(found: Settings, tree: Node) -> Settings:
    """Replace partial camera settings by the whole list, since a list in a file replaces the preset's."""
    result = {key: value for key, value in found.items() if not key.startswith("env.cameras.*.")}
    node = lookup(tree, "env.cameras")
    for key, value in found.items():
        if key not in result and node is not None:
            cameras = cast("list[dict[str, object]]", node.plain())
            for camera in cameras:
                camera[key.rpartition(".")[2]] = value
            result["env.cameras"] = cameras
    return result


def _default(key: str, tree: Node) -> object:
    node = lookup(tree, key)
    if node is not None:
        return _comparable(node.plain())
    section, _, name = key.rpartition(".")
    model: type[BaseModel] | None = section_model(section, schema_of(tree))
    if model is None or name not in model.model_fields:
        return None
    return _comparable(model.model_fields[name].get_default(call_default_factory=True))


def _refusal(key: str, value: object, tree: Node) -> str:
    """Return the schema's objection to a value; empty if there is none, or no such field."""
    section, _, name = key.rpartition(".")
    model: type[BaseModel] | None = section_model(section, schema_of(tree))
    if model is None or name not in model.model_fields:
        return ""
    field = model.model_fields[name]
    try:
        TypeAdapter(cast("Any", Annotated)[field.annotation, field]).validate_python(value)
    except ValidationError as error:
        return error.errors()[0]["msg"]
    return ""


def _comparable(value: object) -> object:
    return list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value
