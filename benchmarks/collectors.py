"""Bytes through the main process, and memory of a training process, by the number of processes.

`python benchmarks/collectors.py DIRECTORY [--json FILE]`

The tiny OpenVLA plays 64 toy environments with 2 to 16 rollout processes, whose rollouts two training processes read
past the main process, and once through it; then 1, 2 and 4 training processes share the rows of two rollout processes.
Prints, for an iteration, the MiB that the main process exchanges with both sides, the MiB that pass it by, and the
resident memory of a training process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from hardware import describe_hardware
from rich.console import Console
from rich.table import Table

from embodrl.storage.json_file import write_json_file

ITERATIONS = 2
SETTINGS = (
    *("env=toy", "model=openvla", "model.warm_start=null", "model.architecture.image_size=64"),
    *("cluster.device=cpu", "env.pin_cpus=false", "env.video.enabled=false", "env.train.total_num_envs=64"),
    *("env.train.max_steps_per_rollout_epoch=40", "actor.optim.critic_warmup_iterations=0"),
    *("runner.eval_at_start=false", "runner.eval_interval=0", "runner.save_interval=1000"),
    *(
        "runner.logger.tensorboard=false",
        "algorithm.update_epoch=1",
        "actor.global_batch_size=512",
        "actor.micro_batch_size=32",
        f"runner.max_iterations={ITERATIONS}",
    ),
)
COLLECTORS, RANKS = (2, 4, 8, 16), (1, 2, 4)
# The same pipeline, of whose nodes a user could be the author: they may read every column.
THROUGH = ("pipeline.fn=embodrl.pipelines.builtin:on_policy",)
LINKS = ("sent_rollout_mib", "received_rollout_mib", "sent_actor_mib", "received_actor_mib")


def measure(run_dir: Path, collectors: int, ranks: int, *settings: str) -> dict[str, float]:
    """Return MiB of the last iteration and the MiB of memory of a training process."""
    placement = f"{{actor:'0:0-{ranks - 1}',rollout:'0:0-{collectors - 1}',env:0}}"
    command = [sys.executable, "-m", "embodrl", "train", *SETTINGS, f"cluster.component_placement={placement}"]
    command += ["actor=fsdp", f"env.num_processes={collectors}", f"runner.output_dir={run_dir}", *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    counted: list[dict[str, Any]] = [row for row in rows if row["iteration"] > 1]
    through = statistics.mean(sum(float(row.get(f"usage/{link}") or 0) for link in LINKS) for row in counted)
    past = statistics.mean(float(row.get("usage/shared_mib") or 0) for row in counted)
    memory = max(float(row["usage/memory_actor_gib"]) for row in counted) * 1024 / ranks
    figures = {"through_main_mib": through, "past_main_mib": past, "memory_of_a_rank_mib": memory}
    return {"collectors": collectors, "ranks": ranks} | {name: round(value, 2) for name, value in figures.items()}


def main() -> None:
    """Print a row for each number of processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = {
        "past the main process": [measure(arguments.directory / f"past_{n}", n, 2) for n in COLLECTORS],
        "through it": [measure(arguments.directory / f"through_{n}", n, 2, *THROUGH) for n in COLLECTORS],
        "training processes": [measure(arguments.directory / f"ranks_{n}", 2, n) for n in RANKS],
    }
    for name, rows in result.items():
        table = Table(*rows[0], title=name)
        for row in rows:
            table.add_row(*map(str, row.values()))
        Console().print(table)
    if arguments.json is not None:
        write_json_file(arguments.json, result | {"hardware": describe_hardware()})


if __name__ == "__main__":
    main()
