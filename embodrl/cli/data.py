"""`embodrl data stats`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from embodrl.cli.app import add, choose, make_app, one_of
from embodrl.cli.common import Debug, execute

app = make_app()
GRIPPERS = ("as_is", "libero", "bridge")

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="a LeRobot dataset, or what collect.format=raw wrote", show_default=False)
]


@app.callback()
def about() -> None:
    """Look at demonstrations: statistics.

    \b
    Examples:
      embodrl data stats data/push --output push_stats.json
    """


def stats(
    directory: Directory,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="JSON file for sft.stats and model.stats_path")
    ] = Path("statistics.json"),
    gripper: Annotated[
        str,
        typer.Option("--gripper", metavar="NAME", help="model.gripper of the policy", autocompletion=one_of(GRIPPERS)),
    ] = GRIPPERS[0],
    debug: Debug = False,
) -> None:
    """Compute the statistics of actions and state: mean, std, min, max and quantiles of all frames.

    \b
    Examples:
      embodrl data stats data/push --output push_stats.json
      embodrl data stats datasets/libero --gripper libero
    """

    def action() -> None:
        from embodrl.data.load import is_lerobot, load_demos
        from embodrl.models.common.gripper import Convention
        from embodrl.runs.sft import demo_statistics
        from embodrl.storage.json_file import check_json_file

        check_json_file(output)
        convention = cast(Convention, choose(gripper, GRIPPERS, "gripper convention"))
        demos = load_demos(directory, cameras=() if is_lerobot(directory) else None)
        found, narrow = demo_statistics(demos, directory, convention, include_state=True)
        found.write(output)
        print(f"{output}: {found.num_frames} frames of {found.num_episodes} episodes of {found.name}")
        if narrow:
            print(f"action dimensions {narrow} hardly move: q01 and q99 are their minimum and maximum")

    execute(action, debug)


add(app, stats)
