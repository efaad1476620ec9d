"""A simulator's own vectorisation with random actions, for ``bench.py envs``; runs in its interpreter.

Usage: stock_envs.py '{"env": NAME, "num_envs": B, "size": PIXELS, ...}'. Prints "ready" once all is warm; then runs as
many steps of the whole batch as each line on standard input says, and answers "done".
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Step = Callable[[NDArray[np.float32]], object]
WARM_UP = 3


def maniskill_env(task: str, size: int, device: str, max_episode_steps: int) -> object:
    """Return an environment as ManiSkill's CPU wrapper has it, on a Vulkan device that is named by its PCI address."""
    import gymnasium
    import torch
    from mani_skill.utils.logging_utils import logger
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    from embodrl.envs.maniskill.rendering import accept_pci_devices

    logger.setLevel("ERROR")
    torch.set_num_threads(1)
    accept_pci_devices()
    env = gymnasium.make(
        task,
        num_envs=1,
        obs_mode="rgb",
        control_mode="pd_ee_delta_pose",
        reward_mode="normalized_dense",
        sim_backend="physx_cpu",
        render_backend=device,
        sensor_configs={"width": size, "height": size},
        max_episode_steps=max_episode_steps,
    )
    return CPUGymWrapper(env, ignore_terminations=True)


def metaworld_env(task: str, size: int, camera: str) -> object:
    """Return an environment of Meta-World's MT1 that observes pictures."""
    gymnasium = importlib.import_module("gymnasium")
    importlib.import_module("metaworld")
    env = gymnasium.make(
        "Meta-World/MT1",
        env_name=task,
        render_mode="rgb_array",
        camera_name=camera,
        width=size,
        height=size,
        disable_env_checker=True,
    )
    return gymnasium.wrappers.AddRenderObservation(env, render_only=True)


def gymnasium_env(env_id: str, size: int, max_episode_steps: int) -> object:
    """Return an environment of Gymnasium on MuJoCo that observes pictures."""
    gymnasium = importlib.import_module("gymnasium")
    env = gymnasium.make(env_id, render_mode="rgb_array", width=size, height=size, max_episode_steps=max_episode_steps)
    return gymnasium.wrappers.AddRenderObservation(env, render_only=True)


def asynchronous(make: Callable[[], object], num_envs: int, preload: list[str]) -> tuple[Step, int]:
    """Return what steps an AsyncVectorEnv with shared memory, and the action dimensions A.

    Its processes come from a fork server, as an OpenGL or Vulkan driver does not survive a fork.
    """
    import multiprocessing

    gymnasium = importlib.import_module("gymnasium")
    multiprocessing.set_forkserver_preload(preload)
    envs = gymnasium.vector.AsyncVectorEnv([make] * num_envs, shared_memory=True, context="forkserver")
    envs.reset(seed=0)
    return envs.step, envs.single_action_space.shape[0]


def libero(options: dict[str, Any]) -> tuple[Step, int]:
    """Return what steps LIBERO's SubprocVectorEnv, and A."""
    from embodrl.envs.libero.sim import import_libero

    package = import_libero(options["assets"])
    envs_of_libero = importlib.import_module("libero.libero.envs")
    bddl = str(package / "bddl_files" / options["suite"] / f"{options['task']}.bddl")
    size = options["size"]

    def make() -> object:
        return envs_of_libero.OffScreenRenderEnv(
            bddl_file_name=bddl,
            camera_names=["agentview"],
            camera_heights=size,
            camera_widths=size,
            horizon=options["max_episode_steps"],
        )

    envs = envs_of_libero.SubprocVectorEnv([make] * options["num_envs"])
    envs.reset()
    return envs.step, 7


def build(options: dict[str, Any]) -> tuple[Step, int]:
    """Return what steps the batch of environments that ``options`` describe, and A."""
    name = options["env"]
    size = options["size"]
    if name == "libero":
        return libero(options)
    if name == "maniskill":
        given = (options["task"], size, options["device"], options["max_episode_steps"])
        return asynchronous(lambda: maniskill_env(*given), options["num_envs"], ["mani_skill.envs"])
    from embodrl.envs.mujoco_gl import choose_gl

    choose_gl()
    if name == "metaworld":
        camera = options["camera"]
        return asynchronous(lambda: metaworld_env(options["task"], size, camera), options["num_envs"], ["metaworld"])
    limit = options["max_episode_steps"]
    return asynchronous(
        lambda: gymnasium_env(options["id"], size, limit), options["num_envs"], ["gymnasium.envs.mujoco"]
    )


def main(options: dict[str, Any]) -> None:
    """Make the environments, warm them up, and step them on demand."""
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]
    answers = sys.stdout
    sys.stdout = sys.stderr
    step, action_dim = build(options)
    rng = np.random.default_rng(0)

    def advance(steps: int, answer: str) -> None:
        for _ in range(steps):
            step(rng.uniform(-1, 1, (options["num_envs"], action_dim)).astype(np.float32))
        answers.write(answer + "\n")
        answers.flush()

    advance(WARM_UP, "ready")
    for line in sys.stdin:
        advance(int(line), "done")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
