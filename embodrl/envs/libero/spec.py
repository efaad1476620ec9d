"""LIBERO: settings, facts and rules. Imports no simulator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from embodrl.config.rules.base import Context, path_kind
from embodrl.config.schema import EnvConfig, NonNegativeInt
from embodrl.envs.libero.suites import AXES, NUM_INIT_STATES, SUITES
from embodrl.interface import LIBERO, Interface
from embodrl.names import nearest
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import SimulatorSpec, TaskSuite


class LiberoConfig(EnvConfig):
    """LIBERO (MuJoCo)."""

    suite: str | None = Field(
        default=None,
        description="libero_spatial, libero_object, libero_goal or libero_10; sets tasks and max_episode_steps"
        " unless they are given",
    )
    libero_assets: str | None = Field(
        default=None,
        description="asset folder; null uses $EMBODRL_LIBERO_ASSETS, else the folder of `embodrl env install libero`",
    )
    settle_steps: NonNegativeInt = Field(
        default=10, description="motionless steps after a reset, not counted; 10 as published"
    )
    init_states: Literal["official", "sampled"] = Field(
        default="official",
        description="official: the 50 of each task, chosen by the reset seed; sampled (libero_object, and four tasks of"
        " libero_spatial whose objects begin on the table): LIBERO's own placement of objects, drawn from the reset"
        " seed, e.g. to train without the states of evaluations (env.eval.settings={init_states: official})",
    )
    fixture_seed: NonNegativeInt | None = Field(
        default=None,
        description="placement of cabinet, stove and other fixtures: null: by the reset seed; a number: as in"
        " published evaluations, which seed LIBERO with it once and reset it before each initial state",
    )
    fixtures_redrawn: bool = Field(
        default=True,
        description="with fixture_seed: each initial state has its own placement; false: all use the first",
    )


def derive(env: Mapping[str, object]) -> tuple[dict[str, object], str]:
    """Return the tasks of ``env.suite`` and the step limit of published evaluations."""
    if "suite" not in env:
        return {}, ""
    # a missing or unknown suite is one problem, not three
    suite = SUITES.get(str(env["suite"]))
    suite = suite or next(iter(SUITES.values()))
    return {"tasks": list(suite.tasks), "max_episode_steps": suite.max_episode_steps}, "suite"


ALL_ON_TABLE = {
    f"pick_up_the_black_bowl_{where}_and_place_it_on_the_plate"
    for where in (
        "between_the_plate_and_the_ramekin",
        "from_table_center",
        "next_to_the_plate",
        "next_to_the_ramekin",
    )
}
"""Tasks of libero_spatial whose objects all begin on the table, by their BDDL files."""
RULES = RuleSet()


@RULES.rule("env.env_type", "env.suite")
def suite_exists(context: Context) -> Iterator[Finding]:
    """The suite is one of LIBERO's."""
    suite = context.env(LiberoConfig).suite
    if suite in SUITES:
        return
    near = nearest(suite or "", list(SUITES))
    message = f"unknown suite '{suite}'" if suite else f"{context.config.env.env_type} needs a suite"
    hint = f"write env.suite={near or next(iter(SUITES))}"
    yield Finding("env.suite", message, hint, ", ".join(SUITES), near, others=("env.env_type",))


@RULES.rule("env.env_type", "env.suite", "env.tasks")
def tasks_are_of_the_suite(context: Context) -> Iterator[Finding]:
    """All tasks belong to the suite."""
    env = context.env(LiberoConfig)
    if env.suite not in SUITES:
        return
    for task in env.tasks:
        home = next((name for name, suite in SUITES.items() if task in suite.tasks), env.suite)
        if home != env.suite and task not in SUITES[env.suite].tasks:
            yield Finding(
                "env.tasks",
                f"'{task}' is a task of {home}, not of {env.suite}",
                f"omit env.tasks to run all of {env.suite}, or set env.suite={home}",
                "tasks of one suite",
                others=("env.suite",),
            )


@RULES.rule("env.env_type", "env.cameras")
def cameras_stay_in_the_scene(context: Context) -> Iterator[Finding]:
    """LIBERO's cameras have fixed positions."""
    for index, camera in enumerate(context.config.env.cameras):
        for name in ("fov_rad", "eye", "target"):
            if getattr(camera, name) is not None:
                key = f"env.cameras.{index}.{name}"
                yield Finding(key, "LIBERO's cameras have fixed positions in its scenes", "leave it out", "null")


