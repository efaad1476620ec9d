"""`embodrl export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.common import Debug, Overrides, Trust, execute


def export(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN", help="a run, or RUN/checkpoints/step_N", show_default=False)
    ],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="a new directory", show_default=False)],
    overrides: Overrides = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Write the policy of a checkpoint in its public layout.

    Of a run it is the newest intact checkpoint; sharded ones are put together.

    \b
    Examples:
      embodrl export outputs/my-run outputs/my-policy
      embodrl export outputs/my-run/checkpoints/step_20 outputs/policy-20
      embodrl eval model.warm_start=outputs/my-policy
    """

    def action() -> None:
        from embodrl.runs.export import export_checkpoint

        checkpoint = export_checkpoint(directory, output, overrides or [], trust)
        print(f"{output}: the policy of {checkpoint.path}")

    execute(action, debug)
