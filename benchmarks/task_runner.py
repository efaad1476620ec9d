"""Tasks a second of AsyncTaskRunner, against a plain asyncio.gather of the same coroutines.

Both sides take turns within one run. The runner does more: its tasks are submitted one by one from another thread,
bounded, and each comes back as a typed result. ``sleep`` starts tasks of ``SLEEP_S`` all at once, so the ideal is
``SLEEP_S``. Memory is the resident one of a process that has imported the training stack, before and after all
rounds, and what Python counts as allocated, which fragmentation of its allocator does not blur.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from hardware import describe_hardware
from rich.console import Console
from rich.table import Table

from embodrl.storage.json_file import write_json_file
from embodrl.workers.workflows.task_runner import AsyncTaskRunner

NUM_TASKS = {"no_op": 50_000, "sleep": 10_000}
MEMORY_TASKS = 10_000  # of each kind, in each round
SLEEP_S = 0.2
NUM_ROUNDS = 5
WARM_UP = 100

Task = Callable[[], Coroutine[Any, Any, None]]


async def no_op() -> None:
    """Do nothing."""


async def sleep() -> None:
    """Wait, as for a simulator."""
    await asyncio.sleep(SLEEP_S)


def by_runner(runner: AsyncTaskRunner, task: Task, count: int) -> float:
    """Return the seconds from the first ``submit`` to the last result."""
    start = time.perf_counter()
    for _ in range(count):
        runner.submit(task)
    results = runner.wait(count)
    seconds = time.perf_counter() - start
    if len(results) != count or any(result.status != "ok" for result in results):
        raise RuntimeError("tasks were lost")
    return seconds


def by_gather(task: Task, count: int) -> float:
    """Return the seconds of one ``asyncio.gather``."""

    async def gather() -> float:
        start = time.perf_counter()
        await asyncio.gather(*(task() for _ in range(count)))
        return time.perf_counter() - start

    return asyncio.run(gather())


def _memory() -> tuple[int, int]:
    """Return resident bytes, and blocks that Python has allocated."""
    gc.collect()
    return psutil.Process().memory_info().rss, sys.getallocatedblocks()


def run() -> dict[str, Any]:
    """Measure and return the figures."""
    import torch  # noqa: F401  (the process of a run has it, and memory is that of such a process)

    kinds: dict[str, Task] = {"no_op": no_op, "sleep": sleep}
    rates: dict[str, dict[str, list[float]]] = {name: {"runner": [], "gather": []} for name in kinds}
    largest = max(NUM_TASKS.values())
    with AsyncTaskRunner(NUM_TASKS["sleep"], largest) as runner:
        by_runner(runner, no_op, WARM_UP)
        resident, blocks = _memory()
        after_rounds: list[float] = []
        for _ in range(NUM_ROUNDS):  # the runner alone: gather would leave its own traces
            for task in kinds.values():
                by_runner(runner, task, MEMORY_TASKS)
            after_rounds.append(_memory()[0] / resident)
        grown = _memory()[1] - blocks
        for _ in range(NUM_ROUNDS):
            for name, task in kinds.items():
                rates[name]["gather"].append(by_gather(task, NUM_TASKS[name]))
                rates[name]["runner"].append(by_runner(runner, task, NUM_TASKS[name]))
    medians = {name: {side: float(np.median(times)) for side, times in sides.items()} for name, sides in rates.items()}
    count = NUM_TASKS["no_op"]
    return {
        "loop": "uvloop" if importlib.util.find_spec("uvloop") else "asyncio",
        "no_op_tasks": count,
        "no_op_per_s": round(count / medians["no_op"]["runner"]),
        "gather_no_op_per_s": round(count / medians["no_op"]["gather"]),
        "ratio_no_op": round(medians["no_op"]["gather"] / medians["no_op"]["runner"], 2),
        "sleep_tasks": NUM_TASKS["sleep"],
        "sleep_ideal_s": SLEEP_S,
        "sleep_s": round(medians["sleep"]["runner"], 3),
        "gather_sleep_s": round(medians["sleep"]["gather"], 3),
        "resident_start_mb": round(resident / 1e6, 1),
        "resident_after_rounds": [round(ratio, 3) for ratio in after_rounds],
        "allocated_blocks_grown": grown,
        "hardware": describe_hardware(),
    }


def main(json_path: Path | None = None) -> int:
    """Measure, print a table, write the figures to ``json_path``; return 0."""
    result = run()
    hardware = result["hardware"]
    title = f"{result['loop']} loop, {hardware['cores']} cores of {hardware['cpu']}"
    table = Table("tasks", "AsyncTaskRunner", "asyncio.gather", title=title)
    table.add_row(
        f"{result['no_op_tasks']} that do nothing, a second",
        str(result["no_op_per_s"]),
        str(result["gather_no_op_per_s"]),
    )
    table.add_row(
        f"{result['sleep_tasks']} of {result['sleep_ideal_s']} s at once, seconds",
        f"{result['sleep_s']:.3f}",
        f"{result['gather_sleep_s']:.3f}",
    )
    console = Console()
    console.print(table)
    console.print(f"ratio of the rates, AsyncTaskRunner / gather: {result['ratio_no_op']}")
    console.print(
        f"resident memory after each round, as a fraction of the {result['resident_start_mb']} MB before: "
        f"{', '.join(map(str, result['resident_after_rounds']))}"
    )
    if json_path is not None:
        write_json_file(json_path, result)
    return 0
