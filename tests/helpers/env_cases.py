"""The environments that are held to the same, and where their packages are.

Simulators that this interpreter lacks are skipped, unless EMBODRL_SIMULATORS_PYTHON names an interpreter that has them.
LIBERO needs `embodrl env install libero`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from embodrl.config.isolated import installed_python
from embodrl.envs.pool.manager import EnvManager
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EmbodrlError

ELSEWHERE = os.environ.get("EMBODRL_SIMULATORS_PYTHON")
sys.path.append(str(Path(__file__).parents[2] / "examples" / "new_env"))  # processes inherit it
LIMIT, CHUNK = 10, 4
CAMERA = {"name": "base_camera", "height": 24, "width": 32, "fov_rad": None, "eye": None, "target": None}


@dataclass(frozen=True)
class Case:
    """An environment with small pictures and episodes of 10 steps, which random actions do not end sooner.

    Attributes:
        env_type: as registered.
        kwargs: beside those of all.
        ending: kwargs with which an episode that is not over is terminated early by random actions, or by the expert.
        expert: it is the expert that succeeds, within so many steps; 0 for random actions.
        modules: that must be importable.
        extensions: modules that register it.
        isolated: it has an interpreter of its own.
        control_hz: actions per second.
        ends_early: random actions or the expert can end an episode.
    """

    env_type: str
    kwargs: dict[str, Any]
    ending: dict[str, Any] = field(default_factory=dict)
    expert: int = 0
    modules: tuple[str, ...] = ()
    extensions: tuple[str, ...] = ()
    isolated: bool = False
    ends_early: bool = True
    control_hz: float = 20.0


def gym(env_id: str, ending: dict[str, Any], control_hz: float, *modules: str) -> Case:
    camera = CAMERA | {"height": 48, "width": 64}  # fast pictures miss what is smaller than a pixel
    kwargs = {"tasks": ["task"], "cameras": [camera], "id": env_id, "instruction": "do it"}
    return Case("gymnasium", kwargs, ending, 0, ("gymnasium", "PIL", *modules), control_hz=control_hz)


CASES = {
    "toy": Case("toy", {"tasks": ["reach-red", "reach-green"], "image_size": 16}, expert=40),
    "line_world": Case(
        "line_world", {"tasks": ["push-right"], "cameras": [CAMERA]}, {"max_episode_steps": 60}, 0, (), ("line_world",)
    ),
    "maniskill": Case(
        "maniskill",
        {"tasks": ["PullCube-v1", "PushCube-v1"], "cameras": [CAMERA], "render_backend": "cpu"},
        expert=40,
        modules=("mani_skill",),
    ),
    "metaworld": Case(
        "metaworld",
        {"tasks": ["push-v3", "drawer-close-v3"], "cameras": [CAMERA | {"name": "corner2"}]},
        expert=90,
        modules=("metaworld", "fast_simplification"),
        control_hz=80.0,
    ),
    "libero": Case(
        "libero",
        {
            "suite": "libero_goal",
            "tasks": ["turn_on_the_stove", "open_the_middle_drawer_of_the_cabinet"],
            "cameras": [CAMERA | {"name": "agentview"}],
            "reward_mode": "sparse",
        },
        isolated=True,
        ends_early=False,
    ),
    "Reacher-v5": gym("Reacher-v5", {"success_key": "reward_dist", "success_threshold": -10.0}, 50.0, "mujoco"),
    "Hopper-v5": gym("Hopper-v5", {"max_episode_steps": 200}, 125.0, "mujoco"),
    "Pendulum-v1": gym("Pendulum-v1", {"success_key": "return", "success_threshold": -1e9}, 30.0, "pygame"),
}
"""``ending`` of line_world pushes to the right by luck, of Hopper-v5 lets it fall."""


@cache
def missing_elsewhere(python: str, modules: tuple[str, ...]) -> bool:
    return (
        subprocess.run([python, "-c", f"import {', '.join(modules)}"], capture_output=True, check=False).returncode != 0
    )


def interpreter(case: Case) -> str | None:
    """Return the interpreter that has the packages; None is this one."""
    if case.isolated:
        python = installed_python(case.env_type)
        if python is None:
            pytest.skip(f"embodrl env install {case.env_type} has not been run")
        return str(python)
    # Without an origin it is no package, but a folder of that name that an earlier version of the tests left behind.
    specs = {name: importlib.util.find_spec(name) for name in case.modules}
    missing = [name for name, spec in specs.items() if spec is None or spec.origin is None]
    if not missing:
        return None
    if ELSEWHERE is None or missing_elsewhere(ELSEWHERE, case.modules):
        pytest.skip(f"not installed: {', '.join(missing)}")
    return ELSEWHERE


@contextmanager
def started(made: EnvManager | EnvPool) -> Iterator[Any]:
    """Start what is given, skip where nothing can be drawn, and close it in the end."""
    with ExitStack() as stack:
        try:
            stack.enter_context(made)
        except EmbodrlError as error:
            if "Vulkan" in str(error) or "can't draw" in str(error):
                pytest.skip(str(error))
            raise
        yield made
