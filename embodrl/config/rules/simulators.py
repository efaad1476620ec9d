"""Capabilities and settings of the chosen simulator."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from embodrl.config.isolated import AUTO, installable
from embodrl.config.other_systems import advice
from embodrl.config.rules.base import Context, note, path_kind, rule, value_of
from embodrl.names import is_misspelt, nearest
from embodrl.rule_set import Finding
from embodrl.specs import ENVS, READABLE


def shortened(names: Iterable[str], limit: int = 12) -> str:
    """Return the names, or the first of them if there are many."""
    every = list(names)
    return ", ".join(every[:limit]) + (f" and {len(every) - limit} more" if len(every) > limit else "")


@rule("env.env_type")
def env_is_registered(context: Context) -> Iterator[Finding]:
    """The environment's name is registered."""
    name = context.config.env.env_type
    if name not in ENVS:
        near = nearest(name, ENVS.names())
        hint = (
            f"write env.env_type={near}"
            if is_misspelt(name, near)
            else "choose a known environment, or name the module that registers yours"
        )
        near, hint = advice("env", name) or (near, hint)
        yield Finding("env.env_type", f"no environment '{name}'", hint, ", ".join(ENVS), near)


@rule("env.env_type", "env.tasks")
def tasks_exist(context: Context) -> Iterator[Finding]:
    """The environment knows the tasks, and each is named once."""
    env = context.config.env
    known = context.simulator.instructions() if context.simulator is not None else {}
    for index, task in enumerate(env.tasks):
        if task in env.tasks[:index]:
            yield Finding(
                "env.tasks", f"the task '{task}' is named twice", "name each task once; tasks share the episodes"
            )
        elif known and task not in known:
            near = nearest(task, list(known))
            hint = f"write {near}" if is_misspelt(task, near) else "see `embodrl list envs`"
            yield Finding("env.tasks", f"{env.env_type} has no task '{task}'", hint, shortened(known), near)


def _without_simulator() -> str:
    names = [f"env={spec.name}" for spec in ENVS.all() if not spec.simulates]
    return f"; data of other robots need no simulator: {' or '.join(names)}"


@rule("env.env_type", "model.action_dim")
def action_dims_agree(context: Context) -> Iterator[Finding]:
    """The policy's action dimension matches the environment's."""
    config = context.config
    wanted = context.simulator.action_dim if context.simulator is not None else None
    if wanted is not None and wanted != config.model.action_dim:
        yield Finding(
            "model.action_dim",
            f"the policy gives {config.model.action_dim} dimensions per action, {config.env.env_type} takes {wanted}",
            f"set it to {wanted}" + _without_simulator() * (context.verb == "sft"),
            str(wanted),
            others=("env.env_type",),
        )


@rule("env.env_type", "env.reward_mode")
def env_has_the_reward(context: Context) -> Iterator[Finding]:
    """The environment has the chosen kind of reward."""
    env = context.config.env
    modes = context.simulator.reward_modes if context.simulator is not None else None
    if modes and env.reward_mode not in modes:
        lack = "reward whose change could be computed" if "dense" in modes else "dense reward"
        message = f"{env.env_type} has no {lack}"
        hint = f"set it to {modes[0]}"
        yield Finding("env.reward_mode", message, hint, ", ".join(modes), others=("env.env_type",))
    elif modes is None and env.reward_mode == "potential" and env.env_type not in ENVS.builtin:
        message = f"{env.env_type} does not declare that it discounts potentials"
        hint = "set it to dense_delta, or register it with 'potential' in reward_modes=(...); its class then takes"
        hint += " shaping_gamma and discounts_actions as well"
        yield Finding("env.reward_mode", message, hint, "dense_delta, dense, sparse", others=("env.env_type",))


