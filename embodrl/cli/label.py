"""`embodrl label`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.app import choose
from embodrl.cli.common import EXIT_OK, Debug, JsonFile, execute

INPUTS = ("auto", "images", "state", "both")

Dataset = Annotated[
    Path, typer.Argument(metavar="DIR", help="a LeRobot dataset of `embodrl collect`", show_default=False)
]
Steps = Annotated[int, typer.Option("--steps", metavar="N", min=1, help="optimizer steps")]
BatchSize = Annotated[int, typer.Option("--batch-size", metavar="N", min=1, help="frames per step")]
Rate = Annotated[float, typer.Option("--lr", metavar="X", min=1e-9, help="learning rate, with a cosine to 0")]
HeldOut = Annotated[
    float, typer.Option("--held-out", metavar="X", min=0, max=0.9, help="fraction of episodes held out for evaluation")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="seed of weights, batches and held-out episodes")]
Seen = Annotated[
    str,
    typer.Option("--inputs", metavar="|".join(INPUTS), help="inputs of the network; auto: all that the dataset has"),
]


def label(
    directory: Dataset,
    tag: Annotated[str, typer.Option("--tag", metavar="NAME", help="tag in the names of the written files")] = "recap",
    lookahead: Annotated[
        int, typer.Option("--lookahead", metavar="N", min=1, help="lookahead of an advantage, in steps")
    ] = 10,
    positive: Annotated[
        float,
        typer.Option("--positive", metavar="X", min=0.001, max=0.999, help="fraction of frames labelled positive"),
    ] = 0.3,
    failure_penalty: Annotated[
        float | None,
        typer.Option(
            "--failure-penalty",
            metavar="X",
            min=0,
            help="penalty of a failed episode, in steps; default: the length of the longest episode",
            show_default=False,
        ),
    ] = None,
    reward_model: Annotated[
        Path | None,
        typer.Option(
            "--reward-model",
            metavar="DIR",
            help="model of `embodrl reward train`: progress replaces a new value function; a classifier decides"
            " which episodes succeeded",
            show_default=False,
        ),
    ] = None,
    inputs: Seen = "auto",
    steps: Steps = 1000,
    batch_size: BatchSize = 256,
    lr: Rate = 1e-3,
    held_out: HeldOut = 0.1,
    seed: Seed = 0,
    json: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Label a dataset for algorithm=recap: values, advantages, and positive frames.

    Trains a value function on the remaining steps of episodes (RECAP, from pi*0.6). Writes
    DIR/meta/returns_TAG.parquet, DIR/meta/advantages_TAG.parquet and DIR/meta/value_TAG; the data is unchanged.

    \b
    Examples:
      embodrl label data/mixed
      embodrl label data/mixed --tag far --lookahead 20 --positive 0.4 --json label.json
    """

    def action() -> int:
        from dataclasses import asdict

        from embodrl.errors import UsageError
        from embodrl.storage.json_file import check_json_file, write_json_result
        from embodrl.workers.rewards.label import LabelSettings
        from embodrl.workers.rewards.label import label as run
        from embodrl.workers.rewards.observe import Fitting

        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", tag):
            raise UsageError(f"'{tag}' is no tag", "use letters, digits, _, . and -", code="label-tag")
        choose(inputs, INPUTS, "input")
        if json is not None:
            check_json_file(json)
        fitting = Fitting(inputs, steps, batch_size, lr, held_out, seed)  # pyright: ignore[reportArgumentType]  (chosen)
        result = run(directory, LabelSettings(tag, lookahead, positive, failure_penalty, reward_model, fitting))
        print(f"{result.episodes} episodes, {result.frames} frames, {result.success_rate:.0%} successful")
        if result.spearman is not None:
            which = "held-out" if reward_model is None else "these"
            print(f"values and returns of {which} episodes: rank correlation {result.spearman:.2f}")
        shares = (("successes", result.positive_in_successes), ("failures", result.positive_in_failures))
        parts = ", ".join(f"{share:.0%} in {name}" for name, share in shares if share is not None)
        for task, threshold in result.thresholds.items():
            print(f"{task}: positive from {threshold:.4f} on")
        print(f"positive: {result.positive_rate:.0%} of the frames ({parts})")
        for path in result.paths:
            print(f"wrote {path}")
        if json is not None:
            content = {key: value for key, value in asdict(result).items() if key != "paths"}
            write_json_result(json, content | {"paths": [str(path) for path in result.paths]})
        return EXIT_OK

    execute(action, debug)
