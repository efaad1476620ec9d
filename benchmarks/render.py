"""Camera pictures on this machine: stock ManiSkill against embodrl's scenes, in one process, block by block in turns.

Both sides draw PushCube-v1 with one camera on the same Vulkan device. "Stock" is ``gymnasium.make`` as ManiSkill has
it: its meshes, its ground, its controller, an observation at every step. The one thing added is the adapter that lets
it take a Vulkan device by PCI address, since ray tracing is off in this process, without which ManiSkill 3.0.1 finds
no renderer on a CPU by itself. Measured are

* the loop: a control step with its reward, then a picture (stock: ``env.step``);
* the picture alone, after the robot has been moved.

Beside the time on the clock stands the processor time, which a busy machine disturbs less; the headline ratios are the
smaller ones of the two.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hardware import describe_hardware
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from embodrl.storage.json_file import write_json_result

TASK = "PushCube-v1"
SIZES = (64, 224)
NUM_BLOCKS = 5
FRAMES = {64: 30, 224: 15}
"""Frames a block."""
WARM_UP = 5
MAX_ACTION = 0.3


class Stock:
    """ManiSkill as it comes, with a camera of a given size."""

    def __init__(self, size: int, device: str) -> None:
        import gymnasium
        import mani_skill.envs  # noqa: F401  registers the tasks

        self.env: Any = gymnasium.make(
            TASK,
            num_envs=1,
            obs_mode="rgb",
            control_mode="pd_ee_delta_pose",
            reward_mode="normalized_dense",
            sim_backend="physx_cpu",
            render_backend=device,
            sensor_configs={"width": size, "height": size},
        ).unwrapped

    def reset(self, seed: int) -> None:
        """Start an episode."""
        self.env.reset(seed=seed)

    def step_and_render(self, action: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Execute ``action float32[7]``; return the picture ``uint8[H,W,3]``."""
        observation = self.env.step(action[None])[0]
        return self._picture(observation["sensor_data"])

    def step(self, action: NDArray[np.float32]) -> None:
        """Execute ``action float32[7]`` without a picture."""
        self.env._step_action(action[None])

    def render(self) -> NDArray[np.uint8]:
        """Return the picture ``uint8[H,W,3]``."""
        return self._picture(self.env._get_obs_sensor_data())

    @staticmethod
    def _picture(sensor_data: dict[str, Any]) -> NDArray[np.uint8]:
        picture: NDArray[np.uint8] = sensor_data["base_camera"]["rgb"][0].numpy()
        return picture

    def close(self) -> None:
        """Free the scene."""
        self.env.close()


