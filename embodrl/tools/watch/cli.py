"""`embodrl watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.common import EXIT_OK, EXIT_SIGINT, Debug, execute

NO_TOKEN = "none"


def watch(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR...]", help="runs, or directories above runs  [default: outputs]"),
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="address to listen at")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 for a free one")] = 8180,
    token: Annotated[
        str | None,
        typer.Option("--token", metavar="TOKEN", help=f"default: a random one; {NO_TOKEN}: none", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Show runs on a local web page: curves, success per task, videos, differing settings; refreshed while they train.

    Reads only the runs' files. Stop it with Ctrl-C.

    \b
    Examples:
      embodrl watch
      embodrl watch outputs/sweep-1 /shared/runs --port 0
    """

    def action() -> int:
        import asyncio
        import secrets

        from embodrl.errors import UsageError
        from embodrl.tools.watch.server import RunPages, serve

        chosen = directories or [Path("outputs")]
        for directory in chosen:
            if not directory.is_dir():
                raise UsageError(f"{directory} is not a directory", "name a directory of runs", code="no-run")
        used = None if token == NO_TOKEN else token or secrets.token_urlsafe(16)

        def ready(url: str) -> None:
            print(f"listening at {url}{'' if used is None else f'?token={used}'}", flush=True)

        code = asyncio.run(serve(RunPages(chosen, used), host, port, ready))
        return EXIT_OK if code == EXIT_SIGINT else code

    execute(action, debug)
