"""`embodrl list`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from embodrl.cli.app import choose, one_of
from embodrl.cli.common import Debug, execute
from embodrl.registry import ADVANTAGES, ENVS, LOSSES, MODELS, PIPELINES, Registry, env_tasks

MODEL_FACTS = {
    "sizes": "parameters",
    "actions": "actions",
    "rl": "RL",
    "trainable": "trainable",
    "checkpoint": "checkpoint",
}
"""Facts of the registry that are listed, with their labels."""
INSTALL = "to install"
ENV_FACTS = {"actions": "actions", "camera_list": "cameras", "experts": "experts", "verified": "verified"}


class Kind(StrEnum):
    """What is listed."""

    models = "models"
    envs = "envs"
    algorithms = "algorithms"
    pipelines = "pipelines"
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
    debug: Debug = False,
) -> None:
    """List models, environments, algorithms, pipelines and presets.

    \b
    Examples:
      embodrl list
      embodrl list envs
      embodrl list presets
    """

    def action() -> None:
        kinds = [Kind(choose(kind, Kind, "kind"))] if kind else list(Kind)
        print("\n\n".join(f"{one.value}\n{SECTIONS[one]()}" for one in kinds))

    execute(action, debug)


def rows(table: list[tuple[str, str]]) -> str:
    """Return names and descriptions in two columns."""
    width = max(len(name) for name, _ in table)
    return "\n".join(f"  {name:<{width}}  {text}".rstrip() for name, text in table)


def entries(registry: Registry) -> list[tuple[str, str]]:
    """Return the names and descriptions of a registry."""
    return [(name, registry.entry(name).description) for name in registry]


def models() -> str:
    """Return the registered models, each with what is known about it."""
    table: list[tuple[str, str]] = []
    for name in MODELS:
        entry = MODELS.entry(name)
        facts = {label: entry.facts[key] for key, label in MODEL_FACTS.items() if key in entry.facts}
        width = max(map(len, MODEL_FACTS.values()))
        table.append((name, entry.description))
        table += [
            ("", f"{label:<{width}}  {fact if isinstance(fact, str) else ', '.join(fact)}")
            for label, fact in facts.items()
        ]
    return rows(table)


def envs() -> str:
    """Return the registered environments, each with what is known about it, and its tasks with their instructions."""
    table: list[tuple[str, str]] = []
    width = max(map(len, [*ENV_FACTS.values(), INSTALL]))
    for name in ENVS:
        entry = ENVS.entry(name)
        facts = {label: entry.facts[key] for key, label in ENV_FACTS.items() if key in entry.facts}
        if "extra" in entry.facts:
            facts[INSTALL] = f"pip install 'embodrl[{entry.facts['extra']}]'"
        if "isolated" in entry.facts:
            facts[INSTALL] = f"embodrl env install {name}"
        table.append((name, entry.description))
        table += [("", f"{label:<{width}}  {fact}") for label, fact in facts.items()]
        table += [("", f"{label:<{width}}  {text}") for label, text in labelled_tasks(name)]
    return rows(table)


def labelled_tasks(name: str) -> list[tuple[str, str]]:
    """Return the tasks of an environment with their instructions, below the suites where there are any."""
    tasks = {task: task + f": {text}" * bool(text) for task, text in env_tasks(name).items()}
    suites: dict[str, Any] = ENVS.entry(name).facts.get("suites", {})
    result: list[tuple[str, str]] = []
    for suite, facts in suites.items():
        result.append(("suite", f"env.suite={suite}, {len(facts['tasks'])} tasks"))
        result += [("task", tasks.pop(task)) for task in facts["tasks"]]
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
    Kind.presets: presets,
}
