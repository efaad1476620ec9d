"""LIBERO: suites, tasks, cameras, assets, interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embodrl.config.isolated import AUTO, installable
from embodrl.config.rules.base import Context, Finding, note, rule, what_is
from embodrl.names import nearest
from embodrl.registry import ENVS

INIT_STATES = 50
"""Official initial states of a task."""


def _facts(context: Context) -> dict[str, Any]:
    name = context.config.env.env_type
    return ENVS.entry(name).facts if name in ENVS else {}


@rule("env.env_type", "env.suite")
def suite_exists(context: Context) -> Iterator[Finding]:
    """The suite is one of the environment's."""
    suites: dict[str, Any] = _facts(context).get("suites", {})
    suite = context.config.env.suite
    if not suites or suite in suites:
        return
    near = nearest(suite or "", list(suites))
    message = f"there is no suite '{suite}'" if suite else f"{context.config.env.env_type} needs a suite"
    hint = f"write env.suite={near or next(iter(suites))}"
    yield Finding("env.suite", message, hint, ", ".join(suites), near, others=("env.env_type",))


@rule("env.env_type", "env.suite", "env.tasks")
def tasks_are_of_the_suite(context: Context) -> Iterator[Finding]:
    """All tasks belong to the suite."""
    env, facts = context.config.env, _facts(context)
    suites: dict[str, Any] = facts.get("suites", {})
    if env.suite not in suites:
        return
    for task in env.tasks:
        if task in facts["tasks"] and task not in suites[env.suite]["tasks"]:
            home = next(name for name, suite in suites.items() if task in suite["tasks"])
            yield Finding(
                "env.tasks",
                f"'{task}' is a task of {home}, not of {env.suite}",
                f"leave env.tasks out to play all of {env.suite}, or set env.suite={home}",
                "tasks of one suite",
                others=("env.suite",),
            )


@rule("env.env_type", "env.cameras")
def cameras_stay_in_the_scene(context: Context) -> Iterator[Finding]:
    """LIBERO's cameras have places of their own."""
    env = context.config.env
    if env.env_type != "libero":
        return
    for index, camera in enumerate(env.cameras):
        for name in ("fov_rad", "eye", "target"):
            if getattr(camera, name) is not None:
                key = f"env.cameras.{index}.{name}"
                yield Finding(key, "LIBERO's cameras are where its scenes put them", "leave it out", "null")


@rule("env.libero_assets")
def assets_are_there(context: Context) -> Iterator[Finding]:
    """The asset folder that is named is one."""
    folder = context.config.env.libero_assets
    if folder is None:
        return
    if what_is(folder) != "directory":
        hint = "give the folder with LIBERO's scenes/ and textures/"
        yield Finding("env.libero_assets", f"there is no directory '{folder}'", hint, "a directory, or null")
    elif what_is(str(Path(folder) / "scenes")) != "directory":
        inside = what_is(str(Path(folder) / "assets" / "scenes")) == "directory"
        yield Finding(
            "env.libero_assets",
            f"'{folder}' has no folder scenes/",
            f"give {Path(folder) / 'assets'}" if inside else "give the folder with LIBERO's scenes/ and textures/",
            "a directory with scenes/, textures/ and the objects",
        )


@rule("env.env_type", "env.python")
def interpreter_can_be_found(context: Context) -> Iterator[Finding]:
    """Only simulators with pinned requirements have an interpreter of their own to be found."""
    env = context.config.env
    if env.python == AUTO and env.env_type not in installable():
        yield Finding(
            "env.python",
            f"there is no environment of its own for {env.env_type} that `embodrl env install` could make",
            "set env.python=null, or give the path of an interpreter that has the simulator",
            "the path of an interpreter, or null",
            others=("env.env_type",),
        )


@note("env.env_type", "env.eval.num_episodes", "env.tasks")
def initial_states_come_once(context: Context) -> Iterator[Finding]:
    """An evaluation of more episodes than there are initial states repeats some."""
    env = context.config.env
    there_are = INIT_STATES * len(env.tasks)
    if env.env_type == "libero" and env.eval.num_episodes > there_are:
        yield Finding(
            "env.eval.num_episodes",
            f"{len(env.tasks)} tasks have {there_are} official initial states; some will be played twice",
            f"{there_are} plays each once",
        )
