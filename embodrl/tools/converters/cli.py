"""`embodrl convert`."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embodrl.cli.app import choose, one_of
from embodrl.cli.common import Debug, execute
from embodrl.errors import UsageError

if TYPE_CHECKING:
    from embodrl.data.dataset_writer import DatasetWriter

# LIBERO's control frequency.
LIBERO_FPS = 20
RLDS_FPS = 10


class SourceFormat(StrEnum):
    """Formats that can be read."""

    libero = "libero"
    rlds = "rlds"


class Format(StrEnum):
    """Formats that can be written."""

    lerobot = "lerobot"
    raw = "raw"


def convert(
    layout: Annotated[
        str,
        typer.Argument(
            metavar="LAYOUT",
            help="source format: libero (HDF5), rlds (TFRecord files with features.json)",
            show_default=False,
            autocompletion=one_of(SourceFormat),
        ),
    ],
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="file or directory", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="a new directory", show_default=False)],
    cameras: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="cameras in the order of env.cameras; default: agentview for libero, all non-blank ones for rlds",
            show_default=False,
        ),
    ] = None,
    keep_idle: Annotated[
        bool, typer.Option("--keep-idle", help="libero: keep frames without a command", show_default=False)
    ] = False,
    action: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="rlds: features that form the action; default: action", show_default=False),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="rlds: features that form the state; default: observation/state", show_default=False
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="rlds: split to convert; default: train, or the only one", show_default=False
        ),
    ] = None,
    fps: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="rlds: frames per second, which the dataset does not state", show_default=False
        ),
    ] = None,
    instruction: Annotated[
        str | None, typer.Option(metavar="TEXT", help="replaces the data's own instruction", show_default=False)
    ] = None,
    upright: Annotated[
        bool,
        typer.Option("--upright", help="libero: images are stored upright; do not rotate them", show_default=False),
    ] = False,
    to: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="lerobot or raw", autocompletion=one_of(Format))
    ] = Format.lerobot,
    debug: Debug = False,
) -> None:
    """Convert demonstrations from another layout for `embodrl sft`.

    \b
    Examples:
      embodrl convert libero datasets/libero_spatial --output data/libero_spatial
      embodrl convert libero datasets/libero_goal -o data/goal --cameras agentview,wrist
      embodrl convert rlds datasets/bridge_dataset/1.0.0 -o data/bridge --fps 5
    """

    def run() -> None:
        read = SourceFormat(choose(layout, SourceFormat, "layout"))
        chosen = Format(choose(to, Format, "format"))
        of_rlds = {"--action": action, "--state": state, "--split": split, "--fps": fps}
        foreign = [name for name, value in of_rlds.items() if value is not None] if read is SourceFormat.libero else []
        of_libero = {"--keep-idle": keep_idle, "--upright": upright}
        foreign += [name for name, value in of_libero.items() if value] if read is SourceFormat.rlds else []
        if foreign:
            raise UsageError(f"{foreign[0]} is not for {read}", "leave it out", code="convert-option")
        if read is SourceFormat.rlds:
            from embodrl.tools.converters.rlds import Rlds, RldsChoice

            choice = RldsChoice(_names(cameras), _names(action) or ("action",), _names(state), split, instruction)
            data = Rlds(source, choice, _say)
            if fps is None and chosen is Format.lerobot:
                _say(f"an RLDS dataset states no frame rate: {RLDS_FPS} frames per second are written (--fps)")
            names = tuple(data.cameras)
            episodes, frames = data.convert(partial(_writer, chosen, output, names, fps or RLDS_FPS, None))
            env = "dataset"
        else:
            from embodrl.tools.converters.libero_hdf5 import convert as convert_libero

            names = _names(cameras) or ("agentview",)
            writer = partial(_writer, chosen, output, names, LIBERO_FPS, "panda")
            episodes, frames = convert_libero(source, writer, names, keep_idle, _say, instruction, upright)
            env = "libero"
        print(f"{episodes} episodes, {frames} frames in {output}: embodrl sft env={env} sft.data_dir={output}")

    execute(run, debug)


def _say(line: str) -> None:
    print(line, flush=True)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def _writer(chosen: Format, output: Path, cameras: tuple[str, ...], fps: int, robot: str | None) -> DatasetWriter:
    from embodrl.data.lerobot_writer import LeRobotWriter
    from embodrl.data.raw import RawWriter

    return RawWriter(output) if chosen is Format.raw else LeRobotWriter(output, cameras, fps, robot_type=robot)
