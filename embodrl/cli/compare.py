"""`embodrl compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embodrl.cli.common import Debug, JsonOutput, execute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from embodrl.reporting.comparison import RunView


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="directories of runs, or directories above runs")
    ],
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="write the comparison there as one page", show_default=False),
    ] = None,
    json_output: JsonOutput = False,
    debug: Debug = False,
) -> None:
    """Compare runs: success, time, environment steps, and the settings that differ.

    A run may still be training. The page holds the curves of all runs and needs no network.

    \b
    Examples:
      embodrl compare outputs/seed0 outputs/seed1
      embodrl compare outputs --html comparison.html
    """

    def action() -> None:
        from embodrl.reporting.comparison import comparison_json, comparison_page, find_runs, read_runs
        from embodrl.storage.json_file import check_json_file, write_text_file

        found = read_runs(find_runs(runs))
        if html is not None:
            check_json_file(html)
            write_text_file(html, comparison_page(found))
        if json_output:
            print(json.dumps(comparison_json(found), indent=2))
        else:
            show_runs(found)
            if html is not None:
                print(f"\n{html} has the curves")

    execute(action, debug)


def show_runs(runs: Sequence[RunView]) -> None:
    """Print the figures of runs and the settings that differ."""
    from rich.console import Console
    from rich.table import Table

    from embodrl.reporting.comparison import differing_settings, figure_rows

    console = Console(highlight=False, soft_wrap=False)
    titles, cells = figure_rows(runs)
    differing = differing_settings(runs)
    tables = [("", titles, cells)]
    if differing:
        heads = ["setting", *(run.name for run in runs)]
        tables.append(("Settings that differ", heads, [[key, *texts] for key, texts in differing]))
    for title, heads, rows in tables:
        drawn = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for head in heads:
            drawn.add_column(head, overflow="fold")
        for row in rows:
            drawn.add_row(*row)
        console.print(drawn)
    if len(runs) > 1 and not differing:
        console.print("The runs have the same settings.")
