"""`embodrl profile`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embodrl.cli.common import ConfigFile, Debug, Overrides, Trust, execute, load_measured

if TYPE_CHECKING:
    from collections.abc import Sequence

    from embodrl.config.schema import Config
    from embodrl.reporting.metrics_file import Row
    from embodrl.tools.profile.timeline import ProcessShare

SHOWN = 4
QUICK = {"runner.eval_interval": "0", "runner.eval_at_start": "false"} | dict.fromkeys(
    ("actor.optim.critic_warmup_iterations", "actor.optim.lr_warmup_iterations"), "0"
)
"""Default settings of a profile: only the final evaluation, and updates of the whole policy."""


def profile(
    overrides: Overrides = None,
    config: ConfigFile = None,
    iterations: Annotated[
        int, typer.Option("--iterations", metavar="N", min=2, help="training iterations; the first one is not measured")
    ] = 4,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", min=0.1, help="how long a run in progress is recorded")
    ] = 30,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Train some iterations, or look at a run in progress, and show how every process spends its time.

    Writes a run with trace.json, a timeline for https://ui.perfetto.dev or chrome://tracing. Evaluation is cut to one
    episode per task at the end unless its settings are given. Given the directory of a run in progress, records it for
    --seconds, and writes logs/trace.json there. Processes on other machines are not recorded.

    \b
    Examples:
      embodrl profile env=maniskill model=openvla
      embodrl profile env=toy rollout.pipeline_stages=2 --iterations 6
      embodrl profile outputs/my-run --seconds 60
    """

    def action() -> int:
        given = overrides or []
        if len(given) == 1 and Path(given[0]).is_dir():
            return _look(Path(given[0]), seconds)
        keys = {text.partition("=")[0] for text in given}
        quick = [f"{key}={value}" for key, value in QUICK.items() if key not in keys]
        if "runner.output_dir" not in keys:
            quick.append(f"runner.output_dir=outputs/profile-{time.strftime('%Y%m%d-%H%M%S')}")
        wanted = [*given, *quick, f"runner.max_iterations={iterations}"]
        loaded = load_measured(wanted, config, verb="train", trust=trust).with_absolute_paths()

        if "env.eval.num_episodes" not in keys:
            loaded = loaded.with_config(_briefly_evaluated(loaded.config))
        from embodrl.reporting.metrics_file import METRICS_FILE, read_metrics
        from embodrl.tools.profile.timeline import TRACE_FILE, measured_window, read_events, shares
        from embodrl.tools.profile.timeline import profile as verb

        run_dir = Path(loaded.config.runner.output_dir)
        result = verb(loaded, run_dir)
        if result.exit_code == 0:
            events = read_events(run_dir / "trace")
            _print(shares(events, measured_window(events)))
            _print_usage(read_metrics(run_dir / METRICS_FILE))
            print(f"\ntimeline: {run_dir / TRACE_FILE} (open it at https://ui.perfetto.dev)")
        return result.exit_code

    execute(action, debug)


def _look(run_dir: Path, seconds: float) -> int:
    from embodrl.tools.profile.timeline import watch

    _print(watch(run_dir, seconds))
    print(f"\ntimeline: {run_dir}/logs/trace.json (open it at https://ui.perfetto.dev)")
    return 0


def _briefly_evaluated(config: Config) -> Config:
    """Return the configuration with one evaluation episode per task at the end."""
    brief = config.env.eval.model_copy(update={"num_episodes": len(config.evaluated.env.tasks)})
    return config.model_copy(update={"env": config.env.model_copy(update={"eval": brief})})


def _print(found: Sequence[ProcessShare]) -> None:
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("process", "busy", "seconds of its longest spans (how many)"):
        drawn.add_column(head, overflow="fold")
    for each in found:
        longest = [f"{name} {seconds:.2f} ({each.counts[name]})" for name, seconds in each.seconds.items()][:SHOWN]
        drawn.add_row(each.name, f"{100 * each.busy:.0f} %", ", ".join(longest))
    Console(highlight=False).print(drawn)


def _print_usage(rows: Sequence[Row]) -> None:
    """Print the use of the machine; the first iteration is not measured."""
    from rich.console import Console
    from rich.table import Table

    from embodrl.reporting.usage_text import USAGE_HEAD, usage_table

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for head in USAGE_HEAD:
        drawn.add_column(head, overflow="fold")
    for line in usage_table([row for row in rows if row["iteration"] > 1]):
        drawn.add_row(*line)
    Console(highlight=False).print("", drawn, sep="\n")
