"""`embodrl resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.common import Debug, Overrides, Trust, execute


def resume(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="directory of the run", show_default=False)],
    overrides: Overrides = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Continue a run from its last good checkpoint.

    \b
    Examples:
      embodrl resume outputs/my-run
      embodrl resume outputs/my-run runner.max_iterations=120
    """

    def action() -> int | None:
        from embodrl.runs import sft, train

        verb = sft if sft.is_sft_run(directory) else train
        return verb.resume(directory, overrides or [], trust)

    execute(action, debug)
