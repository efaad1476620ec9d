"""`embodrl resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.common import Debug, Overrides, Trust, execute
from embodrl.names import import_object
from embodrl.specs import VERBS


def resume(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="directory of the run", show_default=False)],
    overrides: Overrides = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Resume a run from its last good checkpoint, or a sweep with its unfinished runs.

    \b
    Examples:
      embodrl resume outputs/my-run
      embodrl resume outputs/my-run runner.max_iterations=120
    """

    def action() -> int | None:
        for spec in VERBS.all():
            for file, function in spec.resumes.items():
                if (directory / file).is_file():
                    return import_object(function)(directory, overrides or [], trust)
        from embodrl.runs import sft, train

        verb = sft if sft.is_sft_run(directory) else train
        return verb.resume(directory, overrides or [], trust)

    execute(action, debug)
