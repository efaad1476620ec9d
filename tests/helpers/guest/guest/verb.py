"""A verb of the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from embodrl.cli.common import Overrides, execute, load


def greet(overrides: Overrides = None, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
    """Greet."""

    def run() -> int:
        name = load(overrides, None, "greet").config.greet.name
        print(f"hello {name.upper() if loud else name}")
        return 0

    execute(run)
