"""`embodrl doctor`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from embodrl.cli.common import Debug, Overrides, execute


def doctor(
    overrides: Overrides = None,
    json_output: Annotated[bool, typer.Option("--json", help="one JSON object in place of tables")] = False,
    debug: Debug = False,
) -> None:
    """Check this machine: packages, Vulkan driver, GPU, disk. Exits 0 if training can run, else 1.

    With ARGS, one environment of that configuration is made and one frame drawn, too, in the interpreter that
    env.python names.

    \b
    Examples:
      embodrl doctor
      embodrl doctor --json
      embodrl doctor env=metaworld env.python=/path/to/python
    """

    def action() -> int | None:
        if not json_output:
            print("checking packages, drivers and simulators: up to a minute ...", file=sys.stderr, flush=True)
        from embodrl.preflight.doctor import run_doctor

        if not overrides:
            return run_doctor(json_output=json_output)
        from embodrl.runs.load import load_config
        from embodrl.workers.env import try_simulator

        config = load_config(overrides).config
        return run_doctor(json_output, further=lambda: try_simulator(config), extensions=config.extensions)

    execute(action, debug)
