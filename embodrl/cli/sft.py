"""`embodrl sft`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.common import ConfigFile, Debug, Overrides, Trust, execute, load_measured


def sft(
    overrides: Overrides = None,
    config: ConfigFile = None,
    stats: Annotated[
        Path | None,
        typer.Option("--stats", metavar="FILE", help="statistics of the robot: sft.stats=FILE", show_default=False),
    ] = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Fine-tune a policy on demonstrations.

    \b
    Examples:
      embodrl sft sft.data_dir=data/push sft.output_dir=outputs/sft
      embodrl sft env=dataset model=pi05 sft.data_dir=datasets/so100 sft.output_dir=outputs/so100
      embodrl sft sft.max_steps=250 sft.batch_size=64 model.warm_start=null
    """

    def action() -> int | None:
        from embodrl.config.compose import assignment

        given = [] if stats is None else [assignment("sft.stats", stats)]
        arguments = [*(overrides or []), *given]
        loaded = load_measured(arguments, config, lambda config: config.sft.eval_interval > 0, "sft", trust)
        from embodrl.runs import sft as verb

        return verb.sft(loaded)

    execute(action, debug)
