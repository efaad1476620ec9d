"""What offload frees of simulator processes, and how long it takes, of every simulator here.

``python benchmarks/env_offload.py [FILE.json [NAME|SETTING ...]]``; all of ENVIRONMENTS without names. Settings go to
all that are measured, ``env.python=...`` say.
Each environment plays a rollout in two processes, leaves and comes back, with its process and without. The next picture
after it is compared with that of a twin that stayed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from hardware import describe_hardware

from embodrl.config import load_config
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EmbodrlError
from embodrl.workers.env import make_pool

ENVIRONMENTS = {
    "toy": ["env=toy"],
    "maniskill": ["env=maniskill"],
    "Reacher-v5": ["env=gymnasium_reacher"],
    "metaworld": ["env=metaworld_mt1"],
    "libero": ["env=libero_goal", "env.tasks=[turn_on_the_stove]", "env.eval.num_episodes=1"],
}
NUM_ENVS, NUM_CHUNKS = 16, 10
MIB = 2**20


def play(pool: EnvPool, number: int, chunk: int) -> np.ndarray:
    """Play a chunk of random actions; return the pictures."""
    actions = np.random.default_rng(number).uniform(-1.0, 1.0, (NUM_ENVS, chunk, pool.spec.action_dim))
    return pool.step(actions.astype(np.float32), copy=True).observation.images


def timed(call: Any) -> float:
    """Return seconds."""
    start = time.perf_counter()
    call()
    return round(time.perf_counter() - start, 3)


def measure(settings: list[str], extra: list[str]) -> dict[str, Any]:
    """Return MiB and seconds per process."""
    counts = [f"env.train.total_num_envs={NUM_ENVS}", f"env.eval.total_num_envs={NUM_ENVS}", "env.num_processes=2"]
    slow = ["env.start_timeout_s=3000", "env.reset_timeout_s=3000", "env.step_timeout_s=3000"]
    config = load_config([*settings, *counts, *slow, *extra]).config
    chunk = config.model.num_action_chunks
    found: dict[str, Any] = {"environments": NUM_ENVS, "processes": 2}
    with make_pool(config, NUM_ENVS) as pool, make_pool(config, NUM_ENVS) as twin:
        for each in (pool, twin):
            each.reset(np.arange(NUM_ENVS), np.zeros(NUM_ENVS, np.int32))
            for number in range(NUM_CHUNKS):
                play(each, number, chunk)
        for level, ends in (("simulator", False), ("process", True)):
            memory: list[Any] = []
            gone = timed(lambda ends=ends, memory=memory: memory.append(pool.offload(ends)))
            back = timed(pool.onload)
            found[level] = {
                "before_mib": round(memory[0].before / MIB / 2),
                "after_mib": round(memory[0].after / MIB / 2),
                "offload_s": gone,
                "onload_s": back,
            }
            assert np.array_equal(play(pool, 99, chunk), play(twin, 99, chunk)), "it did not come back bit-exact"
    return found


def main() -> None:
    """Measure and write."""
    path, given = Path(sys.argv[1]) if len(sys.argv) > 1 else None, sys.argv[2:]
    names, extra = [word for word in given if "=" not in word], [word for word in given if "=" in word]
    results: dict[str, Any] = {}
    for name in names or ENVIRONMENTS:
        try:
            results[name] = measure(ENVIRONMENTS[name], extra)
        except EmbodrlError as error:
            results[name] = {"skipped": error.message.splitlines()[0]}
        print(name, json.dumps(results[name]), flush=True)
    if path is not None:
        path.write_text(json.dumps({"hardware": describe_hardware(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
