"""Whole training iterations: environment steps per second, and what the cores' time is spent on.

Both sides run the default training loop on the same machine, one after the other. The baseline renders every
environment step with ManiSkill's own meshes, as a loop around ManiSkill's ``step`` does; embodrl renders what the
policy sees, with decimated meshes.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from hardware import describe_hardware
from rich.console import Console
from rich.table import Table

from embodrl.algorithms.advantages import compute_advantages
from embodrl.config import LoadedConfig
from embodrl.config.schema import Config
from embodrl.envs.pool.pool import EnvPool
from embodrl.hybrid_engines.rollout.native import make_rollout_engine
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.learners.on_policy import OnPolicyUpdate
from embodrl.pipelines.load import load_config
from embodrl.storage.json_file import write_json_result
from embodrl.workers.collector import SyncCollector
from embodrl.workers.env import check_simulator, make_pool
from embodrl.workers.policy import build_policy, configure_torch, num_threads

ITERATIONS = 4
BASELINE = {"env_type": "bench_every_step", "extensions": ("every_step_env",)}


@dataclass
class PhaseClock:
    """Wall and CPU seconds of this process and of the simulator processes, since some moment.

    Args:
        pids: of the simulator processes.
    """

    pids: list[int]

    def read(self) -> tuple[float, float, float]:
        """Return wall, own CPU and simulators' CPU seconds."""
        own = psutil.Process().cpu_times()
        simulators = [psutil.Process(pid).cpu_times() for pid in self.pids]
        return time.perf_counter(), own.user + own.system, sum(each.user + each.system for each in simulators)


def measure(
    loaded: LoadedConfig, iterations: int, env_type: str = "", extensions: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Run the warm-up and then ``iterations`` training iterations; return the figures of the latter.

    Args:
        loaded: the run.
        iterations: to measure.
        env_type: replaces that of the configuration.
        extensions: modules that the simulator processes import.
    """
    config = loaded.config
    device = configure_torch(config, loaded.deployment.of("rollout")[0])
    if extensions:
        config = config.model_copy(update={"extensions": extensions})
    with make_pool(config, config.env.train.total_num_envs, env_type=env_type or None) as pool:
        policy = build_policy(config)
        warm_up = config.actor.optim.critic_warmup_iterations + 1
        return _iterations(config, pool, policy, device, warm_up, iterations)


def _iterations(
    config: Config, pool: EnvPool, policy: Any, device: torch.device, warm_up: int, iterations: int
) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    threads = num_threads(config)
    engine = NativeTrainEngine(policy, EngineOptions(config.actor, warm_up + iterations), device, threads)
    update = OnPolicyUpdate(engine, config)
    acting = make_rollout_engine(config, policy, threads)
    worker = SyncCollector(config, pool, acting, lambda: False)
    shuffle = torch.Generator().manual_seed(config.runner.seed)
    clock = PhaseClock([manager.pid for manager in pool.managers if manager.pid is not None])
    wall = {"env": 0.0, "policy": 0.0, "train": 0.0}
    cpu = {"simulation": 0.0, "inference": 0.0, "training": 0.0}
    env_steps = 0
    start_s = 0.0
    for iteration in range(warm_up + iterations):
        if iteration == warm_up:
            wall = dict.fromkeys(wall, 0.0)
            cpu = dict.fromkeys(cpu, 0.0)
            env_steps = 0
            start_s = time.perf_counter()
        first = clock.read()
        batch, metrics = worker.gather(iteration)
        second = clock.read()
        update.update(batch, compute_advantages(batch, config.algorithm), shuffle)
        worker.update_weights(engine.weights(), engine.version)
        third = clock.read()
        wall["env"] += float(metrics["time/env_s"] or 0.0)
        wall["policy"] += float(metrics["time/policy_s"] or 0.0)
        wall["train"] += third[0] - second[0]
        cpu["inference"] += second[1] - first[1]
        cpu["training"] += third[1] - second[1]
        cpu["simulation"] += third[2] - first[2]
        env_steps += int(batch.valid.sum())
    total_s = time.perf_counter() - start_s
    parts = {name: round(seconds / (total_s * cores), 4) for name, seconds in cpu.items()}
    return {
        "env_steps_per_s": round(env_steps / total_s, 1),
        "env_steps": env_steps,
        "iterations": iterations,
        "wall_s": round(total_s, 2),
        "wall_split": {name: round(seconds / total_s, 4) for name, seconds in wall.items()}
        | {"other": round(1 - sum(wall.values()) / total_s, 4)},
        "cores_split": parts,
        "cores_busy": round(sum(parts.values()), 4),
    }


def run(overrides: list[str] | None = None, iterations: int = ITERATIONS) -> dict[str, Any]:
    """Measure both sides and return the figures.

    Args:
        overrides: of the default training command.
        iterations: measured on each side.
    """
    loaded = load_config(["env=maniskill", "model=openvla", "env.video.enabled=false", *(overrides or [])])
    check_simulator(loaded.config)
    ours = measure(loaded, iterations)
    baseline = measure(loaded, iterations, **BASELINE)
    return {
        "ratio": round(ours["env_steps_per_s"] / baseline["env_steps_per_s"], 2),
        "embodrl": ours,
        "baseline": baseline,
        "hardware": describe_hardware(),
    }


def main(json_path: Path | None = None) -> int:
    """Measure, print a table, write the figures to ``json_path``; return 0."""
    result = run()
    table = Table("end to end", "env-steps/s", "env", "policy", "train", "other", "simulation", "inference", "training")
    for label, key in (("rendering every step, stock meshes", "baseline"), ("embodrl", "embodrl")):
        figures = result[key]
        walls = [f"{100 * part:.0f} %" for part in figures["wall_split"].values()]
        cores = [f"{100 * part:.0f} %" for part in figures["cores_split"].values()]
        table.add_row(label, f"{figures['env_steps_per_s']:.0f}", *walls, *cores)
    console = Console()
    console.print(table)
    console.print("env to other: parts of the wall time; simulation to training: parts of the time of all cores")
    console.print(f"cores busy: {100 * result['embodrl']['cores_busy']:.0f} %; ratio: {result['ratio']}")
    if json_path is not None:
        write_json_result(json_path, result)
    return 0