@rule("env.env_type", "env.cameras")
def env_has_the_cameras(context: Context) -> Iterator[Finding]:
    """The environment has the configured cameras."""
    env = context.config.env
    spec = context.simulator
    if spec is None:
        return
    known = spec.cameras or ()
    for index, camera in enumerate(env.cameras):
        if known and camera.name not in known and not (spec.posed_cameras and camera.eye is not None):
            near = nearest(camera.name, list(known))
            message = f"{env.env_type} has no camera '{camera.name}'"
            message += ", and no camera pose is given" * spec.posed_cameras
            hint = f"write {near}" if is_misspelt(camera.name, near) else "name one"
            hint += ", or give eye and target" * spec.posed_cameras
            yield Finding(f"env.cameras.{index}.name", message, hint, ", ".join(known), near)
    if spec.max_cameras is not None and len(env.cameras) > spec.max_cameras:
        message = f"{env.env_type} has {spec.max_cameras} camera, not {len(env.cameras)}"
        yield Finding("env.cameras", message, "leave one", others=("env.env_type",))


@rule("env.python")
def interpreter_exists(context: Context) -> Iterator[Finding]:
    """The interpreter of the simulator processes is executable."""
    python = context.config.env.python
    if python is not None and python != AUTO and not (path_kind(python) == "file" and os.access(python, os.X_OK)):
        hint = (
            "give the path of a Python interpreter that has the simulator installed, auto, or null for the current one"
        )
        message = f"'{python}' is not executable"
        yield Finding("env.python", message, hint, "the path of an interpreter, auto, or null")
    elif python is not None and python != AUTO:
        names = (Path(python).name, Path(python).resolve().name)
        if not any(name.lower().startswith(("python", "pypy")) for name in names):
            hint = "give the path of a Python interpreter, e.g. /path/to/venv/bin/python"
            yield Finding("env.python", f"'{python}' is not a Python interpreter", hint, "a path that ends in python")


@rule("env.env_type", "env.python")
def interpreter_can_be_found(context: Context) -> Iterator[Finding]:
    """Only simulators with pinned requirements have their own installed interpreter."""
    env = context.config.env
    if env.python == AUTO and env.env_type not in installable():
        yield Finding(
            "env.python",
            f"there is no environment of its own for {env.env_type} that `embodrl env install` could make",
            "set env.python=null, or give the path of an interpreter with the simulator installed",
            "the path of an interpreter, or null",
            others=("env.env_type",),
        )


@note("env")
def env_keys_without_effect(context: Context) -> Iterator[Finding]:
    """Common settings that this environment does not read."""
    spec = context.simulator
    if spec is None:
        return
    common = ("include_images", "reward_mode", "success_bonus", "render_detail")
    keys = [name for name in common if name not in spec.reads]
    # an environment may record itself, at a size of its own
    keys += [] if "video" in spec.reads else [f"video.{part}" for part in ("height", "width", "fps")]
    keys += [] if spec.camera_poses else [f"cameras.0.{part}" for part in ("fov_rad", "eye", "target")]
    for key in keys:
        if context.by_user(f"env.{key}"):
            part = key.partition(".")[0]
            own = part in READABLE and spec.name not in ENVS.builtin
            hint = f"leave it out, or register '{spec.name}' with '{part}' in reads=(...)" if own else "leave it out"
            yield Finding(f"env.{key}", f"has no effect: {spec.name} does not read it", hint)


@rule("env.env_type", "env.state", "env.include_state")
def full_state_is_offered(context: Context) -> Iterator[Finding]:
    """The full state is observed, and the simulator provides it."""
    env = context.config.env
    spec = context.simulator
    if env.state != "full" or spec is None:
        return
    if "state" not in spec.reads:
        able = ", ".join(other.name for other in ENVS.all() if "state" in other.reads)
        message = f"{spec.name} provides no more state than the robot's sensors; {able} do"
        yield Finding("env.state", message, "set it to proprio", "proprio", others=("env.env_type",))
    elif not env.include_state:
        message = "is full, but env.include_state is false, so no state is observed"
        yield Finding("env.state", message, "set env.include_state=true", "proprio", others=("env.include_state",))


@rule("env.include_images", "model")
def pictures_are_drawn_for_those_who_look(context: Context) -> Iterator[Finding]:
    """A policy that reads images gets rendered ones."""
    family = context.family
    reads = family is None or family.uses_images
    if isinstance(reads, str):
        reads = value_of(context.config, reads)
    if reads and not context.config.env.include_images:
        message = f"{context.config.model.model_type} reads images, but they would be black"
        yield Finding("env.include_images", message, "set it to true", "true", others=("model.model_type",))
