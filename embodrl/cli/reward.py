"""`embodrl reward train` and `embodrl reward check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embodrl.cli.app import add, choose, make_app, one_of
from embodrl.cli.common import EXIT_OK, Debug, JsonFile, execute
from embodrl.cli.label import INPUTS, BatchSize, Rate, Seed, Seen, Steps

if TYPE_CHECKING:
    from embodrl.workers.rewards.reward_model import Judged

app = make_app()
KINDS = ("success", "progress")

Dataset = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="a dataset of `embodrl collect` with successes and failures", show_default=False
    ),
]


@app.callback()
def about() -> None:
    """Rewards learned from recorded episodes.

    \b
    Examples:
      embodrl reward train data/mixed --output outputs/success
      embodrl reward check outputs/success data/other
    """


def train(
    directory: Dataset,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="directory of the model", show_default=False)
    ],
    kind: Annotated[
        str,
        typer.Option(
            "--kind",
            metavar="|".join(KINDS),
            help="success classifies last observations; progress values all observations",
            autocompletion=one_of(KINDS),
        ),
    ] = KINDS[0],
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            metavar="N",
            min=1,
            help="final frames of a success that count as success; default: 1; kind success only",
            show_default=False,
        ),
    ] = None,
    inputs: Seen = "auto",
    steps: Steps = 1000,
    batch_size: BatchSize = 256,
    lr: Rate = 1e-3,
    held_out: Annotated[
        float,
        typer.Option(
            "--held-out",
            metavar="X",
            min=0.01,
            max=0.9,
            help="fraction of episodes: half for the threshold, half for evaluation",
        ),
    ] = 0.3,
    seed: Seed = 0,
    json: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Train a success classifier or a progress model, to use as reward.model and to label datasets.

    It is evaluated on held-out episodes that were not used for the classifier's threshold. Training takes
    minutes; after an interruption it starts over, with the same result for the same seed.

    \b
    Examples:
      embodrl reward train data/mixed --output outputs/success
      embodrl reward train data/mixed --output outputs/progress --kind progress --inputs state --json progress.json
    """

    def action() -> int:
        from dataclasses import asdict

        from embodrl.storage.json_file import check_json_file, write_json_result
        from embodrl.workers.rewards.observe import Fitting
        from embodrl.workers.rewards.reward_model import RewardTraining, train_reward

        choose(kind, KINDS, "kind")
        choose(inputs, INPUTS, "input")
        if json is not None:
            check_json_file(json)
        fitting = Fitting(inputs, steps, batch_size, lr, held_out, seed)  # pyright: ignore[reportArgumentType]  (chosen)
        settings = RewardTraining(kind, window, fitting)  # pyright: ignore[reportArgumentType]
        result = train_reward(directory, output, settings)
        used = f"{result.trained_on} episodes to train"
        if result.threshold is not None:
            used += f", {result.calibrated_on} for the threshold of {result.threshold:.3f}"
        print(used)
        _show(result.judged)
        print(f"wrote {result.path}")
        if json is not None:
            write_json_result(json, asdict(result) | {"path": str(result.path)})
        return EXIT_OK

    execute(action, debug)


def check(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="directory written by `embodrl reward train`", show_default=False)
    ],
    directory: Dataset,
    json: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Evaluate a reward model on another dataset with known outcomes.

    \b
    Examples:
      embodrl reward check outputs/success data/other
      embodrl reward check outputs/progress data/other --json progress.json
    """

    def action() -> int:
        from dataclasses import asdict

        from embodrl.storage.json_file import check_json_file, write_json_result
        from embodrl.workers.rewards.reward_model import check_reward

        if json is not None:
            check_json_file(json)
        found = check_reward(model, directory)
        _show(found)
        if json is not None:
            write_json_result(json, asdict(found))
        return EXIT_OK

    execute(action, debug)


def _show(found: Judged) -> None:
    def shown(share: float | None) -> str:
        return "unknown" if share is None else f"{share:.1%}"

    print(f"judged on {found.episodes} episodes, {found.successes} of them successful")
    if found.auc is not None:
        print(f"last observations: area under the curve {found.auc:.3f}")
    if found.accuracy is not None:
        missed = f"missed {shown(found.false_negatives)} of the successes"
        print(f"right {shown(found.accuracy)}; wrongly successful {shown(found.false_positives)}; {missed}")
        print(f"frames of failures classified as success: {shown(found.frame_false_positives)}")
        print(f"probabilities: Brier score {found.brier:.3f}, calibration error {found.calibration_error:.3f}")
    if found.spearman is not None:
        print(f"values and returns: rank correlation {found.spearman:.2f}")


add(app, train)
add(app, check)
