"""Environment steps a second of LIBERO on one core: an EnvManager against LIBERO's own SubprocVectorEnv, in one run.

Both sides play random actions in the same task with the same two cameras, bound to the same core, one after the other.
LIBERO draws both cameras at every step. We are measured drawing at every step too, and as training does it: once a
chunk of five actions. Steps of processor time are what a core gives when nothing else runs on it.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from embodrl.bench.hardware import describe_hardware
from embodrl.config.isolated import installed_python
from embodrl.envs.manager import EnvManager, EnvTimeouts
from embodrl.metrics.json_file import write_json_file
from embodrl.registry import ENVS
from embodrl.scheduler.libero import preflight_libero

SUITE = "libero_spatial"
NUM_ENVS = 2
SIZES = (64, 128, 224)
STEPS = 20
CHUNK = 5
TIMEOUTS = EnvTimeouts(600, 600, 600)


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and what it started."""
    parent = psutil.Process(pid)
    return sum(sum(p.cpu_times()[:2]) for p in [parent, *parent.children(recursive=True)])


def timed(pid: int, work: Callable[[], object], steps: int) -> dict[str, float]:
    """Return environment steps a second, of the clock and of processor time."""
    cpu, wall = cpu_seconds(pid), time.perf_counter()
    work()
    wall, cpu = time.perf_counter() - wall, cpu_seconds(pid) - cpu
    return {"steps_per_s": round(steps / wall, 1), "steps_per_cpu_s": round(steps / cpu, 1)}


def measure_stock(python: str, assets: str, task: str, size: int, cpu: int) -> dict[str, float]:
    """Measure LIBERO's own vector environment; its pictures are drawn at every step."""
    script = Path(__file__).resolve().parents[1] / "envs" / "libero" / "stock.py"
    arguments = [assets, SUITE, task, str(NUM_ENVS), str(size), str(STEPS)]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "1"}
    with subprocess.Popen(
        ["taskset", "-c", str(cpu), python, str(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ,
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def until(word: str) -> None:
            assert process.stdout is not None
            if process.stdout.readline().strip() != word:
                raise RuntimeError(f"LIBERO's vector environment ended before '{word}'")

        def go_on() -> None:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

        def work() -> None:
            go_on()
            until("end")

        until("begin")
        result = timed(process.pid, work, NUM_ENVS * STEPS)
        go_on()
    return result


def measure_ours(python: str, assets: str, task: str, size: int, cpu: int, detail: str) -> dict[str, dict[str, float]]:
    """Measure an EnvManager, drawing at every step and once a chunk."""
    kwargs: dict[str, Any] = {
        "num_envs": NUM_ENVS,
        "suite": SUITE,
        "tasks": [task],
        "cameras": [{"name": name, "height": size, "width": size} for name in ("agentview", "wrist")],
        "max_episode_steps": 10_000,
        "libero_assets": assets,
        "render_detail": detail,
    }
    rng = np.random.default_rng(0)
    with EnvManager("libero", kwargs, name="bench", python=python, cpu=cpu, timeouts=TIMEOUTS) as manager:
        manager.reset(np.zeros(NUM_ENVS, np.int64), np.zeros(NUM_ENVS, np.int32))
        pid = manager.pid
        assert pid is not None
        results: dict[str, dict[str, float]] = {}
        for name, chunk in (("every step", 1), ("once a chunk", CHUNK)):
            moves = rng.uniform(-1, 1, (STEPS // chunk, NUM_ENVS, chunk, 7)).astype(np.float32)
            results[name] = timed(pid, lambda moves=moves: [manager.step(move) for move in moves], NUM_ENVS * STEPS)
    return results


def run() -> dict[str, Any]:
    """Measure and return the figures.

    Raises:
        MissingDependencyError: LIBERO or its assets are not there.
    """
    found = installed_python("libero")
    python = None if found is None else str(found)
    preflight_libero(python, None)
    assert python is not None
    assets = os.environ.get("EMBODRL_LIBERO_ASSETS", "")
    task = next(iter(ENVS.entry("libero").facts["suites"][SUITE]["tasks"]))
    cpu = max(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    for size in SIZES:
        stock = measure_stock(python, assets, task, size, cpu)
        rows.append({"size": size, "what": "LIBERO's SubprocVectorEnv", **stock, "ratio": 1.0})
        for detail in ("full", "fast"):
            for name, figures in measure_ours(python, assets, task, size, cpu, detail).items():
                ratio = round(figures["steps_per_cpu_s"] / stock["steps_per_cpu_s"], 1)
                rows.append({"size": size, "what": f"embodrl, {detail}, drawn {name}", **figures, "ratio": ratio})
    return {"hardware": describe_hardware(), "num_envs": NUM_ENVS, "steps": STEPS, "task": task, "rows": rows}


def main(json_path: Path | None = None) -> int:
    """Measure, show a table, and write JSON if asked."""
    result = run()
    table = Table(title=f"LIBERO on one core, {NUM_ENVS} environments, two cameras")
    for column in ("pixels", "what", "steps/s", "steps/s of processor time", "ratio"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in result["rows"]:
        table.add_row(*(str(row[name]) for name in ("size", "what", "steps_per_s", "steps_per_cpu_s", "ratio")))
    Console().print(table)
    if json_path is not None:
        write_json_file(json_path, result)
    return 0
