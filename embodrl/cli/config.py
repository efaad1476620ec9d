"""`embodrl config show` and `embodrl config validate`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from embodrl.cli.common import ConfigFile, Debug, Overrides, execute, load

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

Plain = Annotated[bool, typer.Option("--plain", help="leave the origins out", show_default=False)]


@app.callback()
def about() -> None:
    """Look at a configuration without running anything.

    \b
    Examples:
      embodrl config show env=maniskill_mix runner.seed=3
      embodrl config validate --config my.yaml
    """


@app.command()
def show(overrides: Overrides = None, config: ConfigFile = None, plain: Plain = False, debug: Debug = False) -> None:
    """Print all values as YAML, each with its origin.

    \b
    Examples:
      embodrl config show env=maniskill model=openvla runner.seed=3
      embodrl config show --config my.yaml --plain > all.yaml
    """

    def action() -> None:
        sys.stdout.write(load(overrides, config).to_yaml(with_origin=not plain))
        sys.stdout.flush()

    execute(action, debug)


@app.command()
def validate(overrides: Overrides = None, config: ConfigFile = None, debug: Debug = False) -> None:
    """Check a configuration and report all its problems.

    Exit code 0, or 2 with the report on stderr.

    \b
    Examples:
      embodrl config validate env=maniskill model=openvla actor.global_batch_size=320
      embodrl config validate --config my.yaml
    """

    def action() -> None:
        from embodrl.config.show import summary

        loaded = load(overrides, config)
        print("The configuration is valid.")
        print(summary(loaded.config))

    execute(action, debug)
