"""`embodrl config show`, `validate` and `diff`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from embodrl.cli.app import add, make_app
from embodrl.cli.common import ConfigFile, Debug, Overrides, Trust, execute, load, say_if_random, show_notes
from embodrl.errors import ConfigError, ConfigProblem, EmbodrlError

if TYPE_CHECKING:
    from collections.abc import Callable

    from embodrl.config import LoadedConfig
    from embodrl.config.schema import Config

app = make_app()

Plain = Annotated[bool, typer.Option("--plain", help="omit the origins", show_default=False)]


@app.callback()
def about() -> None:
    """Inspect a configuration without running anything.

    \b
    Examples:
      embodrl config show env=maniskill_mix runner.seed=3
      embodrl config validate --config my.yaml
      embodrl config diff outputs/run-1 outputs/run-2
    """


def say_what_ran(config: Config) -> None:
    """Name, on stderr, the user's code that checking the configuration has run."""
    rollout = config.rollout
    paths = (config.actor.optim.fn, config.pipeline.fn, config.reward.fn, rollout.agent, rollout.workflow)
    imported = [*config.extensions, *(path for path in paths if path is not None)]
    if imported:
        message = f"imported to check the settings: {', '.join(imported)}"
        hint = "its code at module level has run"
        show_notes([ConfigProblem("extensions", message, hint=hint, code="code-imported")])


def missing_here(loaded: LoadedConfig) -> list[ConfigProblem]:
    """Return what this machine lacks for a valid configuration, as far as can be told without importing a simulator."""
    from embodrl.config.isolated import interpreter_of
    from embodrl.preflight.simulators import require_packages

    env = loaded.config.env
    python = interpreter_of(loaded.config)
    checks: dict[str, Callable[[], object]] = {
        "env.env_type": lambda: require_packages(env.env_type, python, env),
        "cluster.device": lambda: loaded.deployment,
    }
    problems: list[ConfigProblem] = []
    for key, check in checks.items():
        try:
            check()
        except EmbodrlError as error:
            origin = str(loaded.origins.get(key, ""))
            problems.append(ConfigProblem(key, error.message, origin, hint=error.hint, code=error.code))
    return problems


def show(
    overrides: Overrides = None,
    config: ConfigFile = None,
    plain: Plain = False,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Print all values as YAML, each with its origin.

    \b
    Examples:
      embodrl config show env=maniskill model=openvla runner.seed=3
      embodrl config show --config my.yaml --plain > all.yaml
    """

    def action() -> None:
        loaded = load(overrides, config, trust=trust)
        say_what_ran(loaded.config)
        sys.stdout.write(loaded.to_yaml(with_origin=not plain))
        sys.stdout.flush()

    execute(action, debug)


def validate(
    overrides: Overrides = None, config: ConfigFile = None, trust: Trust = False, debug: Debug = False
) -> None:
    """Check a configuration and report all its problems.

    Exit code 0, or 2 with the report on stderr. Checks this machine for simulator packages and GPUs, but not drivers,
    free memory or checkpoint content: see `embodrl doctor` and `embodrl plan train`.

    \b
    Examples:
      embodrl config validate env=maniskill model=openvla actor.global_batch_size=320
      embodrl config validate --config my.yaml
    """

    def action() -> None:
        loaded = load(overrides, config, trust=trust)
        from embodrl.config.explain import summary

        if problems := missing_here(loaded):
            raise ConfigError(problems)

        say_if_random(loaded.config)
        say_what_ran(loaded.config)
        print("The configuration is valid.")
        print(summary(loaded.config))

    execute(action, debug)


def diff(
    first: Annotated[
        str, typer.Argument(metavar="A", help="a run, a YAML file, or presets and values", show_default=False)
    ],
    second: Annotated[
        str,
        typer.Argument(metavar="B", help="the same; if omitted, A is compared with the defaults", show_default=False),
    ] = "",
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Print the settings that differ between two configurations.

    A and B are runs, YAML files, or settings in quotes. Exits 0 whether there are differences or not.

    \b
    Examples:
      embodrl config diff outputs/run-1 outputs/run-2
      embodrl config diff outputs/run-1
      embodrl config diff mine.yaml "env=maniskill_pull runner.seed=3"
    """

    def action() -> None:
        from embodrl.config.explain import differences, side

        one, other = (side(text, trust) for text in ((first, second) if second else ("", first)))
        rows = differences(one, other)
        names = (first, second) if second else ("default", first)
        width = max([len(key) for key, _, _ in rows] + [3])
        left = max([len(text) for _, text, _ in rows] + [len(names[0])])
        for key, a, b in [("key", *names), *rows] if rows else []:
            print(f"{key:<{width}}  {a:<{left}}  {b}")
        if not rows:
            print("no differences")

    execute(action, debug)


add(app, show)
add(app, validate)
add(app, diff)
