"""The command `embodrl`: one verb a file; the work is imported only when a verb needs it."""

from __future__ import annotations

from typing import Annotated

import typer

from embodrl.cli import config, env, pipeline, plan
from embodrl.cli.bench import bench
from embodrl.cli.collect import collect
from embodrl.cli.convert import convert
from embodrl.cli.doctor import doctor
from embodrl.cli.evaluate import evaluate
from embodrl.cli.export import export
from embodrl.cli.list import list_names
from embodrl.cli.parity import parity
from embodrl.cli.resume import resume
from embodrl.cli.sft import sft
from embodrl.cli.train import train

app = typer.Typer(
    name="embodrl",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        import embodrl

        print(f"embodrl {embodrl.__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Reinforcement learning for vision-language-action models.

    Settings follow the verb: presets as group=name, single values as section.key=value.

    \b
    Examples:
      embodrl train env=maniskill model=openvla
      embodrl config show env=maniskill runner.seed=3
      embodrl plan train model=openvla_7b cluster=8xh100
      embodrl resume outputs/my-run
      embodrl list presets

    \b
    Exit codes: 0 ok, 1 error, 2 wrong configuration or usage, 130 Ctrl-C, 143 SIGTERM.
    """


app.command()(train)
app.command("eval")(evaluate)
app.command()(collect)
app.command()(convert)
app.command()(sft)
app.command()(resume)
app.command()(export)
app.add_typer(plan.app, name="plan")
app.add_typer(config.app, name="config")
app.add_typer(env.app, name="env")
app.add_typer(pipeline.app, name="pipeline")
app.command("list")(list_names)
app.command()(doctor)
app.command()(bench)
app.command()(parity)


def main() -> None:
    """Run the command line."""
    app()
