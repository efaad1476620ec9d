"""What watching simulators costs: ``python benchmarks/watchdog.py [FILE.json] [SETTINGS ...]``; env=toy without any.

SETTINGS are those of one environment each, quoted: "env=metaworld env.python=/path/to/python".

Rounds take turns within one run: as shipped (deadlines, the process watched for its death, results checked for numbers
that can't be true), and with all of that taken out: a plain blocking read. The watchdog runs in the driver, so that its
cost is the driver's processor time per chunk with it less that without, as a fraction of the time of a chunk. The
ratio of the rates says the same where nothing else runs; a busy machine disturbs it by more than the watchdog costs.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from hardware import describe_hardware

from embodrl.config import load_config
from embodrl.envs.pool.pool import EnvPool
from embodrl.processes.frames import Connection, Frame
from embodrl.storage.json_file import write_json_file
from embodrl.workers.env import make_pool

NUM_ENVS, NUM_PROCESSES, ROUNDS, ROUND_S = 8, 2, 21, 0.5


class Unwatched(Connection):
    """Reads, however long that takes: the socket blocks, nothing else is looked at."""

    def receive(self, deadline: float | None = None) -> Frame:
        self.sock.recv(1, socket.MSG_PEEK)
        return super().receive(None)


def play(pool: EnvPool, actions: np.ndarray) -> tuple[float, float]:
    """Return chunks per second of wall time, and milliseconds of the driver's processor time per chunk."""
    count, wall, cpu = 0, time.perf_counter(), time.thread_time()
    while time.perf_counter() - wall < ROUND_S:
        pool.step(actions)
        count += 1
    return count / (time.perf_counter() - wall), 1000 * (time.thread_time() - cpu) / count


def measure(environment: list[str]) -> dict[str, Any]:
    """Return medians over the rounds of an environment, named by its settings."""
    settings = [*environment, "model.warm_start=null", f"env.num_processes={NUM_PROCESSES}"]
    settings += [f"env.{split}.total_num_envs={NUM_ENVS}" for split in ("train", "eval")]
    config = load_config([*settings, "actor.global_batch_size=8", "actor.micro_batch_size=8"]).config
    rounds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with make_pool(config, NUM_ENVS) as pool:
        rows = np.arange(NUM_ENVS)
        pool.reset(rows, (rows % len(pool.spec.tasks)).astype(np.int32))
        actions = np.zeros((NUM_ENVS, config.model.num_action_chunks, pool.spec.action_dim), np.float32)
        channels = [manager._running().connection for manager in pool.managers]
        quarantine = pool._quarantine
        play(pool, actions)
        for _ in range(ROUNDS):
            for watched in (True, False):
                for channel in channels:
                    channel.__class__ = Connection if watched else Unwatched
                pool._quarantine = quarantine if watched else lambda rank, step: step
                rounds[watched].append(play(pool, actions))
    rates = {watched: statistics.median(rate for rate, _ in rounds[watched]) for watched in rounds}
    cpu = {watched: statistics.median(ms for _, ms in rounds[watched]) for watched in rounds}
    ratios = [on[0] / off[0] for on, off in zip(rounds[True], rounds[False], strict=True)]
    return {
        "cost": (cpu[True] - cpu[False]) * rates[True] / 1000,
        "chunks_per_s": {"watched": rates[True], "unwatched": rates[False]},
        "driver_ms_per_chunk": {"watched": cpu[True], "unwatched": cpu[False]},
        "median_ratio": statistics.median(ratios),
    }


def main() -> int:
    """Measure, print and write."""
    asked = [text.split() for text in sys.argv[2:]] or [["env=toy"]]
    result: dict[str, Any] = {}
    for settings in asked:
        name = settings[0].removeprefix("env=")
        row = result[name] = measure(settings)
        rates, cpu = row["chunks_per_s"], row["driver_ms_per_chunk"]
        driver = f"driver {cpu['watched']:.3f} / {cpu['unwatched']:.3f} ms per chunk"
        print(
            f"{name:<12} cost {row['cost']:.2%}   {driver}   watched {rates['watched']:.1f} chunks/s"
            f"   unwatched {rates['unwatched']:.1f}   ratio {row['median_ratio']:.3f}",
            flush=True,
        )
        if len(sys.argv) > 1:
            write_json_file(Path(sys.argv[1]), {"hardware": describe_hardware(), "environments": result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
