"""The command `embodrl`: one verb per file; implementations are imported on demand."""

from __future__ import annotations

import contextlib
import faulthandler
import os
from typing import Annotated

import typer

from embodrl.cli import config
from embodrl.cli.app import Verbs, add, make_app, summary
from embodrl.cli.collect import collect
from embodrl.cli.evaluate import evaluate
from embodrl.cli.fetch import fetch
from embodrl.cli.resume import resume
from embodrl.cli.sft import sft
from embodrl.cli.train import train
from embodrl.processes.ending import own_process

SIGNALLED = 128
"""Exit codes above this are 128 + the signal that stopped the command."""

app = make_app("embodrl", completion=True, cls=Verbs)


def _version(wanted: bool) -> None:
    if wanted:
        from embodrl.version import __version__

        print(f"embodrl {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Reinforcement learning for vision-language-action models.

    Settings follow the verb: presets as group=name, single values as section.key=value.

    \b
    Examples:
      embodrl train env=maniskill model=openvla
      embodrl config show env=maniskill runner.seed=3
      embodrl plan train model=openvla_7b cluster=8xh100 --fit
      embodrl resume outputs/my-run
      embodrl list presets

    \b
    Exit codes:
      0    done
      1    error; also: lost evaluation episodes, a parity out of tolerance, a plan that does not fit or lacks the
           size of its model
      2    invalid configuration or usage; nothing was started
      129  stopped by SIGHUP (the terminal was closed)
      130  stopped by Ctrl-C
      143  stopped by SIGTERM

    A stopped training saves a checkpoint first, unless it hangs; `embodrl resume RUN` continues it. Shell completion of
    presets and settings: `embodrl --install-completion`.
    """


add(app, train)
add(app, evaluate, "eval")
add(app, collect)
add(app, sft)
add(app, resume)
add(app, fetch)
app.add_typer(config.app, name="config", short_help=summary(config.about))


def main() -> None:
    """Run the command line; after a signal, the time to exit is limited."""
    for name in ("COLUMNS", "LINES"):
        if os.environ.get(name) == "0":  # set by terminals without a size: nothing would be shown
            del os.environ[name]
    with contextlib.suppress(AttributeError, ValueError, RuntimeError):  # the process has no stderr
        faulthandler.enable()  # show the stack when native code crashes
    own_process()  # not if another program, such as a test, calls the commands
    try:
        app(prog_name="embodrl")
    except SystemExit as leaving:
        if not isinstance(leaving.code, int) or leaving.code <= SIGNALLED:
            raise
        from embodrl.processes.ending import leave

        leave(leaving.code)
