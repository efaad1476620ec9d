"""Roofline of the main job: operations, bytes and processor time of decisions and updates, and what one core can do.

One thread decides and trains, so that every operator runs where it is counted. Floating-point operations are those of
matrix products, convolutions and attention (``torch.utils.flop_counter``); bytes are the tensors that all operators
read and write, as if nothing stayed in a cache. Rates are per second of processor time: other programs on the same
cores slow them down, but less than they slow the clock down; the peaks are measured in the same minute.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from e2e import PhaseClock
from hardware import describe_hardware
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from embodrl.algorithms.advantages import compute_advantages
from embodrl.hybrid_engines.rollout.native import make_rollout_engine
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.learners.on_policy import OnPolicyUpdate
from embodrl.pipelines.load import load_config
from embodrl.storage.json_file import write_json_file
from embodrl.workers.collector import SyncCollector
from embodrl.workers.env import make_pool
from embodrl.workers.policy import build_policy, configure_torch

SETTINGS = (
    *("env=maniskill", "model=openvla", "env.video.enabled=false", "cluster.num_threads=1"),
    *("env.train.max_steps_per_rollout_epoch=50", "actor.optim.critic_warmup_iterations=0"),
)
ROUNDS = 5
GEMM = 1024
COPIED_BYTES = 64 * 2**20


class ByteCounter(TorchDispatchMode):
    """Adds up the bytes of the tensors that operators read and write; views cost nothing."""

    num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


def best_s(work: Callable[[], object]) -> float:
    """Return the least processor time of a call."""
    times: list[float] = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return min(times)


def peaks() -> dict[str, float]:
    """Return what a core reaches now: GFLOP/s of matrix products by dtype, and GB/s read and written by a copy."""
    found: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(2, GEMM, GEMM).to(dtype)
        found[str(dtype).removeprefix("torch.")] = 2 * GEMM**3 / best_s(lambda a=a, b=b: a @ b) / 1e9
    source, target = torch.ones(2, COPIED_BYTES // 4)
    found["copy"] = 2 * COPIED_BYTES / best_s(lambda: target.copy_(source)) / 1e9
    return found


def run(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Measure an iteration, then count one."""
    loaded = load_config([*SETTINGS, *overrides])
    config = loaded.config
    device = configure_torch(config, loaded.deployment.of("rollout")[0])
    before = peaks()
    with make_pool(config, config.env.train.total_num_envs) as pool:
        policy = build_policy(config)
        engine = NativeTrainEngine(policy, EngineOptions(config.actor, 3), device, 1)
        worker = SyncCollector(config, pool, make_rollout_engine(config, policy, 1), lambda: False)
        shuffle = torch.Generator().manual_seed(config.runner.seed)
        clock = PhaseClock([manager.pid for manager in pool.managers if manager.pid is not None])

        def decide(iteration: int) -> Any:
            return worker.gather(iteration)[0]

        def update(batch: Any) -> None:
            OnPolicyUpdate(engine, config).update(batch, compute_advantages(batch, config.algorithm), shuffle)
            worker.update_weights(engine.weights(), engine.version)

        update(decide(0))  # allocates, compiles shaders
        marks = [clock.read()]
        batch = decide(1)
        marks.append(clock.read())
        update(batch)
        marks.append(clock.read())
        counted: dict[str, tuple[int, int]] = {}
        with ByteCounter() as moved, FlopCounterMode(display=False) as flops:
            batch = decide(2)
        counted["decisions"] = flops.get_total_flops(), moved.num_bytes
        with ByteCounter() as moved, FlopCounterMode(display=False) as flops:
            update(batch)
        counted["training"] = flops.get_total_flops(), moved.num_bytes
    after = peaks()
    peak = {name: max(before[name], after[name]) for name in before}
    seconds = {
        "simulation": marks[2][2] - marks[0][2],
        "decisions": marks[1][1] - marks[0][1],
        "training": marks[2][1] - marks[1][1],
    }
    total = sum(seconds.values())
    phases = {name: _figures(spent, total, counted.get(name), peak) for name, spent in seconds.items()}
    return {"env_steps": int(batch.valid.sum()), "peaks": peak, "phases": phases, "hardware": describe_hardware()}


def _figures(seconds: float, total: float, counted: tuple[int, int] | None, peak: dict[str, float]) -> dict[str, float]:
    found = {"processor_s": round(seconds, 3), "share": round(seconds / total, 3)}
    if counted is None:
        return found
    gflop, gbyte = counted[0] / 1e9, counted[1] / 1e9
    bound = min(peak["bfloat16"], gflop / gbyte * peak["copy"])
    return found | {
        "gflop": round(gflop, 1),
        "gbyte": round(gbyte, 1),
        "flop_per_byte": round(gflop / gbyte, 2),
        "gflop_per_s": round(gflop / seconds, 1),
        "of_float32_peak": round(gflop / seconds / peak["float32"], 3),
        "of_bfloat16_peak": round(gflop / seconds / peak["bfloat16"], 3),
        "of_roofline": round(gflop / seconds / bound, 3),
    }


def main(json_path: Path | None = None) -> int:
    """Measure, print a table, write the figures to ``json_path``; return 0."""
    result = run()
    names = ("processor_s", "share", "gflop", "gbyte", "flop_per_byte", "gflop_per_s", "of_float32_peak", "of_roofline")
    table = Table("phase", *names, title=f"{result['env_steps']} environment steps, one thread")
    for phase, figures in result["phases"].items():
        table.add_row(phase, *(str(figures.get(name, "")) for name in names))
    console = Console(width=140)
    console.print(table)
    console.print("one core: " + ", ".join(f"{name} {value:.0f}" for name, value in result["peaks"].items()))
    if json_path is not None:
        write_json_file(json_path, result)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
