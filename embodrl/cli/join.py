"""`embodrl join`."""

from __future__ import annotations

from typing import Annotated

import typer

from embodrl.cli.common import Debug, Overrides, Trust, execute, show_notes


def join(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="directory of a run with store.url, or its store", show_default=False)
    ],
    overrides: Overrides = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Gather for a run with store.url, beside others, until it ends.

    The run's configuration applies; ARGS override it. Newer weights come from the store. It may be stopped or killed at
    any time; the same command continues.

    \b
    Examples:
      embodrl join outputs/my-run store.collector=left
      embodrl join s3://bucket/my-run store.collector=right env.train.total_num_envs=8
    """

    def action() -> int:
        from embodrl.store.join import join as verb
        from embodrl.store.join import load_joined

        loaded = load_joined(run, overrides or [], trust)
        show_notes(loaded.notes)
        return verb(loaded, lambda line: print(line, flush=True))

    execute(action, debug)
