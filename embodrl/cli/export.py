"""`embodrl export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.common import Debug, Overrides, execute


def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="directory of the run", show_default=False)],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="a new directory", show_default=False)],
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Write the policy of a run's newest checkpoint, whole or in shards, in its public layout.

    \b
    Examples:
      embodrl export outputs/my-run outputs/my-policy
      embodrl eval model.warm_start=outputs/my-policy
    """

    def action() -> None:
        from embodrl.runs.export import export_checkpoint

        checkpoint = export_checkpoint(directory, output, overrides or [])
        print(f"{output}: the policy of {checkpoint.path}")

    execute(action, debug)