class Ours:
    """A scene of embodrl, with a camera of a given size."""

    def __init__(self, size: int, device: str) -> None:
        from embodrl.envs.maniskill.sim import ManiSkillSim
        from embodrl.envs.stepping import CameraSettings

        self.sim = ManiSkillSim(
            TASK,
            1,
            cameras={
                "base_camera": CameraSettings(
                    name="base_camera", height=size, width=size, fov_rad=None, eye=None, target=None
                )
            },
            sim_backend="physx_cpu",
            render_backend="cpu" if device.startswith("pci") else "gpu",
            render_detail="auto",
            mesh_decimation=None,
            human_size=(128, 128),
        )

    def reset(self, seed: int) -> None:
        """Start an episode."""
        self.sim.reset(np.array([seed]), np.zeros(1, np.int64))

    def step_and_render(self, action: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Execute ``action float32[7]``; return the picture ``uint8[H,W,3]``."""
        self.step(action)
        return self.render()

    def step(self, action: NDArray[np.float32]) -> None:
        """Execute ``action float32[7]`` with its reward, without a picture."""
        from embodrl.envs.maniskill.sim import evaluate

        self.sim.advance(action[None])
        evaluate([self.sim], action[None])

    def render(self) -> NDArray[np.uint8]:
        """Return the picture ``uint8[H,W,3]``."""
        return self.sim.images()[0, 0]

    def close(self) -> None:
        """Free the scene."""
        self.sim.close()


Side = Stock | Ours


def _block(side: Side, mode: str, actions: NDArray[np.float32]) -> list[tuple[float, float]]:
    """Return milliseconds of each frame: by the clock and of the processor."""
    times: list[tuple[float, float]] = []
    for action in actions:
        work: Callable[[], NDArray[np.uint8]]
        if mode == "render":
            side.step(action)
            work = side.render
        else:
            work = lambda action=action: side.step_and_render(action)  # noqa: E731
        start = time.perf_counter_ns()
        start_cpu = time.process_time_ns()
        work()
        times.append(((time.perf_counter_ns() - start) / 1e6, (time.process_time_ns() - start_cpu) / 1e6))
    return times


def _measure(size: int, device: str) -> dict[str, Any]:
    """Return the figures of one picture size: both modes, both sides, their ratios, and how far the pictures differ."""
    sides: dict[str, Side] = {"stock": Stock(size, device), "embodrl": Ours(size, device)}
    rng = np.random.default_rng(0)
    times: dict[str, dict[str, list[tuple[float, float]]]] = {
        mode: {name: [] for name in sides} for mode in ("loop", "render")
    }
    pictures = {}
    for name, side in sides.items():
        side.reset(1)
        pictures[name] = side.render().astype(np.float64)
        _block(side, "loop", np.zeros((WARM_UP, 7), np.float32))
    for block in range(NUM_BLOCKS):
        actions = rng.uniform(-MAX_ACTION, MAX_ACTION, (FRAMES[size], 7)).astype(np.float32)
        for mode, by_side in times.items():
            for name, side in sides.items():
                side.reset(block)
                by_side[name] += _block(side, mode, actions)
    for side in sides.values():
        side.close()
    result: dict[str, Any] = {
        "mean_difference_of_255": round(float(np.abs(pictures["stock"] - pictures["embodrl"]).mean()), 2)
    }
    for mode, by_side in times.items():
        figures = {name: _summary(samples) for name, samples in by_side.items()}
        ratio, cpu_ratio = (figures["stock"][key] / figures["embodrl"][key] for key in ("median_ms", "median_cpu_ms"))
        result[mode] = {**figures, "ratio": round(ratio, 2), "cpu_ratio": round(cpu_ratio, 2)}
    return result


def _summary(times: list[tuple[float, float]]) -> dict[str, float]:
    times_ms, cpu_ms = np.array(times).T
    median_ms = float(np.median(times_ms))
    return {
        "frames_s": round(1000 / median_ms, 1),
        "median_ms": round(median_ms, 3),
        "p95_ms": round(float(np.percentile(times_ms, 95)), 3),
        "median_cpu_ms": round(float(np.median(cpu_ms)), 3),
        "samples": len(times_ms),
    }


def run() -> dict[str, Any]:
    """Measure and return the figures; everything on one core, as in a simulator process."""
    # Read when SAPIEN is loaded.
    os.environ.update(LP_NUM_THREADS="1", SAPIEN_DISABLE_RAY_TRACING="1")
    import torch
    from mani_skill.utils.logging_utils import logger

    from embodrl.envs.maniskill.rendering import accept_pci_devices, render_device_name

    logger.setLevel("ERROR")
    accept_pci_devices()
    torch.set_num_threads(1)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        device = render_device_name("auto")
        sizes = {str(size): _measure(size, device) for size in SIZES}
    finally:
        os.sched_setaffinity(0, cores)
    return {
        "ratio": min(sizes["64"]["loop"]["ratio"], sizes["64"]["loop"]["cpu_ratio"]),
        "ratio_224": min(sizes["224"]["loop"]["ratio"], sizes["224"]["loop"]["cpu_ratio"]),
        "task": TASK,
        "render_device": device,
        "sizes": sizes,
        "hardware": describe_hardware(),
    }


def main(json_path: Path | None = None) -> int:
    """Measure, print a table, write the figures to ``json_path``; return 0."""
    result = run()
    hardware = result["hardware"]
    title = f"{TASK} on one core of {hardware['cpu']}, Vulkan device {result['render_device']}"
    table = Table(
        "picture", "measured", "stock frames/s", "embodrl frames/s", "ratio", "of processor time", title=title
    )
    labels = {"loop": "step, reward, picture", "render": "picture only"}
    for size, figures in result["sizes"].items():
        for mode, label in labels.items():
            sides = figures[mode]
            rates = (f"{sides[name]['frames_s']:.0f}" for name in ("stock", "embodrl"))
            table.add_row(f"{size}x{size}", label, *rates, f"{sides['ratio']:.1f}", f"{sides['cpu_ratio']:.1f}")
    console = Console()
    console.print(table)
    if json_path is not None:
        write_json_result(json_path, result)
    return 0
