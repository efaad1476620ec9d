"""`embodrl eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.common import (
    ConfigFile,
    Debug,
    JsonFile,
    Overrides,
    Trust,
    execute,
    load_measured,
    say_if_random,
    show_notes,
    split_path,
)


def evaluate(
    overrides: Overrides = None,
    config: ConfigFile = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="new directory for the report; default: eval-TIME in runner.output_dir, the run, or outputs/",
        ),
    ] = None,
    json: JsonFile = None,
    harness_format: Annotated[
        Path | None,
        typer.Option(
            "--harness-format",
            metavar="FILE",
            help="also write the results to this file, in vla-evaluation-harness format",
            show_default=False,
        ),
    ] = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Measure a policy on fixed seeds; write eval.html, eval.json and videos.

    The first argument may be a run (its final policy, or its newest checkpoint), one of its checkpoints, or a policy
    directory. The run's configuration applies; ARGS override it.

    \b
    Examples:
      embodrl eval outputs/my-run
      embodrl eval outputs/my-run/checkpoints/step_20 env.eval.num_episodes=256
      embodrl eval env=maniskill_pull env.eval.num_episodes=256 --json result.json
      embodrl eval model.warm_start=outputs/my-policy -o outputs/my-eval
      embodrl eval env=libero_spatial model=openvla_libero model.model_path=DIR protocol=openvla
    """

    def action() -> int | None:
        path, rest = split_path(overrides)
        if path is None:
            loaded = load_measured(rest, config, verb="eval", trust=trust)
            say_if_random(loaded.config)
            from embodrl.runs import evaluate as verb

            return verb.evaluate(loaded, json, output, harness_path=harness_format).exit_code
        from embodrl.config.compose import assignment
        from embodrl.runs import evaluate as verb
        from embodrl.runs.policies import find_policy

        source = find_policy(path)
        if config is not None:
            rest = source.arguments(rest)
            loaded = load_measured(rest, config, verb="eval", trust=trust)
        else:
            if output is not None:  # the run may be read-only
                rest = [assignment("runner.output_dir", output.absolute()), *rest]
            loaded = source.load_config(rest, trust)
            show_notes(loaded.notes)
        result = verb.evaluate(loaded, json, output, source.make_policy, str(path), harness_format)
        return result.exit_code

    execute(action, debug)
