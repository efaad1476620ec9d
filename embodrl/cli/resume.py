"""`embodrl resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.common import Debug, Overrides, Trust, execute
from embodrl.cli.sweep import work
from embodrl.errors import UsageError


def resume(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="directory of the run", show_default=False)],
    overrides: Overrides = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Continue a run from its last good checkpoint, or a sweep with the runs that are not finished.

    \b
    Examples:
      embodrl resume outputs/my-run
      embodrl resume outputs/my-run runner.max_iterations=120
    """

    def action() -> int | None:
        from embodrl.runs import sft, sweep, train

        if sweep.is_sweep(directory):
            if overrides:
                message = "a sweep is continued with the settings that it began with"
                raise UsageError(message, "leave out the settings, or start another sweep", code="sweep-settings")
            return work(sweep.read_sweep(directory))
        verb = sft if sft.is_sft_run(directory) else train
        return verb.resume(directory, overrides or [], trust)

    execute(action, debug)
