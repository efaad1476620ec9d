"""The tables of `embodrl list`; importing this loads the schema, which no other verb's help needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from pydantic import BaseModel

from embodrl.config import presets as preset_files
from embodrl.config.nodes import lookup
from embodrl.config.schema import EnvConfig, ModelConfig, env_settings, model_settings
from embodrl.specs import ADVANTAGES, ENVS, LOSSES, MODELS, PIPELINES, PROTOCOLS, SimulatorSpec, Spec

MODEL_FACTS = {
    "sizes": "parameters",
    "actions": "actions",
    "rl": "RL",
    "trainable": "trainable",
    "checkpoint": "checkpoint",
}
"""Listed facts of a spec, with their labels."""
INSTALL = "to install"
SETTINGS = "settings"
ENV_FACTS = {"actions": "actions", "camera_list": "cameras", "experts": "experts", "verified": "verified"}


@dataclass(frozen=True)
class ListedName:
    """A selectable name with facts about it: labels and texts; several tasks share a label."""

    name: str
    description: str
    facts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def as_json(self) -> dict[str, object]:
        """Return it as JSON values; the texts of a label are a list."""
        facts: dict[str, list[str]] = {}
        for label, text in self.facts:
            facts.setdefault(label, []).append(text)
        return {"name": self.name, "description": self.description, **facts}


def as_text(entries: list[ListedName]) -> str:
    """Return names and descriptions in two columns, and facts below the descriptions."""
    name_width = max(len(entry.name) for entry in entries)
    label_width = max((len(label) for entry in entries for label, _ in entry.facts), default=0)
    lines: list[str] = []
    for entry in entries:
        lines.append(f"  {entry.name:<{name_width}}  {entry.description}")
        lines += [f"  {'':<{name_width}}  {label:<{label_width}}  {text}" for label, text in entry.facts]
    return "\n".join(line.rstrip() for line in lines)


def facts_of(spec: Spec, labels: dict[str, str]) -> list[tuple[str, str]]:
    """Return the known facts of a spec, with their labels."""
    found: list[tuple[str, str]] = []
    for key, label in labels.items():
        fact: str | tuple[str, ...] | None = getattr(spec, key)
        if fact:
            found.append((label, fact if isinstance(fact, str) else ", ".join(fact)))
    return found


def settings_of(own: type[BaseModel], common: type[BaseModel], section: str) -> list[tuple[str, str]]:
    """Return, as a fact, the settings that a class adds to the common ones."""
    names = [f"{section}.{name}" for name in own.model_fields if name not in common.model_fields]
    return [(SETTINGS, ", ".join(names))] if names else []


def models() -> list[ListedName]:
    """Return the registered models with their facts."""
    return [
        ListedName(
            spec.name,
            spec.description,
            [*facts_of(spec, MODEL_FACTS), *settings_of(model_settings(spec.name), ModelConfig, "model")],
        )
        for spec in MODELS.all()
    ]


def envs() -> list[ListedName]:
    """Return the registered environments with their facts and their tasks with instructions."""
    found: list[ListedName] = []
    for spec in ENVS.all():
        facts = [*facts_of(spec, ENV_FACTS), *settings_of(env_settings(spec.name), EnvConfig, "env")]
        if spec.isolated:
            facts.append((INSTALL, f"embodrl env install {spec.name}"))
        elif spec.extra:
            facts.append((INSTALL, f"pip install 'embodrl[{spec.extra}]'"))
        found.append(ListedName(spec.name, spec.description, facts + labelled_tasks(spec)))
    return found


def labelled_tasks(spec: SimulatorSpec) -> list[tuple[str, str]]:
    """Return the tasks of an environment with their instructions, by suite where it has suites."""
    tasks = {task: task + f": {text}" * bool(text) for task, text in spec.instructions().items()}
    result: list[tuple[str, str]] = []
    for name, suite in spec.suites.items():
        result.append(("suite", f"env.suite={name}, {len(suite.tasks)} tasks"))
        result += [("task", tasks.pop(task)) for task in suite.tasks]
    return result + [("task", text) for text in tasks.values()]


def algorithms() -> list[ListedName]:
    """Return the advantage estimators and losses."""
    return [
        ListedName(f"{key}={spec.name}", spec.description)
        for key, registry in (("adv_type", ADVANTAGES), ("loss_type", LOSSES))
        for spec in registry.all()
    ]


def pipelines() -> list[ListedName]:
    """Return the built-in pipelines."""
    return [ListedName(spec.name, spec.description) for spec in PIPELINES.all()]


def axes() -> list[ListedName]:
    """Return the axes along which evaluations can perturb each environment."""
    found: list[ListedName] = []
    for spec in ENVS.all():
        for name, axis in spec.axes.items():
            facts = [("tasks", ", ".join(axis.tasks))] if axis.tasks is not None else []
            found.append(ListedName(f"{spec.name} axes={name}", f"{axis.group}: {axis.description}", facts))
    return found


def protocols() -> list[ListedName]:
    """Return the evaluation protocols with their settings and sources."""
    found: list[ListedName] = []
    for spec in PROTOCOLS.all():
        facts = [("", _assignments(spec.settings))]
        facts += [(name, _assignments(settings)) for name, settings in spec.models.items()]
        for name, limits in spec.step_limits.items():
            steps = ", ".join(f"{suite} {steps}" for suite, steps in limits.items())
            facts.append((f"steps, {name}" if name else "steps", steps))
        facts.append(
            ("episodes", f"{spec.episodes_per_task} per task, cameras of {spec.camera_px} x {spec.camera_px} pixels")
        )
        facts += [("differs", spec.differs)] if spec.differs else []
        found.append(ListedName(spec.name, spec.description, [*facts, ("source", spec.source)]))
    return found


def _assignments(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def presets(own: Sequence[Path] = (), groups: Sequence[str] = ()) -> list[ListedName]:
    """Return presets with the first line of their comment; also the file for presets in ``own``.

    Only the requested ``groups``; empty for all.
    """
    found: list[ListedName] = []
    for group in groups or preset_files.groups():
        for name in preset_files.presets(group, own):
            path = preset_files.preset_file(group, name, own)
            facts = [] if preset_files.is_shipped(path) else [("file", str(path))]
            found.append(ListedName(f"{group}={name}", preset_files.describe(group, name, own), facts))
    return found


def experiments(own: Sequence[Path] = ()) -> list[ListedName]:
    """Return the experiment presets, with the stages of recipes and their known results."""
    found: list[ListedName] = []
    for name in preset_files.presets("experiment", own):
        recipe = lookup(preset_files.load_presets({"experiment": name}, own)[0], "recipe")
        facts: list[tuple[str, str]] = []
        if recipe is not None:
            stages = ", ".join(cast(list[str], recipe.children["stages"].plain()))
            facts = [("stages", stages), ("expected", str(recipe.children["expected"].value))]
            facts.append(("start", f"embodrl run experiment={name}"))
        found.append(ListedName(name, preset_files.describe("experiment", name, own), facts))
    return found


SECTIONS = {
    "models": models,
    "envs": envs,
    "algorithms": algorithms,
    "pipelines": pipelines,
    "axes": axes,
    "protocols": protocols,
}
"""Tables that include presets and experiments, which may be the user's own."""
OF_PRESETS = {"presets": presets, "experiments": experiments}
