"""`embodrl doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from embodrl.cli.common import Debug, execute


def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="one JSON object in place of tables")] = False,
    debug: Debug = False,
) -> None:
    """Check this machine: packages, Vulkan driver, GPU, disk. Exits 0 if training can run, else 1.

    \b
    Examples:
      embodrl doctor
      embodrl doctor --json
    """

    def action() -> int | None:
        from embodrl.scheduler.doctor import run_doctor

        return run_doctor(json_output=json_output)

    execute(action, debug)
