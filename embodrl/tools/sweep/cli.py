"""`embodrl sweep`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embodrl.cli.app import choose, one_of
from embodrl.cli.common import ConfigFile, Debug, Overrides, Trust, execute
from embodrl.errors import UsageError
from embodrl.tools.compare.cli import show_runs

if TYPE_CHECKING:
    from embodrl.tools.sweep.runs import Sweep

BACKENDS = ("local", "slurm", "ray")


def sweep(
    overrides: Overrides = None,
    config: ConfigFile = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="new directory for all runs", show_default=False)
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", metavar="N", min=1, help="runs at a time", show_default="1; Ray: all"),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            metavar="NAME",
            help=", ".join(BACKENDS),
            autocompletion=one_of(BACKENDS),
            show_default="local",
        ),
    ] = None,
    slurm: Annotated[
        str, typer.Option("--slurm", metavar="OPTIONS", help="options of sbatch, in quotes", show_default=False)
    ] = "",
    ray: Annotated[
        str,
        typer.Option("--ray", metavar="RESOURCES", help="of each run, in quotes", show_default="num_cpus=1"),
    ] = "",
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Train with every combination of settings with several values.

    All configurations are checked before the first run starts. With --jobs, runs share the cores and GPUs of this
    machine evenly. `embodrl resume DIR` resumes a sweep; `embodrl compare DIR` shows it at any time.

    \b
    Examples:
      embodrl sweep env=maniskill model=openvla runner.seed=0,1,2
      embodrl sweep runner.seed=0,1 algorithm=ppo,grpo --jobs 2 --output outputs/ppo-grpo
      embodrl sweep runner.seed=range(0,8) --backend slurm --jobs 4 --slurm "--gpus=1 --time=4:00:00"
      embodrl sweep runner.seed=range(0,8) --backend ray --ray "num_cpus=4 num_gpus=1"
    """

    def action() -> int:
        from embodrl.tools.sweep.combinations import MAX_RUNS
        from embodrl.tools.sweep.launcher import agreed, read_launcher
        from embodrl.tools.sweep.runs import new_sweep

        launch = read_launcher(overrides or [])
        chosen = agreed("--backend", backend, launch.backend, "local")
        choose(chosen, BACKENDS, "backend")
        at_a_time = agreed("--jobs", jobs, launch.jobs, MAX_RUNS if chosen == "ray" else 1)
        options = [*shlex.split(slurm), *launch.slurm]
        resources = shlex.split(ray)
        return work(new_sweep(launch.overrides, config, output, at_a_time, chosen, options, trust, resources))

    execute(action, debug)


def resume(directory: Path, settings: list[str], trust: bool) -> int:
    """Resume the sweep of a directory.

    Raises:
        UsageError: settings are given, but a sweep keeps its own.
        ConfigError: the sweep names code, and this user has neither started nor trusted it.
    """
    from embodrl.tools.sweep.runs import read_sweep

    if settings:
        message = "a sweep resumes with its original settings"
        raise UsageError(message, "leave out the settings, or start another sweep", code="sweep-settings")
    return work(read_sweep(directory, trust))


def work(swept: Sweep) -> int:
    """Run or submit the remaining runs of a sweep; print their comparison."""
    from embodrl.tools.sweep.runs import COMPARISON_FILE, run_sweep, submit_to_slurm
    from embodrl.trainer.afterwards import afterwards

    print(f"sweep: {swept.directory}, {len(swept.unfinished())} of {len(swept.runs)} runs to do")
    if swept.backend == "slurm":
        number = submit_to_slurm(swept)
        if number:
            print(f"submitted as {number}; `embodrl compare {swept.directory}` shows the runs")
        return 0
    code = run_sweep(swept)
    with afterwards("the table of runs", f"embodrl compare {shlex.quote(str(swept.directory))}"):
        if views := swept.views():
            show_runs(views)
            if (swept.directory / COMPARISON_FILE).is_file():
                print(f"\n{swept.directory / COMPARISON_FILE} has the curves")
    if swept.unfinished():
        print(f"`embodrl resume {swept.directory}` continues the sweep")
    return code
