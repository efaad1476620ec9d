"""Training with rollouts beside it: environment steps per second, against taking turns.

Three parts, each in one run: (a) the main job on ManiSkill, which computes on both sides; (b) environments with a
heavy-tailed step time, a stand-in for slow simulators and real robots, which mostly wait; (c) two pipeline stages
without any training. The ideal of (a) and (b) is the busier of the two sides, alone; that of (c) is given there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import slow_env
import torch
from hardware import describe_hardware
from rich.console import Console
from rich.table import Table

from embodrl.algorithms.advantages import compute_advantages
from embodrl.algorithms.decoupled import set_proximal
from embodrl.config import LoadedConfig
from embodrl.config.schema import Config
from embodrl.envs.pool.pool import EnvPool
from embodrl.hybrid_engines.rollout.native import make_rollout_engine
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.learners.on_policy import OnPolicyUpdate
from embodrl.models.base import VLAPolicy
from embodrl.pipelines.load import load_config
from embodrl.storage.json_file import write_json_file
from embodrl.workers.async_collector import AsyncCollector
from embodrl.workers.collector import Collector
from embodrl.workers.env import check_simulator, make_pool
from embodrl.workers.policy import build_policy, configure_torch, num_threads
from embodrl.workers.reward import RewardWorker
from embodrl.workers.rollout_backend import acting_policy, make_collector

ITERATIONS = 6
# Iterations before time is taken, beyond those whose rollouts were begun by the first weights.
WARM_UP = 2
MODES = (
    ("synchronous", ("runner.max_staleness=0",)),
    ("one step ahead", ("runner.max_staleness=1", "algorithm.decoupled.enabled=true")),
    ("bounded, 4", ("runner.max_staleness=4", "algorithm.decoupled.enabled=true")),
)
MANISKILL = ("env=maniskill", "model=openvla", "env.video.enabled=false")
# One forward pass per answer and several passes per update: one side mostly waits, the other computes.
SLOW = (
    "env=toy",
    "model=openvla_oft",
    "model.warm_start=null",
    "extensions=[slow_env]",
    "env.num_processes=4",
    "env.pin_cpus=false",
    "env.train.total_num_envs=16",
    "env.train.max_steps_per_rollout_epoch=50",
    "actor.optim.critic_warmup_iterations=0",
    "algorithm.update_epoch=3",
)


@dataclass(frozen=True)
class Sides:
    """What a training loop is made of."""

    config: Config
    policy: VLAPolicy
    engine: NativeTrainEngine
    source: Collector
    shuffle: torch.Generator


def build(config: Config, pool: EnvPool) -> Sides:
    """Return fresh weights, optimizer and rollouts on a started pool."""
    policy, cores = build_policy(config), num_threads(config)
    ahead = config.runner.max_staleness > 0
    engine = NativeTrainEngine(policy, EngineOptions(config.actor, 1000, may_be_stale=ahead), policy.device, cores)
    acting = make_rollout_engine(config, acting_policy(config, policy), cores)
    source = make_collector(config, pool, acting, lambda: False, RewardWorker(config, tuple(pool.spec.tasks)))
    return Sides(config, policy, engine, source, torch.Generator().manual_seed(config.runner.seed))


def train(sides: Sides, iterations: int, *, update: bool = True) -> dict[str, float]:
    """Return environment steps per second of ``iterations``, after a warm-up; without ``update``, of rollouts alone.

    ``rollouts`` are those that were played in that time, in the unit of what an iteration trains on: where they are far
    fewer than the iterations, the run still lives on what was played before.
    """
    algorithm, env_steps, start_s = sides.config.algorithm, 0, 0.0
    updates = OnPolicyUpdate(sides.engine, sides.config)
    lag, before = 0.0, 0.0
    warm_up = warm_up_of(sides.config)
    for iteration in range(warm_up + iterations):
        if iteration == warm_up:
            env_steps, start_s, lag, before = 0, time.perf_counter(), 0.0, _played(sides, iteration)
        batch, _ = sides.source.gather(iteration)
        if update:
            if algorithm.decoupled.enabled:
                set_proximal(batch, *updates.proximal(batch))
            updates.update(batch, compute_advantages(batch, algorithm), sides.shuffle)
        version = iteration + 1
        lag += float(iteration - batch.policy_version.float().mean()) / iterations
        sides.source.update_weights(sides.engine.weights() if update else (), version)
        env_steps += int(batch.meta["env_steps"])
    seconds = time.perf_counter() - start_s
    return {
        "env_steps_per_s": env_steps / seconds,
        "s_per_iteration": seconds / iterations,
        "mean_staleness": lag,
        "rollouts": _played(sides, warm_up + iterations) - before,
    }


def warm_up_of(config: Config) -> int:
    """Return iterations until what was played before the first update has been trained on."""
    return config.runner.max_staleness + WARM_UP


def _played(sides: Sides, iteration: int) -> float:
    """Return rollouts played so far."""
    if not isinstance(sides.source, AsyncCollector):
        return float(iteration)
    gate = sides.source.gate
    return (gate.accepted + gate.rejected) / gate.batch_size


def training_alone(sides: Sides, iterations: int) -> dict[str, float]:
    """Return the same of updates on one rollout, again and again."""
    algorithm = sides.config.algorithm
    updates = OnPolicyUpdate(sides.engine, sides.config)
    batch, _ = sides.source.gather(0)
    start_s = 0.0
    for iteration in range(1 + iterations):
        if iteration == 1:
            start_s = time.perf_counter()
        batch.policy_version = torch.full_like(batch.policy_version, sides.engine.version)
        updates.update(batch, compute_advantages(batch, algorithm), sides.shuffle)
    seconds = time.perf_counter() - start_s
    return {
        "env_steps_per_s": iterations * int(batch.meta["env_steps"]) / seconds,
        "s_per_iteration": seconds / iterations,
    }


def compare(overrides: tuple[str, ...], iterations: int, env_type: str | None = None) -> dict[str, Any]:
    """Return the figures of every mode, of both sides alone, and their ratios."""

    def configure(*further: str) -> LoadedConfig:
        config = load_config([*overrides, *further]).config
        # Rollouts continue until the end, as in the middle of a long run.
        length = warm_up_of(config) + iterations + config.runner.max_staleness + 1
        return load_config([*overrides, *further, f"runner.max_iterations={length}"])

    loaded = configure()
    plain = loaded.config
    configure_torch(plain, loaded.deployment.of("rollout")[0])
    rows: dict[str, Any] = {}
    with make_pool(plain, plain.env.train.total_num_envs, env_type=env_type) as pool:

        def measured(name: str, config: Config, **options: bool) -> None:
            sides = build(config, pool)
            try:
                rows[name] = train(sides, iterations, **options)
            finally:
                sides.source.close()

        for name, settings in MODES:
            measured(name, configure(*settings).config)
        measured("rollouts alone", configure("runner.max_staleness=4").config, update=False)
        rows["training alone"] = training_alone(build(plain, pool), iterations)
    ideal = min(rows["rollouts alone"]["env_steps_per_s"], rows["training alone"]["env_steps_per_s"])
    for name, _ in MODES:
        speed = rows[name]["env_steps_per_s"]
        rows[name] |= {"ratio": speed / rows["synchronous"]["env_steps_per_s"], "of_ideal": speed / ideal}
    return rows


def overlap(iterations: int) -> dict[str, float]:
    """Return seconds per rollout with one and with two stages, and what two stages can reach at best.

    A stage waits for its simulators and then for the policy, which serves the stages in turn: with E seconds of
    simulation and P of inference, for both stages together, two stages take ``max(E + P / 2, P)``. P is more than that
    of one stage, since half a batch takes more than half the time.
    """
    seconds: dict[str, float] = {}
    times: dict[str, float] = {}
    for stages in (1, 2):
        loaded = load_config([*SLOW, "model=openvla", f"rollout.pipeline_stages={stages}"])
        config = loaded.config
        configure_torch(config, loaded.deployment.of("rollout")[0])
        with make_pool(config, config.env.train.total_num_envs, env_type=slow_env.CONSTANT) as pool:
            sides = build(config, pool)
            sides.source.gather(0)
            start_s = time.perf_counter()
            for iteration in range(1, 1 + iterations):
                _, metrics = sides.source.gather(iteration)
                name = "env" if stages == 1 else "policy"
                times[name] = times.get(name, 0.0) + float(metrics[f"time/{name}_s"] or 0.0) / iterations
            seconds[str(stages)] = (time.perf_counter() - start_s) / iterations
    ideal = max(times["env"] + times["policy"] / 2, times["policy"])
    return {
        "one_stage_s": seconds["1"],
        "two_stages_s": seconds["2"],
        "env_s": times["env"],
        "policy_s": times["policy"],
        "ideal_s": ideal,
        "of_ideal": ideal / seconds["2"],
    }


def run(iterations: int = ITERATIONS, *, maniskill: bool = True) -> dict[str, Any]:
    """Measure all parts and return the figures."""
    result: dict[str, Any] = {}
    if maniskill:
        check_simulator(load_config(list(MANISKILL)).config)
        result["maniskill"] = compare((*MANISKILL, "actor.optim.critic_warmup_iterations=0"), iterations)
    stages = "rollout.pipeline_stages=4"
    result["heavy_tailed"] = compare((*SLOW, stages), iterations, slow_env.HEAVY)
    result["overlap"] = overlap(iterations)
    return result | {"hardware": describe_hardware()}


def main(json_path: Path | None = None) -> int:
    """Measure, print tables, write the figures to ``json_path``; return 0."""
    result = run()
    console = Console()
    titles = {"maniskill": "(a) ManiSkill, the main job", "heavy_tailed": "(b) heavy-tailed step time"}
    for key, title in titles.items():
        columns = ("mode", "env-steps/s", "s/iteration", "rollouts", "staleness", "ratio", "of the ideal")
        table = Table(*columns, title=title)
        for name, row in result[key].items():
            shown = [f"{row['env_steps_per_s']:.0f}", f"{row['s_per_iteration']:.2f}"]
            shown += [f"{row['rollouts']:.1f}" if "rollouts" in row else ""]
            shown += [f"{row['mean_staleness']:.1f}" if "mean_staleness" in row else ""]
            shown += [f"{row['ratio']:.2f}", f"{100 * row['of_ideal']:.0f} %"] if "ratio" in row else ["", ""]
            table.add_row(name, *shown)
        console.print(table)
    part = result["overlap"]
    console.print(
        f"(c) a rollout of {part['env_s']:.2f} s simulation and {part['policy_s']:.2f} s inference: one stage"
        f" {part['one_stage_s']:.2f} s, two stages {part['two_stages_s']:.2f} s,"
        f" {100 * part['of_ideal']:.0f} % of the ideal {part['ideal_s']:.2f} s"
    )
    if json_path is not None:
        write_json_file(json_path, result)
    return 0
