"""`embodrl data check` and `embodrl data stats`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from embodrl.cli.app import add, choose, make_app, one_of
from embodrl.cli.common import EXIT_ERROR, EXIT_OK, Debug, JsonFile, Overrides, execute

if TYPE_CHECKING:
    from embodrl.extras.data_check.check import DataReport

app = make_app()
GRIPPERS = ("as_is", "libero", "bridge")

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="a LeRobot dataset, or what collect.format=raw wrote", show_default=False)
]


@app.callback()
def about() -> None:
    """Look at demonstrations: what makes fine-tunes fail, and statistics.

    \b
    Examples:
      embodrl data check data/push
      embodrl data stats data/push --output push_stats.json
    """


def check(
    directory: Directory,
    overrides: Overrides = None,
    env: Annotated[
        str | None, typer.Option("--env", metavar="NAME", help="replay them in this env preset", show_default=False)
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option("--policy", metavar="PATH", help="compare with a run or policy directory", show_default=False),
    ] = None,
    episodes: Annotated[int, typer.Option("--episodes", metavar="N", min=1, help="replayed at most")] = 16,
    json: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Look for what makes fine-tunes fail: units, grippers, lag, cameras, copies, frames.

    With --env, demonstrations of `embodrl collect` are repeated open-loop from their seeds; with --policy, its actions
    are compared with those of the data. ARGS are settings of either. Exit code 1 if there is an error.

    \b
    Examples:
      embodrl data check data/push
      embodrl data check data/push --env maniskill --episodes 8
      embodrl data check data/push --policy outputs/sft --json check.json
    """

    def action() -> int:
        from embodrl.config.compose import concerning
        from embodrl.extras.data_check.check import check_data
        from embodrl.pipelines.load import load_config
        from embodrl.storage.json_file import check_json_file, write_json_result

        if json is not None:
            check_json_file(json)
        given = list(overrides or [])
        for_policy = given
        if env is not None and policy is not None:  # two verbs share the arguments
            of_env = concerning(given, "collect")
            of_policy = concerning(given, "sft")
            for_policy = [text for text in given if text in of_policy or text not in of_env]
            given = of_env
        config = None if env is None else load_config([f"env={env}", *given], verb="collect").config
        names = [text for text in overrides or [] if text.startswith("sft.keys")]
        of_data = ["env=dataset", f"sft.data_dir={directory}", *names]
        keys = load_config(of_data, verb="sft").config.sft.keys if names else {}
        report = check_data(directory, config, policy, episodes, for_policy, keys)
        show(report, suggest_replay=env is None)
        if json is not None:
            write_json_result(json, report.to_dict())
        return EXIT_ERROR if report.has_errors else EXIT_OK

    execute(action, debug)


def show(report: DataReport, suggest_replay: bool) -> None:
    """Print a report, and with ``suggest_replay`` what a replay would find."""
    from rich.table import Table

    from embodrl.reporting.terminal import safe_console

    console = safe_console()
    facts = report.facts
    cameras = ", ".join(f"{name} {height} x {width}" for name, (height, width) in facts.cameras.items())
    rate = "" if facts.fps is None else f", {facts.fps:g} frames per second"
    console.print(f"{report.directory}: {report.num_episodes} episodes, {report.num_frames} frames{rate}")
    console.print(f"robot {facts.robot_type or 'not stated'}, {facts.action_dim} action dimensions,", end=" ")
    console.print(f"{facts.state_dim} of the state, cameras: {cameras or 'none'}")
    if report.replay is not None:
        again = report.replay.success
        before = report.replay.recorded_success
        console.print(f"replayed {report.replay.episodes} episodes: success {again:.0%}, recorded {before:.0%}")
    if report.policy is not None:
        table = Table("dimension", "mean error", "of the mean action", "out of range", title="policy on the data")
        rows = zip(report.policy.mean_abs_error, report.policy.of_the_mean, report.policy.out_of_range, strict=True)
        for index, (error, plain, outside) in enumerate(rows):
            table.add_row(str(index), f"{error:.4g}", f"{plain:.4g}", f"{outside:.1%}")
        console.print(table)
    table = Table("", "code", "what", "what to do")
    for found in report.findings:
        table.add_row(found.level, found.code, found.message, found.hint)
    console.print(table if report.findings else "nothing found")
    if suggest_replay:
        console.print("next: --env NAME replays the episodes, which also finds a swapped gripper or another controller")


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
        from embodrl.learners.imitation_policy import demo_statistics
        from embodrl.models.common.gripper import Convention
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


add(app, check)
add(app, stats)
