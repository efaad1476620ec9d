"""`embodrl data check` and `embodrl data stats`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from embodrl.cli.app import add, choose, make_app, one_of
from embodrl.cli.common import EXIT_ERROR, EXIT_OK, Debug, JsonFile, Overrides, execute
from embodrl.errors import UsageError

if TYPE_CHECKING:
    from embodrl.tools.data_check.check import DataReport

app = make_app()
GRIPPERS = ("as_is", "libero", "bridge")

Directory = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="a LeRobot dataset, or a collection with collect.format=raw", show_default=False
    ),
]


@app.callback()
def about() -> None:
    """Inspect demonstrations: common causes of failed fine-tunes, and statistics.

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
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="compare only with episodes that it was not trained on", show_default=False),
    ] = False,
    episodes: Annotated[int, typer.Option("--episodes", metavar="N", min=1, help="replayed at most")] = 16,
    json: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Check for common causes of failed fine-tunes: units, grippers, lag, cameras, copies, frames.

    With --env, demonstrations of `embodrl collect` are replayed open-loop from their seeds; with --policy, its actions
    are compared with the data's. ARGS are settings of either; with model=NAME all instructions are encoded for
    that model. Exit code 1 if there is an error.

    \b
    Examples:
      embodrl data check data/push
      embodrl data check data/push --env maniskill --episodes 8
      embodrl data check data/push --policy outputs/sft --json check.json
      embodrl data check data/bridge --policy outputs/sft --held-out
    """

    def action() -> int:
        from embodrl.config.compose import concerning
        from embodrl.pipelines.load import load_config
        from embodrl.storage.json_file import check_json_file, write_json_result
        from embodrl.tools.data_check.check import check_data

        if json is not None:
            check_json_file(json)
        if held_out and policy is None:
            raise UsageError("--held-out compares a policy", "add --policy PATH", code="held-out-without-policy")
        given = list(overrides or [])
        for_policy = given
        if env is not None and policy is not None:  # the arguments are shared by two verbs
            of_env = concerning(given, "collect")
            of_policy = concerning(given, "sft")
            for_policy = [text for text in given if text in of_policy or text not in of_env]
            given = of_env
        config = None if env is None else load_config([f"env={env}", *given], verb="collect").config
        keys = _keys(directory, overrides)
        named = [text for text in overrides or [] if text.startswith(("model=", "model.", "sft."))]
        model = None
        if policy is None and any(text.startswith("model") for text in named):
            model = load_config(["env=dataset", f"sft.data_dir={directory}", *named], verb="sft").config
        report = check_data(directory, config, policy, episodes, for_policy, keys, held_out, model)
        show(report, env is None, held_out)
        if json is not None:
            write_json_result(json, report.to_dict())
        return EXIT_ERROR if report.has_errors else EXIT_OK

    execute(action, debug)


def _keys(directory: Path, overrides: list[str] | None) -> dict[str, str]:
    from embodrl.pipelines.load import load_config

    names = [text for text in overrides or [] if text.startswith("sft.keys")]
    of_data = ["env=dataset", f"sft.data_dir={directory}", *names]
    return dict(load_config(of_data, verb="sft").config.sft.keys) if names else {}


def show(report: DataReport, suggest_replay: bool, held_out: bool = False) -> None:
    """Print a report, and with ``suggest_replay`` what a replay could find."""
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
        on = report.policy
        is_known = held_out and "held-out-other-dataset" not in {found.code for found in report.findings}
        apart = " that it was not trained on" if is_known else ""
        names = ("dimension", "mean error", "of the mean action", "of zero", "out of range")
        table = Table(*names, title=f"policy on {on.frames} frames of {on.episodes} episodes{apart}")
        rows = zip(on.mean_abs_error, on.of_the_mean, on.of_zero, on.out_of_range, strict=True)
        for index, (error, plain, zero, outside) in enumerate(rows):
            table.add_row(str(index), f"{error:.4g}", f"{plain:.4g}", f"{zero:.4g}", f"{outside:.1%}")
        every = [sum(part) / len(part) for part in (on.mean_abs_error, on.of_the_mean, on.of_zero)]
        table.add_row("mean", *(f"{value:.4g}" for value in every), "")
        console.print(table)
    table = Table("", "code", "what", "what to do")
    for found in report.findings:
        table.add_row(found.level, found.code, found.message, found.hint)
    console.print(table if report.findings else "nothing found")
    if report.encoded is None:
        console.print("instructions were not encoded: model=NAME says whether they fit into its prompts")
    else:
        console.print(f"{report.encoded} different instructions were encoded")
    if suggest_replay:
        console.print("next: --env NAME replays the episodes, which also finds a swapped gripper or another controller")


def stats(
    directory: Directory,
    overrides: Overrides = None,
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

    ARGS may be sft.keys.

    \b
    Examples:
      embodrl data stats data/push --output push_stats.json
      embodrl data stats datasets/libero --gripper libero
      embodrl data stats datasets/vla0 'sft.keys={action: actions, state: state}'
    """

    def action() -> None:
        from embodrl.data.load import is_lerobot, load_demos
        from embodrl.learners.imitation_policy import demo_statistics
        from embodrl.models.common.gripper import Convention
        from embodrl.storage.json_file import check_json_file

        if foreign := [text for text in overrides or [] if not text.startswith("sft.keys")]:
            hint = "leave it out: statistics cover all frames, and only sft.keys applies"
            raise UsageError(f"`embodrl data stats` does not read '{foreign[0]}'", hint, code="data-stats-setting")
        check_json_file(output)
        convention = cast(Convention, choose(gripper, GRIPPERS, "gripper convention"))
        demos = load_demos(directory, cameras=() if is_lerobot(directory) else None, keys=_keys(directory, overrides))
        found, narrow = demo_statistics(demos, directory, convention, include_state=True)
        found.write(output)
        print(f"{output}: {found.num_frames} frames of {found.num_episodes} episodes of {found.name}")
        if narrow:
            print(f"action dimensions {narrow} hardly move: q01 and q99 are their minimum and maximum")

    execute(action, debug)


add(app, check)
add(app, stats)
