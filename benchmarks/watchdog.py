"""What watching simulators costs: ``python benchmarks/watchdog.py [FILE.json] [ENV ...]``; toy without a name.

Rounds take turns within one run: as shipped (deadlines, the process watched for its death, results checked for numbers
that are not finite), and with all of that taken out. The processor time is that of the driver, where the watchdog runs.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from embodrl.bench.hardware import describe_hardware
from embodrl.config import load_config
from embodrl.envs.channel import Channel
from embodrl.envs.pool import EnvPool
from embodrl.metrics.json_file import write_json_file
from embodrl.workers.env import make_pool

NUM_ENVS, NUM_PROCESSES, ROUNDS, ROUND_S = 8, 2, 11, 1.0


class Unwatched(Channel):
    """Waits for an answer, for ever."""

    def _wait(self, poller: Any, deadline: float | None) -> None:
        poller.poll()


def play(pool: EnvPool, actions: np.ndarray) -> tuple[float, float]:
    """Return chunks a second of wall time, and milliseconds of the driver's processor time a chunk."""
    count, wall, cpu = 0, time.perf_counter(), time.thread_time()
    while time.perf_counter() - wall < ROUND_S:
        pool.step(actions)
        count += 1
    return count / (time.perf_counter() - wall), 1000 * (time.thread_time() - cpu) / count


def measure(env: str) -> dict[str, Any]:
    """Return medians over the rounds of an environment."""
    settings = [f"env={env}", "model.warm_start=null", f"env.num_processes={NUM_PROCESSES}"]
    settings += [f"env.{split}.total_num_envs={NUM_ENVS}" for split in ("train", "eval")]
    config = load_config([*settings, "actor.global_batch_size=8", "actor.micro_batch_size=8"]).config
    rounds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with make_pool(config, NUM_ENVS) as pool:
        rows = np.arange(NUM_ENVS)
        pool.reset(rows, (rows % len(pool.spec.tasks)).astype(np.int32))
        actions = np.zeros((NUM_ENVS, config.model.num_action_chunks, pool.spec.action_dim), np.float32)
        channels = [manager._running().channel for manager in pool.managers]
        quarantine = pool._quarantine
        play(pool, actions)
        for _ in range(ROUNDS):
            for watched in (True, False):
                for channel in channels:
                    channel.__class__ = Channel if watched else Unwatched
                pool._quarantine = quarantine if watched else lambda rank, step: step
                rounds[watched].append(play(pool, actions))
    rates = {watched: statistics.median(rate for rate, _ in rounds[watched]) for watched in rounds}
    cpu = {watched: statistics.median(ms for _, ms in rounds[watched]) for watched in rounds}
    ratios = [on[0] / off[0] for on, off in zip(rounds[True], rounds[False], strict=True)]
    return {
        "chunks_per_s": {"watched": rates[True], "unwatched": rates[False]},
        "driver_ms_per_chunk": {"watched": cpu[True], "unwatched": cpu[False]},
        "median_ratio": statistics.median(ratios),
    }


def main() -> int:
    """Measure, print and write."""
    names = sys.argv[2:] or ["toy"]
    result = {name: measure(name) for name in names}
    for name, row in result.items():
        rates, cpu = row["chunks_per_s"], row["driver_ms_per_chunk"]
        print(
            f"{name:<12} watched {rates['watched']:8.1f} chunks/s   unwatched {rates['unwatched']:8.1f}"
            f"   ratio {row['median_ratio']:.3f}   driver {cpu['watched']:.3f} / {cpu['unwatched']:.3f} ms a chunk"
        )
    if len(sys.argv) > 1:
        write_json_file(Path(sys.argv[1]), {"hardware": describe_hardware(), "environments": result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
