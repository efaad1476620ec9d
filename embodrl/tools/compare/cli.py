"""`embodrl compare`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embodrl.cli.common import Debug, JsonOutput, execute
from embodrl.errors import OutputError, without_controls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from embodrl.tools.compare.comparison import RunView

MAX_SETTINGS = 40


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="directories of runs, directories above runs, or evaluations")
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="write the comparison to this file as one page", show_default=False
        ),
    ] = None,
    json_output: JsonOutput = False,
    debug: Debug = False,
) -> None:
    """Compare runs: success, time, environment steps, and the settings that differ; or evaluations, pair by pair.

    A run may still be training. The page holds the curves of all runs and needs no network. Directories that
    `embodrl eval` has written are compared episode by episode with the first one: the difference with its
    interval, and McNemar's exact test, over all episodes, each task and each axis.

    \b
    Examples:
      embodrl compare outputs/seed0 outputs/seed1
      embodrl compare outputs --html comparison.html
      embodrl compare outputs/eval-a outputs/eval-b
    """

    def action() -> None:
        from embodrl.tools.compare.paired_evals import comparison_of, is_evaluation, rows_of

        if all(map(is_evaluation, runs)):
            if html is not None:
                raise OutputError("a comparison of evaluations has no page", "leave out --html", code="no-run")
            compared = comparison_of(runs)
            if json_output:
                print(json.dumps(compared, indent=2))
            else:
                for one in compared:
                    show_table(*rows_of(one), f"{one['second']} - {one['first']}")
            return
        from embodrl.storage.json_file import check_json_file, write_text_result
        from embodrl.tools.compare.comparison import comparison_json, comparison_page, find_runs, read_runs

        found = read_runs(find_runs(runs))
        if html is not None:
            check_json_file(html)
            write_text_result(html, comparison_page(found))
        if json_output:
            print(json.dumps(comparison_json(found), indent=2))
        else:
            show_runs(found)
            if html is not None:
                print(f"\n{html} has the curves")

    execute(action, debug)


def show_runs(runs: Sequence[RunView]) -> None:
    """Print the figures of runs, and the settings that differ."""
    from embodrl.tools.compare.comparison import differing_settings, figure_rows, in_sections_of_all

    titles, cells = figure_rows(runs)
    differing = differing_settings(runs)
    shown = [(key, texts) for key, texts in differing if in_sections_of_all(runs, key)][:MAX_SETTINGS]
    tables = [("", titles, cells)]
    if shown:
        heads = ["setting", *(run.name for run in runs)]
        tables.append(("Settings that differ", heads, [[key, *texts] for key, texts in shown]))
    for problem in (problem for run in runs for problem in run.problems):
        print(f"note: {without_controls(problem)}", file=sys.stderr)
    for title, heads, rows in tables:
        show_table(heads, rows, title)
    if len(shown) < len(differing):
        print(f"{len(differing) - len(shown)} more settings differ; --json and --html list them all")
    if len(runs) > 1 and not differing and all(run.config for run in runs):
        print("The runs have the same settings.")


def show_table(heads: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table without rules."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for head in heads:
        drawn.add_column(without_controls(head), overflow="fold", no_wrap=head == "setting")
    for row in rows:
        drawn.add_row(*map(without_controls, row))
    Console(highlight=False, soft_wrap=False).print(drawn)
