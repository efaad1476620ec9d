"""`embodrl convert`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.app import choose, one_of
from embodrl.cli.common import Debug, execute

# LIBERO's control frequency.
FPS = 20


class SourceFormat(StrEnum):
    """What can be read."""

    libero = "libero"


class Format(StrEnum):
    """What can be written."""

    lerobot = "lerobot"
    raw = "raw"


def convert(
    layout: Annotated[
        str,
        typer.Argument(
            metavar="LAYOUT",
            help="of the source: libero (HDF5)",
            show_default=False,
            autocompletion=one_of(SourceFormat),
        ),
    ],
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="file or directory", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="a new directory", show_default=False)],
    cameras: Annotated[str, typer.Option(metavar="NAMES", help="in the order of env.cameras")] = "agentview",
    keep_idle: Annotated[
        bool, typer.Option("--keep-idle", help="keep frames in which nothing is commanded", show_default=False)
    ] = False,
    to: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="lerobot or raw", autocompletion=one_of(Format))
    ] = Format.lerobot,
    debug: Debug = False,
) -> None:
    """Convert demonstrations of another layout for `embodrl sft`.

    \b
    Examples:
      embodrl convert libero datasets/libero_spatial --output data/libero_spatial
      embodrl convert libero datasets/libero_goal -o data/goal --cameras agentview,wrist
    """

    def action() -> None:
        choose(layout, SourceFormat, "layout")
        chosen = Format(choose(to, Format, "format"))
        from embodrl.data.dataset_writer import DatasetWriter
        from embodrl.data.lerobot_writer import LeRobotWriter
        from embodrl.data.raw import RawWriter
        from embodrl.extras.converters.libero_hdf5 import convert as run

        def make_writer() -> DatasetWriter:
            if chosen is Format.raw:
                return RawWriter(output)
            return LeRobotWriter(output, names, FPS, robot_type="panda")

        names = tuple(part.strip() for part in cameras.split(",") if part.strip())
        episodes, frames = run(source, make_writer, names, keep_idle, lambda line: print(line, flush=True))
        print(f"{episodes} episodes, {frames} frames in {output}: embodrl sft env=libero sft.data_dir={output}")

    execute(action, debug)
