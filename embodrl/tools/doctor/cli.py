"""`embodrl doctor`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from embodrl.cli.common import Debug, Overrides, execute

if TYPE_CHECKING:
    from embodrl.preflight.findings import MachineFinding


def doctor(
    overrides: Overrides = None,
    json_output: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
    debug: Debug = False,
) -> None:
    """Check this machine: packages, Vulkan driver, GPU, disk. Exits 0 if training can run, else 1.

    With ARGS, it also makes one environment of that configuration and renders one frame, in the interpreter that
    env.python names.

    \b
    Examples:
      embodrl doctor
      embodrl doctor --json
      embodrl doctor env=metaworld env.python=/path/to/python
    """

    def show_progress(finding: MachineFinding) -> None:
        if not json_output:
            print(f"  {finding.name}: {finding.status}", file=sys.stderr, flush=True)

    def action() -> int | None:
        if not json_output:
            print("checking packages, drivers and simulators: up to a minute ...", file=sys.stderr, flush=True)
        from embodrl.tools.doctor.machine import run_doctor

        if not overrides:
            return run_doctor(json_output, progress=show_progress)
        from embodrl.pipelines.load import load_config
        from embodrl.workers.env import try_simulator

        config = load_config(overrides).config
        further = lambda: try_simulator(config)  # noqa: E731
        return run_doctor(json_output, further=further, extensions=config.extensions, progress=show_progress)

    execute(action, debug)
