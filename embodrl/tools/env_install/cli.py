"""`embodrl env install`, `list` and `remove`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.app import Verbs, add, make_app
from embodrl.cli.common import Debug, execute

app = make_app(cls=Verbs)

Name = Annotated[str, typer.Argument(metavar="NAME", help="simulator: libero", show_default=False)]
Prefix = Annotated[
    Path | None,
    typer.Option(
        "--prefix", metavar="DIR", help="target directory; default: in the cache directory", show_default=False
    ),
]


@app.callback()
def about() -> None:
    """Manage isolated Python environments of simulators; serve simulators to runs on other machines.

    \b
    Examples:
      embodrl env install libero
      embodrl env list
      embodrl env serve --port 5700
    """


def install(
    name: Name,
    prefix: Prefix = None,
    force: Annotated[bool, typer.Option("--force", help="replace an existing environment", show_default=False)] = False,
    debug: Debug = False,
) -> None:
    """Create a virtual environment with a simulator's pinned packages; keeps an existing one.

    Packages come from pip's configured index.

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
        print("embodrl doctor checks it by making one environment and rendering one frame")

    execute(action, debug)


def list_all(debug: Debug = False) -> None:
    """List the simulators that can have an isolated environment, and its directory."""

    def action() -> None:
        from embodrl.preflight.isolated import list_environments

        for found in list_environments():
            print(f"{found.name:<10} {found.state:<10} {found.prefix}")

    execute(action, debug)


def remove(name: Name, prefix: Prefix = None, debug: Debug = False) -> None:
    """Remove a simulator's environment."""

    def action() -> None:
        from embodrl.preflight.isolated import remove as delete

        delete(name, prefix, print)

    execute(action, debug)


add(app, install)
add(app, list_all, "list")
add(app, remove)