@RULES.rule("env.libero_assets")
def assets_are_there(context: Context) -> Iterator[Finding]:
    """``env.libero_assets`` is an asset folder."""
    folder = context.env(LiberoConfig).libero_assets
    if folder is None:
        return
    if path_kind(folder) != "directory":
        hint = "use the folder with LIBERO's scenes/ and textures/"
        yield Finding("env.libero_assets", f"there is no directory '{folder}'", hint, "a directory, or null")
    elif path_kind(str(Path(folder) / "scenes")) != "directory":
        inside = path_kind(str(Path(folder) / "assets" / "scenes")) == "directory"
        yield Finding(
            "env.libero_assets",
            f"'{folder}' has no folder scenes/",
            f"give {Path(folder) / 'assets'}" if inside else "use the folder with LIBERO's scenes/ and textures/",
            "a directory with scenes/, textures/ and the objects",
        )


@RULES.rule("env.init_states", "env.suite", "env.tasks")
def sampled_states_are_sound(context: Context) -> Iterator[Finding]:
    """LIBERO places objects on others where these stood before the reset; in these tasks all begin on the table."""
    env = context.env(LiberoConfig)
    misplaced = [task for task in env.tasks if task not in ALL_ON_TABLE]
    if env.init_states == "sampled" and env.suite != "libero_object" and misplaced:
        message = f"{misplaced[0]} may begin with an object on or in another, which sampling would misplace"
        hint = f"set it to official, or choose env.suite=libero_object or among {', '.join(sorted(ALL_ON_TABLE))}"
        yield Finding("env.init_states", message, hint, "official", others=("env.suite", "env.tasks"))


@RULES.rule("env.init_states", "env.fixture_seed")
def sampled_states_have_their_own_fixtures(context: Context) -> Iterator[Finding]:
    """The fixture placement of published evaluations belongs to the official initial states."""
    env = context.env(LiberoConfig)
    if env.init_states == "sampled" and env.fixture_seed is not None:
        message = "places fixtures as in published evaluations, but sampled initial states place them by the reset seed"
        hint = "set it to null, or env.init_states=official"
        yield Finding("env.fixture_seed", message, hint, "null", others=("env.init_states",))


@RULES.note("env.env_type", "env.eval.num_episodes", "env.tasks")
def initial_states_come_once(context: Context) -> Iterator[Finding]:
    """An evaluation with more episodes than initial states repeats some."""
    env = context.env(LiberoConfig)
    if env.init_states == "sampled":
        return
    there_are = NUM_INIT_STATES * len(env.tasks)
    if env.eval.num_episodes > there_are:
        yield Finding(
            "env.eval.num_episodes",
            f"{len(env.tasks)} tasks have {there_are} official initial states; some will be used twice",
            f"{there_are} uses each once",
        )


def interface(env: EnvConfig) -> Interface:
    """Return LIBERO's conventions, with the configured cameras and state."""
    cameras = tuple(camera.name for camera in env.cameras)
    state = (LIBERO.state or ()) + (("task",) if env.state == "full" else ())
    return replace(LIBERO, cameras=cameras, state=state if env.include_state else None)


SPEC = SimulatorSpec(
    name="libero",
    robots=("panda", "franka"),
    control_hz=20.0,
    target="embodrl.envs.libero.env:LiberoVectorEnv",
    description="LIBERO (MuJoCo, Panda): the standard suites, their official tasks and initial states",
    settings=LiberoConfig,
    rules=(RULES,),
    reads=("cameras", "include_images", "state", "reward_mode", "success_bonus", "render_detail", "video"),
    tasks={task: facts.instruction for suite in SUITES.values() for task, facts in suite.tasks.items()},
    suites={
        name: TaskSuite(suite.max_episode_steps, {task: facts.instruction for task, facts in suite.tasks.items()})
        for name, suite in SUITES.items()
    },
    derive=derive,
    action_dim=7,
    reward_modes=("sparse",),
    cameras=("agentview", "wrist", "frontview", "birdview", "sideview"),
    posed_cameras=False,
    isolated=True,
    imports=("mujoco", "numba", "scipy", "cv2", "bddl", "robosuite.macros", "matplotlib.cm", "fast_simplification"),
    draws_with="mujoco",
    probe="embodrl.envs.libero.probe:find_problems",
    warnings="embodrl.envs.libero.probe:find_warnings",
    example={
        "suite": next(iter(SUITES)),
        "tasks": [next(iter(next(iter(SUITES.values())).tasks))],
        "cameras": [{"name": "agentview", "height": 64, "width": 64}],
        "settle_steps": 0,
        "max_episode_steps": 1,
    },
    actions="change of the gripper's pose (x, y, z, three angles) and gripper closing by sign, -1 to 1",
    camera_list="agentview, wrist, frontview, birdview, sideview",
    experts="libero_object, the first task of libero_spatial; `embodrl convert libero` reads LIBERO's demonstrations",
    expert_tasks=(*SUITES["libero_object"].tasks, next(iter(SUITES["libero_spatial"].tasks))),
    demonstrations="`embodrl convert libero` converts LIBERO's own demonstrations to a dataset",
    interface=interface,
    axes=AXES,
    verified="CPU rendering (MUJOCO_GL=egl); not yet on a GPU",
)
