"""`embodrl model random` and `embodrl model check`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.app import Verbs, add, choose, make_app
from embodrl.cli.common import ConfigFile, Debug, JsonFile, Overrides, Trust, execute, load

app = make_app(cls=Verbs)
Size = StrEnum("Size", ["tiny", "public"])
Dtype = StrEnum("Dtype", ["bf16", "float32"])


def families() -> list[str]:
    """Return the names of the families with a public layout."""
    from embodrl.specs import MODELS

    return [name for name in MODELS if MODELS.entry(name).public_layout]


@app.callback()
def about() -> None:
    """Create model checkpoints, and check your own models.

    \b
    Examples:
      embodrl model random smolvla outputs/random-smolvla
      embodrl model check --config my_model.yaml
    """


def random(
    family: Annotated[
        str,
        typer.Argument(
            metavar="FAMILY",
            help="openvla, pi0, ...: `embodrl list models` shows all",
            show_default=False,
            autocompletion=lambda incomplete: [name for name in families() if name.startswith(incomplete)],
        ),
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="a new directory", show_default=False)],
    size: Annotated[Size, typer.Option(help="size of the published checkpoint, or of the tiny preset")] = Size.public,
    dtype: Annotated[Dtype, typer.Option(help="dtype of the weights; pi0 and pi0.5 keep some in float32")] = Dtype.bf16,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="directory with tokenizer.json; default: a small stand-in", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="of the weights")] = 0,
    shard_size: Annotated[
        float | None,
        typer.Option(metavar="GB", min=0.001, help="maximum file size; default: 5 GiB", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a checkpoint with random weights in a family's public layout and size.

    For tests of loading, memory and speed: load it with model.model_path=DIR; its actions mean nothing.

    \b
    Examples:
      embodrl model random openvla outputs/random-openvla
      embodrl model random pi0 outputs/random-pi0 --size tiny --dtype float32
      embodrl eval env=maniskill model=smolvla model.model_path=outputs/random-smolvla
    """

    def action() -> None:
        from embodrl.tools.model_tools.random_model import write_random_model

        choose(family, families(), "model family")
        made = write_random_model(family, directory, str(size), str(dtype), tokenizer, seed, shard_size)
        print(f"{directory}: {made.num_parameters:,} parameters, {made.num_bytes:,} bytes in {made.seconds:.1f} s")
        if tokenizer is None:
            print(f"tokenizer: a stand-in of {made.num_tokens} tokens; --tokenizer DIR takes the model's own")

    execute(action, debug)


def check(
    overrides: Overrides = None,
    config: ConfigFile = None,
    json: JsonFile = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Check that a model fulfils the contract of every policy, on observations of the environment.

    Rollout and training compute the same log-probs, rows are independent, sampling is seeded, gradients reach only
    trainable parameters, files round-trip, and the imitation loss falls on one batch. Weights are perturbed, so that
    zero-initialised layers hide nothing. Missing optional features, such as imitation, are listed. Exits
    with 1 if a check fails.

    \b
    Examples:
      embodrl model check --config examples/new_model/config.yaml
      embodrl model check env=toy model=openvla model.warm_start=null
    """

    def action() -> int:
        loaded = load(overrides, config, "train", trust)
        from dataclasses import asdict

        from embodrl.storage.json_file import check_json_file, write_json_result
        from embodrl.tools.model_tools.model_check import CheckResult, check_model

        if json is not None:
            check_json_file(json)
        if debug:
            import logging

            logging.basicConfig(level=logging.DEBUG)

        def show(result: CheckResult) -> None:
            verdict = "FAILED" if result.problems else "ok" if result.offered else "-"
            print(f"{verdict:8}{result.name}: {result.promise}")
            for problem in result.problems:
                print(f"        {problem}")

        results = check_model(loaded, show)
        if json is not None:
            write_json_result(json, [asdict(result) for result in results])
        return int(any(result.problems for result in results))

    execute(action, debug)


add(app, random)
add(app, check)
