"""What the chosen simulator is, knows and reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from embodrl.config.isolated import AUTO
from embodrl.config.rules.base import Context, Finding, note, rule
from embodrl.names import nearest
from embodrl.registry import ENVS, env_tasks

OPTIONAL = (
    "reward_mode",
    "success_bonus",
    "sim_backend",
    "render_backend",
    "mesh_decimation",
    "render_detail",
    "id",
    "instruction",
    "success_key",
    "success_threshold",
    "suite",
    "libero_assets",
    "settle_steps",
)
"""Settings that some environments do not read."""


def shortened(names: Iterable[str], limit: int = 12) -> str:
    """Return the names, or the first of them where they are many."""
    every = list(names)
    return ", ".join(every[:limit]) + (f" and {len(every) - limit} more" if len(every) > limit else "")


@rule("env.env_type")
def env_is_registered(context: Context) -> Iterator[Finding]:
    """The environment has a name in the registry."""
    name = context.config.env.env_type
    if name not in ENVS:
        near = nearest(name, ENVS.names())
        hint = f"write env.env_type={near}" if near else "choose a known one, or name the module that registers it"
        yield Finding("env.env_type", f"there is no environment '{name}'", hint, ", ".join(ENVS), near)


@rule("env.env_type", "env.tasks")
def tasks_exist(context: Context) -> Iterator[Finding]:
    """The environment knows the tasks, and each is named once."""
    env = context.config.env
    known = env_tasks(env.env_type)
    for index, task in enumerate(env.tasks):
        if task in env.tasks[:index]:
            yield Finding(
                "env.tasks", f"the task '{task}' is named twice", "name each task once; they share the episodes"
            )
        elif known and task not in known:
            near = nearest(task, list(known))
            hint = f"write {near}" if near else "see `embodrl list envs`"
            yield Finding("env.tasks", f"{env.env_type} has no task '{task}'", hint, shortened(known), near)


@rule("env.env_type", "model.action_dim")
def action_dims_agree(context: Context) -> Iterator[Finding]:
    """The policy's actions are what the environment takes."""
    config = context.config
    facts = ENVS.entry(config.env.env_type).facts if config.env.env_type in ENVS else {}
    wanted = facts.get("action_dim")
    if wanted is not None and wanted != config.model.action_dim:
        yield Finding(
            "model.action_dim",
            f"the policy gives {config.model.action_dim} numbers an action, {config.env.env_type} takes {wanted}",
            f"set it to {wanted}",
            str(wanted),
            others=("env.env_type",),
        )


@rule("env.env_type", "env.reward_mode", "env.cameras")
def env_offers_it(context: Context) -> Iterator[Finding]:
    """The environment has that kind of reward, and those cameras."""
    env = context.config.env
    facts = ENVS.entry(env.env_type).facts if env.env_type in ENVS else {}
    modes: tuple[str, ...] = facts.get("reward_modes", (env.reward_mode,))
    if env.reward_mode not in modes:
        lack = "reward of which the change could be taken" if "dense" in modes else "dense reward"
        message, hint = f"{env.env_type} has no {lack}", f"set it to {modes[0]}"
        yield Finding("env.reward_mode", message, hint, ", ".join(modes), others=("env.env_type",))
    known: tuple[str, ...] = facts.get("cameras", ())
    movable = facts.get("movable_cameras", True)
    for index, camera in enumerate(env.cameras):
        if known and camera.name not in known and not (movable and camera.eye is not None):
            near = nearest(camera.name, list(known))
            message = f"{env.env_type} has no camera '{camera.name}'" + ", and no place for one is given" * movable
            hint = f"write {near}" if near else "name one" + ", or give eye and target" * movable
            yield Finding(f"env.cameras.{index}.name", message, hint, ", ".join(known), near)
    if len(env.cameras) > facts.get("max_cameras", len(env.cameras)):
        message = f"{env.env_type} has {facts['max_cameras']} camera, not {len(env.cameras)}"
        yield Finding("env.cameras", message, "leave one", others=("env.env_type",))


@rule("env.env_type", "env.id", "env.instruction")
def gymnasium_is_told_what(context: Context) -> Iterator[Finding]:
    """Gymnasium wants an id, and has no words for the policy."""
    env = context.config.env
    if env.env_type != "gymnasium":
        return
    if not env.id:
        yield Finding("env.id", "is missing: which environment of Gymnasium?", "set env.id=Reacher-v5, say", "an id")
    if not env.instruction:
        hint = 'set env.instruction="move the finger to the ball", say'
        yield Finding("env.instruction", "is missing: Gymnasium has no words for the policy", hint, "a sentence")
    elif env.id and context.by_user("env.id") and not context.by_user("env.instruction"):
        hint = 'set env.instruction="...": what the policy is told to do there'
        message = f"'{env.instruction}' is what another environment wants, not {env.id}"
        yield Finding("env.instruction", message, hint, "a sentence", others=("env.id",))


@rule("env.python")
def interpreter_exists(context: Context) -> Iterator[Finding]:
    """The interpreter of the simulator processes can be run."""
    python = context.config.env.python
    if python is not None and python != AUTO and not (Path(python).is_file() and os.access(python, os.X_OK)):
        hint = "give the path of a Python interpreter that has the simulator, auto, or null for this one"
        message = f"'{python}' is not a program that can be run"
        yield Finding("env.python", message, hint, "the path of an interpreter, auto, or null")
    elif python is not None and python != AUTO:
        names = (Path(python).name, Path(python).resolve().name)
        if not any(name.lower().startswith(("python", "pypy")) for name in names):
            hint = "give the path of a Python interpreter, e.g. /path/to/venv/bin/python"
            yield Finding("env.python", f"'{python}' is not a Python interpreter", hint, "a path that ends in python")


@note("env.env_type", "env.render_detail", "env.mesh_decimation")
def decimation_decides(context: Context) -> Iterator[Finding]:
    """A part of the triangles that is named goes before the kind of pictures."""
    env = context.config.env
    read: tuple[str, ...] = ENVS.entry(env.env_type).facts.get("settings", ()) if env.env_type in ENVS else ()
    if "mesh_decimation" in read and env.mesh_decimation != "auto" and context.by_user("env.render_detail"):
        message = f"has no effect: env.mesh_decimation is {env.mesh_decimation:g}, which decides alone"
        yield Finding("env.render_detail", message, "leave it out, or set env.mesh_decimation=auto")


@note("env")
def env_keys_without_effect(context: Context) -> Iterator[Finding]:
    """Settings that this environment does not read."""
    name = context.config.env.env_type
    if name not in ENVS:
        return
    # an environment of the user's may film itself, at a size of its own
    read = ENVS.entry(name).facts.get("settings", ())
    videos = () if "video" in read else [f"video.{part}" for part in ("height", "width", "fps")]
    places = () if name != "gymnasium" else [f"cameras.0.{part}" for part in ("fov_rad", "eye", "target")]
    for part in (*(key for key in OPTIONAL if key not in read), *videos, *places):
        if context.by_user(f"env.{part}"):
            yield Finding(f"env.{part}", f"has no effect: {name} does not read it", "leave it out")
