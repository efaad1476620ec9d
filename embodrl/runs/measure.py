"""Find the fastest number of simulator processes on this machine by short measurements."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from embodrl.config.processes import ProcessChoice
from embodrl.config.schema import Config
from embodrl.storage.json_file import write_json_file
from embodrl.workers.env import check_simulator, make_pool

PROBE_S = 2.0
# Rates within this factor of the fastest count as equal, so that fewer processes and less memory win.
TOLERANCE = 0.03


def measure_processes(config: Config, choice: ProcessChoice, tell: Callable[[str], None]) -> int:
    """Measure the candidates, store the result, and return the fastest number, preferring fewer processes on ties.

    Raises:
        EmbodrlError: the simulator can't run.
        OutputError: the result can't be stored.
    """
    check_simulator(config)
    tell(f"measuring env.num_processes: {', '.join(map(str, choice.candidates))}")
    rates: dict[int, float] = {}
    for number in choice.candidates:
        rates[number] = steps_per_second(config, number)
        tell(f"  {number} processes: {rates[number]:.0f} environment steps/s")
    best = fastest(rates)
    content = {"num_processes": best, "environment_steps_per_s": {str(n): rate for n, rate in rates.items()}}
    write_json_file(choice.path, content)
    tell(f"env.num_processes = {best}, kept in {choice.path}")
    return best


def fastest(rates: dict[int, float]) -> int:
    """Return the smallest number of processes whose rate is within ``TOLERANCE`` of the best."""
    best = max(rates.values())
    return min(number for number, rate in rates.items() if rate >= (1 - TOLERANCE) * best)


def steps_per_second(config: Config, num_processes: int) -> float:
    """Return the total rate of all training environments in steps/s, with zero actions, after one warm-up chunk.

    Always with auto-reset: without it most chunks would belong to episodes that ended long ago.
    """
    env = config.env.model_copy(update={"num_processes": num_processes})
    total = env.train.total_num_envs
    chunk = config.model.num_action_chunks
    with make_pool(config.model_copy(update={"env": env}), total, auto_reset=True) as pool:
        rows = np.arange(total)
        pool.reset(rows.astype(np.int64), (rows % len(pool.spec.tasks)).astype(np.int32))
        actions = np.zeros((total, chunk, pool.spec.action_dim), np.float32)
        pool.step(actions)
        steps = 0
        start = time.perf_counter()
        while True:
            steps += int(pool.step(actions).valid.sum())
            elapsed = time.perf_counter() - start
            if elapsed >= PROBE_S:
                return steps / elapsed
