"""`embodrl export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.common import Debug, Overrides, Trust, execute


class AdapterLayout(StrEnum):
    """How low-rank adapters are exported."""

    merged = "merged"
    apart = "apart"


class ExportLayout(StrEnum):
    """Layout of the files."""

    public = "public"
    lerobot = "lerobot"


def export(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN", help="a run, or RUN/checkpoints/step_N", show_default=False)
    ],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="a new directory", show_default=False)],
    adapters: Annotated[
        AdapterLayout,
        typer.Option(help="low-rank adapters: merged into the weights in float32, or apart in peft's layout"),
    ] = AdapterLayout.merged,
    layout: Annotated[
        ExportLayout, typer.Option(help="the family's published layout, or lerobot's (pi0, pi05, smolvla)")
    ] = ExportLayout.public,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="ORG/NAME", help="also upload it to the Hugging Face hub", show_default=False),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="make the repository public", show_default=False)] = False,
    licence: Annotated[
        str, typer.Option("--license", metavar="ID", help="license identifier of the hub, for the card")
    ] = "other",
    overrides: Overrides = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Write the policy of a checkpoint in its public layout.

    For a run, the newest intact checkpoint; sharded ones are merged. Low-rank adapters on weights in
    bfloat16 act as trained only if they stay apart: load them with model.lora_path.

    --push uploads it with a model card, the run's configuration and metrics, and its newest evaluation with videos. A
    new repository is private without --public. Log in with `hf auth login`, or set HF_TOKEN.

    \b
    Examples:
      embodrl export outputs/my-run outputs/my-policy
      embodrl export outputs/my-run/checkpoints/step_20 outputs/policy-20
      embodrl eval model.warm_start=outputs/my-policy
      embodrl export outputs/my-run outputs/my-adapters --adapters apart
      embodrl export outputs/my-run outputs/for-lerobot --layout lerobot
      embodrl export outputs/my-run outputs/my-policy --push me/push-cube --license mit
    """

    def action() -> None:
        from embodrl.tools.export.checkpoint import export_checkpoint
        from embodrl.tools.export.push import check_push
        from embodrl.tools.export.push import push as run_push

        name = None if push is None else check_push(push, public)
        checkpoint, config = export_checkpoint(directory, output, overrides or [], trust, adapters.value, layout.value)
        print(f"{output}: the policy of {checkpoint.path}")
        if name is not None:
            print(run_push(name, output, checkpoint, config, public, licence))

    execute(action, debug)
