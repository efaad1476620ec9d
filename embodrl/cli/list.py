"""`embodrl list`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from pydantic import BaseModel

from embodrl.cli.app import choose, one_of
from embodrl.cli.common import Debug, execute
from embodrl.config.schema import EnvConfig, ModelConfig, env_settings, model_settings
from embodrl.errors import ConfigError, ConfigProblem
from embodrl.registry import Registry
from embodrl.specs import (
    ADVANTAGES,
    ENVS,
    LOSSES,
    MODELS,
    PIPELINES,
    PROTOCOLS,
    FunctionSpec,
    PipelineSpec,
    SimulatorSpec,
    Spec,
)

MODEL_FACTS = {
    "sizes": "parameters",
    "actions": "actions",
    "rl": "RL",
    "trainable": "trainable",
    "checkpoint": "checkpoint",
}
"""Facts of a spec that are listed, with their labels."""
INSTALL = "to install"
SETTINGS = "settings"
ENV_FACTS = {"actions": "actions", "camera_list": "cameras", "experts": "experts", "verified": "verified"}


class Kind(StrEnum):
    """What is listed."""

    models = "models"
    envs = "envs"
    algorithms = "algorithms"
    pipelines = "pipelines"
    protocols = "protocols"
    presets = "presets"


def list_names(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND",
            help=f"{', '.join(Kind)}; leave it out for everything",
            show_default=False,
            autocompletion=one_of(Kind),
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[extensions=[MODULE,...]]",
            help="modules that register models and environments",
            show_default=False,
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """List models, environments, algorithms, pipelines, evaluation protocols and presets.

    \b
    Examples:
      embodrl list
      embodrl list envs
      embodrl list presets
      embodrl list envs 'extensions=[my_package.my_env]'
    """

    def action() -> None:
        first, rest = (None, [kind]) if kind and "=" in kind else (kind, [])
        load_extensions([*rest, *(settings or [])])
        kinds = [Kind(choose(first, Kind, "kind"))] if first else list(Kind)
        print("\n\n".join(f"{one.value}\n{SECTIONS[one]()}" for one in kinds))

    execute(action, debug)


def load_extensions(settings: list[str]) -> None:
    """Import the modules of ``extensions=[...]``.

    Raises:
        ConfigError: another setting is given, or a module can't be imported.
    """
    from embodrl.config.compose import parse_arguments
    from embodrl.config.load import import_extensions
    from embodrl.config.nodes import Node, Origin, from_plain

    arguments, problems = parse_arguments(settings)
    tree = Node({}, Origin("argument"))
    for argument in arguments:
        if argument.key == "extensions":
            tree.children["extensions"] = from_plain(argument.value, argument.origin)
        else:
            message = "is no setting of `embodrl list`"
            hint = "give extensions=[MODULE,...], or no setting"
            problems.append(
                ConfigProblem(
                    argument.key, message, str(argument.origin), "extensions", hint=hint, code="config-unknown-key"
                )
            )
    problems += import_extensions(tree)[0]
    if problems:
        raise ConfigError(problems)


def rows(table: list[tuple[str, str]]) -> str:
    """Return names and descriptions in two columns."""
    width = max(len(name) for name, _ in table)
    return "\n".join(f"  {name:<{width}}  {text}".rstrip() for name, text in table)


def entries(registry: Registry[FunctionSpec] | Registry[PipelineSpec]) -> list[tuple[str, str]]:
    """Return the names and descriptions of a registry."""
    return [(name, registry.entry(name).description) for name in registry]


def facts_of(spec: Spec, labels: dict[str, str]) -> dict[str, str]:
    """Return the facts of a spec that are known, by label."""
    found: dict[str, str] = {}
    for key, label in labels.items():
        fact: str | tuple[str, ...] | None = getattr(spec, key)
        if fact:
            found[label] = fact if isinstance(fact, str) else ", ".join(fact)
    return found


def settings_of(own: type[BaseModel], common: type[BaseModel], section: str) -> list[str]:
    """Return the settings that a class adds to those of all."""
    return [f"{section}.{name}" for name in own.model_fields if name not in common.model_fields]


def models() -> str:
    """Return the registered models, each with what is known about it."""
    table: list[tuple[str, str]] = []
    for spec in MODELS.all():
        facts = facts_of(spec, MODEL_FACTS)
        own = settings_of(model_settings(spec.name), ModelConfig, "model")
        facts |= {SETTINGS: ", ".join(own)} if own else {}
        width = max(map(len, MODEL_FACTS.values()))
        table.append((spec.name, spec.description))
        table += [("", f"{label:<{width}}  {fact}") for label, fact in facts.items()]
    return rows(table)


def envs() -> str:
    """Return the registered environments, each with what is known about it, and its tasks with their instructions."""
    table: list[tuple[str, str]] = []
    width = max(map(len, [*ENV_FACTS.values(), INSTALL]))
    for spec in ENVS.all():
        facts = facts_of(spec, ENV_FACTS)
        own = settings_of(env_settings(spec.name), EnvConfig, "env")
        facts |= {SETTINGS: ", ".join(own)} if own else {}
        if spec.extra:
            facts[INSTALL] = f"pip install 'embodrl[{spec.extra}]'"
        if spec.isolated:
            facts[INSTALL] = f"embodrl env install {spec.name}"
        table.append((spec.name, spec.description))
        table += [("", f"{label:<{width}}  {fact}") for label, fact in facts.items()]
        table += [("", f"{label:<{width}}  {text}") for label, text in labelled_tasks(spec)]
    return rows(table)


def labelled_tasks(spec: SimulatorSpec) -> list[tuple[str, str]]:
    """Return the tasks of an environment with their instructions, below the suites where there are any."""
    tasks = {task: task + f": {text}" * bool(text) for task, text in spec.instructions().items()}
    result: list[tuple[str, str]] = []
    for name, suite in spec.suites.items():
        result.append(("suite", f"env.suite={name}, {len(suite.tasks)} tasks"))
        result += [("task", tasks.pop(task)) for task in suite.tasks]
    return result + [("task", text) for text in tasks.values()]


def algorithms() -> str:
    """Return the advantage estimators and losses."""
    return rows(
        [(f"adv_type={name}", text) for name, text in entries(ADVANTAGES)]
        + [(f"loss_type={name}", text) for name, text in entries(LOSSES)]
    )


def pipelines() -> str:
    """Return the built-in pipelines."""
    return rows(entries(PIPELINES))


def protocols() -> str:
    """Return the evaluation protocols, each with what it sets and where that is written down."""
    table: list[tuple[str, str]] = []
    for spec in PROTOCOLS.all():
        facts = {"": ", ".join(f"{key}={value}" for key, value in spec.settings.items())}
        facts |= {
            name: ", ".join(f"{key}={value}" for key, value in settings.items())
            for name, settings in spec.models.items()
        }
        facts |= {
            f"steps{f', {name}' * bool(name)}": ", ".join(f"{suite} {steps}" for suite, steps in limits.items())
            for name, limits in spec.step_limits.items()
        }
        facts["episodes"] = f"{spec.episodes_per_task} a task, cameras of {spec.camera_px} x {spec.camera_px} pixels"
        facts |= {"differs": spec.differs} if spec.differs else {}
        facts["source"] = spec.source
        width = max(map(len, facts))
        table.append((spec.name, spec.description))
        table += [("", f"{label:<{width}}  {fact}") for label, fact in facts.items()]
    return rows(table)


def presets() -> str:
    """Return the presets of every group with the first line of their comment."""
    from embodrl.config import compose

    table: list[tuple[str, str]] = []
    for group in compose.groups():
        table += [(f"{group}={name}", compose.describe(group, name)) for name in compose.presets(group)]
    return rows(table)


SECTIONS = {
    Kind.models: models,
    Kind.envs: envs,
    Kind.algorithms: algorithms,
    Kind.pipelines: pipelines,
    Kind.protocols: protocols,
    Kind.presets: presets,
}
