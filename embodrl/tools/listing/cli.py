"""`embodrl list`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.app import choose, one_of
from embodrl.cli.common import ConfigFile, Debug, JsonOutput, Trust, execute
from embodrl.errors import ConfigError, ConfigProblem


class ListedKind(StrEnum):
    """Kinds of names to list."""

    models = "models"
    envs = "envs"
    algorithms = "algorithms"
    pipelines = "pipelines"
    axes = "axes"
    protocols = "protocols"
    presets = "presets"
    experiments = "experiments"


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a preset group after ``presets``."""
    from embodrl.config.presets import groups

    is_presets = ctx.params.get("kind") == ListedKind.presets
    return [name for name in groups() if name.startswith(incomplete)] if is_presets else []


def list_names(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND",
            help=f"{', '.join(ListedKind)}; leave it out for everything",
            show_default=False,
            autocompletion=one_of(ListedKind),
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[GROUP]... [extensions=[MODULE,...]]",
            help="only these preset groups (`list presets env`); modules that register models and environments",
            show_default=False,
            autocompletion=complete_group,
        ),
    ] = None,
    config: ConfigFile = None,
    json_output: JsonOutput = False,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """List models, environments, algorithms, pipelines, axes and protocols of evaluations, presets and recipes.

    \b
    Examples:
      embodrl list
      embodrl list envs --json
      embodrl list presets env
      embodrl list envs 'extensions=[my_package.my_env]'
      embodrl list models --config outputs/my-run
      embodrl list presets --presets ~/my_presets
    """

    def action() -> None:
        first, rest = (None, [kind]) if kind and "=" in kind else (kind, [])
        from embodrl.tools.listing.tables import OF_PRESETS, SECTIONS, as_text, presets

        kinds = [ListedKind(choose(first, ListedKind, "kind"))] if first else list(ListedKind)
        wanted, rest = split_groups(kinds, [*rest, *(settings or [])])
        own = load_extensions(rest, config, trust)
        found = {
            one.value: OF_PRESETS[one.value](own) if one.value in OF_PRESETS else SECTIONS[one.value]() for one in kinds
        }
        if wanted:
            found = {ListedKind.presets.value: presets(own, wanted)}
        if json_output:
            print(
                json.dumps({name: [entry.as_json() for entry in entries] for name, entries in found.items()}, indent=2)
            )
        else:
            print("\n\n".join(f"{name}\n{as_text(entries)}" for name, entries in found.items()))

    execute(action, debug)


def split_groups(kinds: list[ListedKind], words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words after ``presets`` into preset groups and the rest; raises UsageError for an unknown group."""
    from embodrl.config.presets import groups

    named = [word for word in words if "=" not in word] if kinds == [ListedKind.presets] else []
    return [choose(word, groups(), "group of presets") for word in named], [word for word in words if word not in named]


def load_extensions(settings: list[str], config_file: Path | None = None, trust: bool = False) -> tuple[Path, ...]:
    """Import the modules of ``extensions``, from the command line, a file or a run; return preset directories.

    Raises:
        ConfigError: another setting is given, a module can't be imported, or it is named by another user's run.
    """
    from embodrl.config.presets import DIRS, directory_problems, own_directories

    if not settings and config_file is None:  # avoids the imports of composing
        own = own_directories()
        if problems := directory_problems(own):
            raise ConfigError(problems)
        return own
    from embodrl.config.compose import compose, parse_arguments
    from embodrl.config.load import import_extensions, refuse_untrusted_code

    problems = [
        ConfigProblem(
            argument.key,
            "is not a setting of `embodrl list`",
            str(argument.origin),
            "extensions",
            hint="give extensions=[MODULE,...], or no settings",
            code="config-unknown-key",
        )
        for argument in parse_arguments(settings)[0]
        if argument.key not in ("extensions", DIRS)
    ]
    if problems:
        raise ConfigError(problems)
    composition = compose(settings, config_file)
    refuse_untrusted_code(composition, trust)
    problems = composition.problems + import_extensions(composition.tree)[0]
    if problems:
        raise ConfigError(problems)
    return composition.own_presets
