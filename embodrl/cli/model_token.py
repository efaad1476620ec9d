"""`embodrl model token`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.common import Debug, JsonFile, Overrides, execute


def token(
    policy: Annotated[
        Path, typer.Argument(metavar="POLICY", help="a run, or a policy written by one", show_default=False)
    ],
    data: Annotated[Path, typer.Argument(metavar="DIR", help="a dataset from its environment", show_default=False)],
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="new policy directory", show_default=False)
    ] = None,
    size: Annotated[int, typer.Option("--size", metavar="N", min=8, help="size of the token, a multiple of 4")] = 64,
    layers: Annotated[
        int, typer.Option("--layers", metavar="N", min=1, max=64, help="layers of encoder and decoder")
    ] = 2,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="optimizer steps")] = 1000,
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", min=1, help="frames per step")] = 64,
    lr: Annotated[float, typer.Option("--lr", metavar="X", min=1e-9, help="learning rate, with a cosine to 0")] = 1e-3,
    context_dropout: Annotated[
        float,
        typer.Option("--context-dropout", metavar="X", min=0, max=1, help="fraction of states hidden from the decoder"),
    ] = 0.0,
    held_out: Annotated[
        float,
        typer.Option("--held-out", metavar="X", min=0, max=0.9, help="fraction of episodes held out for evaluation"),
    ] = 0.1,
    memory_gb: Annotated[
        float,
        typer.Option(
            "--memory-gb", metavar="X", min=0.001, help="memory of the states; training peaks at about four times that"
        ),
    ] = 2.0,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, help="seed of weights, batches, held-out episodes")
    ] = 0,
    json: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Train an RL token of a frozen VLA: one small vector that summarises images and prompt (algorithm=rlt).

    A transformer compresses the VLA's prompt states so that a decoder can reconstruct them; the VLA is unchanged.
    Writes the policy together with the token. An interrupted training starts over.

    \b
    Examples:
      embodrl model token outputs/sft data/push --output outputs/token
      embodrl model token outputs/sft/policy data/push -o outputs/token --size 32 --json token.json
    """

    def action() -> None:
        from dataclasses import asdict

        from embodrl.errors import UsageError
        from embodrl.runs.model_token import TokenTraining, train_token
        from embodrl.storage.json_file import check_json_file, write_json_result

        if output is None or output.exists():
            where = "no output directory is named" if output is None else f"{output} is there already"
            raise UsageError(f"{where} for the policy with its token", "give --output DIR", code="rl-token-output")
        if size % 4:
            raise UsageError(f"a token of {size} numbers", "take a multiple of 4, its heads", code="rl-token-size")
        if json is not None:
            check_json_file(json)
        settings = TokenTraining(size, layers, steps, batch_size, lr, context_dropout, held_out, memory_gb, seed)
        result = train_token(policy, str(data), output, settings, list(overrides or []))
        print(
            f"{result.frames} of {result.of_frames} frames: {result.tokens} states of {result.width} numbers to {size}"
        )
        others = f"with tokens of other frames {result.error_of_others:.3f}"
        print(f"error of the reconstruction: {result.error:.3f} of a state's variance; {others}")
        print(f"wrote {result.path}")
        if json is not None:
            write_json_result(json, asdict(result) | {"path": str(result.path)})

    execute(action, debug)
