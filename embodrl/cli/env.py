"""`embodrl env install`, `list` and `remove`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.common import Debug, execute

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(help="the simulator: libero", show_default=False)]
Prefix = Annotated[
    Path | None,
    typer.Option("--prefix", metavar="DIR", help="where; a cache directory of yours if left out", show_default=False),
]


@app.callback()
def about() -> None:
    """Python environments of their own for simulators whose packages clash with the rest.

    \b
    Examples:
      embodrl env install libero
      embodrl env list
    """


@app.command()
def install(
    name: Name,
    prefix: Prefix = None,
    force: Annotated[bool, typer.Option("--force", help="make it anew", show_default=False)] = False,
    debug: Debug = False,
) -> None:
    """Make a virtual environment with a simulator's pinned packages; what is there already stays.

    Packages come from where pip is configured to look.

    \b
    Examples:
      embodrl env install libero
      embodrl env install libero --prefix /data/libero
    """

    def action() -> None:
        from embodrl.config.isolated import default_prefix, python_of
        from embodrl.preflight.isolated import install as make

        python = make(name, prefix, force, lambda line: print(line, flush=True))
        at_default = python == python_of(default_prefix(name))
        print(
            f"use it with env={name} (env.python=auto finds it)" if at_default else f"use it with env.python={python}"
        )
        if not at_default:
            print(f"or: export EMBODRL_{name.upper()}_ENV={python.parents[1]}, and env.python=auto finds it")
        print("embodrl doctor checks it by making one environment and drawing one frame")

    execute(action, debug)


@app.command("list")
def list_all(debug: Debug = False) -> None:
    """List the simulators that can have an environment of their own, and where it is."""

    def action() -> None:
        from embodrl.preflight.isolated import list_environments

        for found in list_environments():
            print(f"{found.name:<10} {found.state:<10} {found.prefix}")

    execute(action, debug)


@app.command()
def remove(name: Name, prefix: Prefix = None, debug: Debug = False) -> None:
    """Remove a simulator's environment."""

    def action() -> None:
        from embodrl.preflight.isolated import remove as delete

        delete(name, prefix, print)

    execute(action, debug)
