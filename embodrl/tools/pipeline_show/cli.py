"""`embodrl pipeline show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.app import add, make_app
from embodrl.cli.common import ConfigFile, Debug, Overrides, Trust, execute, load
from embodrl.errors import UsageError

app = make_app()

Drawing = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="draw it to this file: .mmd is Mermaid, .svg an image",
        show_default=False,
    ),
]


@app.callback()
def about() -> None:
    """Inspect the graph of a training iteration.

    \b
    Examples:
      embodrl pipeline show algorithm=grpo
      embodrl pipeline show --config my.yaml --output graph.svg
    """


def show(
    overrides: Overrides = None,
    config: ConfigFile = None,
    output: Drawing = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Print the nodes in running order; draw them if a file is named.

    \b
    Examples:
      embodrl pipeline show algorithm=dapo
      embodrl pipeline show pipeline.fn=my_module:build --output graph.mmd
    """

    def action() -> None:
        from embodrl.pipelines.select import build_graph
        from embodrl.storage.json_file import check_json_file, write_text_result
        from embodrl.tools.pipeline_show.draw import to_mermaid, to_svg, to_text

        drawings = {".mmd": to_mermaid, ".svg": to_svg}
        if output is not None:
            if output.suffix not in drawings:
                kinds = " or ".join(drawings)
                raise UsageError(f"{output} has the ending '{output.suffix}'", f"name a file that ends in {kinds}")
            check_json_file(output)
        graph = build_graph(load(overrides, config, trust=trust).config)
        print(to_text(graph))
        if output is not None:
            write_text_result(output, drawings[output.suffix](graph))

    execute(action, debug)


add(app, show)
