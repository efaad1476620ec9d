"""`embodrl eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.common import ConfigFile, Debug, JsonFile, Overrides, execute, load_measured


def evaluate(
    overrides: Overrides = None,
    config: ConfigFile = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="a new directory for the report; default: one in outputs/"),
    ] = None,
    json: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Measure a policy on fixed seeds, and write eval.html, eval.json and videos.

    \b
    Examples:
      embodrl eval env=maniskill model=openvla
      embodrl eval env=maniskill_pull env.eval.num_episodes=256 --json result.json
      embodrl eval model.warm_start=outputs/my-run/policy -o outputs/my-run/final
    """

    def action() -> int | None:
        loaded = load_measured(overrides, config)
        from embodrl.runs import evaluate as verb

        return verb.evaluate(loaded, json, output).exit_code

    execute(action, debug)
