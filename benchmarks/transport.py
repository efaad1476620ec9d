"""Round trip of an action to a simulator process and of its observation back: EnvManager against a pickling queue.

Both sides run in one process pair layout (parent and one child, bound to a core each where there are two), take
turns block by block within the same run, and move the same arrays: 16 environments, one 224x224 camera.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.multiprocessing as torch_mp
from hardware import describe_hardware
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from embodrl.envs.pool.manager import EnvManager
from embodrl.storage.json_file import write_json_result

NUM_ENVS = 16
IMAGE_SIZE = 224
ACTION_DIM = 7
NUM_BLOCKS = 8
BLOCK = {"memcpy": 100, "queue": 40, "env_manager": 250, "env_manager_copy": 100}
WARM_UP = 20


def _queue_child(requests: Any, results: Any, cpu: int | None) -> None:
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    images = np.random.default_rng(0).integers(0, 256, (NUM_ENVS, 1, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    while True:
        actions = requests.get()
        if actions is None:
            return
        images[:, 0, 0, 0, 0] = actions[:, 0, 0].astype(np.uint8)
        results.put(images)


def _measure(trip: Callable[[NDArray[np.float32]], NDArray[np.uint8]], count: int, first: int) -> list[float]:
    """Return microseconds of each round trip; every observation must repeat its action."""
    times: list[float] = []
    actions = np.zeros((NUM_ENVS, 1, ACTION_DIM), np.float32)
    for number in range(first, first + count):
        actions[:, 0, 0] = number % 251
        start = time.perf_counter_ns()
        images = trip(actions)
        times.append((time.perf_counter_ns() - start) / 1000)
        if not (images[:, 0, 0, 0, 0] == number % 251).all():
            raise RuntimeError("a stale observation came back")
    return times


def _summary(times: list[float]) -> dict[str, float]:
    return {
        "median_us": round(float(np.median(times)), 1),
        "p95_us": round(float(np.percentile(times, 95)), 1),
        "samples": len(times),
    }


def run() -> dict[str, Any]:
    """Measure and return the figures."""
    cores = sorted(os.sched_getaffinity(0))
    child_cpu = cores[-1] if len(cores) > 1 else None
    source = np.random.default_rng(1).integers(0, 256, (NUM_ENVS, 1, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    target = np.empty_like(source)

    def memcpy(actions: NDArray[np.float32]) -> NDArray[np.uint8]:
        source[:, 0, 0, 0, 0] = actions[:, 0, 0].astype(np.uint8)
        np.copyto(target, source)
        return target

    context = torch_mp.get_context("spawn")
    requests = context.Queue()
    results = context.Queue()
    child = context.Process(target=_queue_child, args=(requests, results, child_cpu), daemon=True)
    child.start()

    def queue(actions: NDArray[np.float32]) -> NDArray[np.uint8]:
        requests.put(actions)
        images: NDArray[np.uint8] = results.get()
        return images

    manager = EnvManager(
        "bench_echo",
        {"num_envs": NUM_ENVS, "image_size": IMAGE_SIZE, "action_dim": ACTION_DIM},
        name="bench",
        cpu=child_cpu,
        extensions=["echo_env"],
    )
    times: dict[str, list[float]] = {name: [] for name in BLOCK}
    try:
        with manager:
            manager.reset(np.zeros(NUM_ENVS, np.int64), np.zeros(NUM_ENVS, np.int32))
            trips: dict[str, Callable[[NDArray[np.float32]], NDArray[np.uint8]]] = {
                "memcpy": memcpy,
                "queue": queue,
                "env_manager": lambda actions: manager.step(actions).observation.images,
                "env_manager_copy": lambda actions: manager.step(actions, copy=True).observation.images,
            }
            for trip in trips.values():
                _measure(trip, WARM_UP, 0)
            for _ in range(NUM_BLOCKS):
                for name, trip in trips.items():
                    times[name] += _measure(trip, BLOCK[name], len(times[name]))
    finally:
        requests.put(None)
        child.join(10)
    figures = {name: _summary(samples) for name, samples in times.items()}
    return {
        "ratio": round(figures["queue"]["median_us"] / figures["env_manager"]["median_us"], 1),
        "observation_mb": round(source.nbytes / 1e6, 2),
        "memcpy": figures["memcpy"],
        "baseline": figures["queue"],
        "embodrl": figures["env_manager"],
        "embodrl_copy": figures["env_manager_copy"],
        "hardware": describe_hardware(),
    }


def main(json_path: Path | None = None) -> int:
    """Measure, print a table, write the figures to ``json_path``; return 0."""
    result = run()
    hardware = result["hardware"]
    title = f"{result['observation_mb']} MB round trip, {hardware['cores']} cores of {hardware['cpu']}"
    table = Table("transport", "median us", "p95 us", "samples", "queue / this", title=title)
    rows = {
        "memcpy alone": "memcpy",
        "torch.multiprocessing.Queue, pickled array": "baseline",
        "EnvManager, view": "embodrl",
        "EnvManager, private copy": "embodrl_copy",
    }
    for label, key in rows.items():
        figures = result[key]
        ratio = result["baseline"]["median_us"] / figures["median_us"]
        table.add_row(
            label, f"{figures['median_us']:.0f}", f"{figures['p95_us']:.0f}", str(figures["samples"]), f"{ratio:.1f}"
        )
    console = Console()
    console.print(table)
    console.print(f"ratio of the medians, queue / EnvManager: {result['ratio']}")
    if json_path is not None:
        write_json_result(json_path, result)
    return 0
