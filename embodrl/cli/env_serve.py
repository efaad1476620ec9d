"""`embodrl env serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.common import Debug, execute


def serve(
    host: Annotated[str, typer.Option("--host", help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="port; 0 picks a free one")] = 5700,
    token: Annotated[
        str, typer.Option("--token", help="token for clients; auto generates one, none disables it")
    ] = "auto",
    max_processes: Annotated[int, typer.Option("--max-processes", min=1, help="limit on concurrent simulators")] = 64,
    extension: Annotated[
        list[str] | None,
        typer.Option("--extension", metavar="MODULE", help="module that registers environments", show_default=False),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option("--log-dir", metavar="DIR", help="directory for the simulators' output", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Run simulators for training runs on other machines (env.remote), until Ctrl-C or SIGTERM.

    Runs need the token in the environment variable EMBODRL_TOKEN. The connection is not encrypted: on an untrusted
    network, use a tunnel. See docs/env_manager.md.

    \b
    Examples:
      embodrl env serve
      embodrl env serve --host 0.0.0.0 --port 5700 --token my-secret-token
    """

    def action() -> None:
        from embodrl.envs.env_server.serving import serve as run

        run(host, port, token, max_processes, extension or [], log_dir, lambda line: print(line, flush=True))

    execute(action, debug)
