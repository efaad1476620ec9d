"""Asynchronous runs against the busier of their two sides: `python benchmarks/busier_side.py DIRECTORY [--json FILE]`.

Simulators wait for each chunk, as slow ones and real robots do. Three cases: waits of 0.4 s on average, some of them
ten times as long; waits of 0.25 s and rewards that take a second for each finished episode; and those waits with
rollouts by a policy server in a process of its own, which has the last core as if it were another machine's. The
synchronous run tells what an iteration's rollouts (simulation and policy) and its training (log-probs of the update
included) take by themselves; an asynchronous run that waits for whole rollouts can't be faster than the slower of
them. Each side computes in one thread, so that on two cores neither takes the other's. Prints the mean
seconds of an iteration, and of the ideal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hardware import describe_hardware
from soak_served import free_ports

from embodrl.serving.wire import TOKEN_VARIABLE
from embodrl.storage.json_file import write_json_file

ITERATIONS = 14
# Iterations before figures count: those whose rollouts were begun by the first weights, and two more.
WARM_UP = 6
MODEL = ("env=toy", "model=openvla_oft", "model.warm_start=null")
SETTINGS = (
    *MODEL,
    "env.num_processes=4",
    "env.pin_cpus=false",
    "env.train.total_num_envs=16",
    "env.train.max_steps_per_rollout_epoch=50",
    "env.eval.num_episodes=16",
    "env.video.enabled=false",
    "actor.optim.critic_warmup_iterations=0",
    "algorithm.update_epoch=3",
    "cluster.num_threads=1",
    "runner.eval_at_start=false",
    "runner.eval_interval=0",
    "runner.save_interval=1000",
    "runner.logger.tensorboard=false",
    f"runner.max_iterations={ITERATIONS}",
)
AHEAD = ("runner.max_staleness=4", "algorithm.decoupled.enabled=true")
HEAVY_TAILED = ("extensions=[heavy_tailed]",)
WAITING = ("extensions=[slow_reward]",)
SLOW_REWARD = (*WAITING, "reward.fn='slow_reward:one_second'")


def rows_of(directory: Path, token: str, *settings: str) -> list[dict[str, Any]]:
    """Return the iterations that count of a run with ``settings``."""
    command = [sys.executable, "-m", "embodrl", "train", *SETTINGS, *settings, f"runner.output_dir={directory}"]
    environment = os.environ | {"PYTHONPATH": python_path(), TOKEN_VARIABLE: token}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return counted(directory)


def counted(directory: Path) -> list[dict[str, Any]]:
    """Return the iterations of a run that count: the last one has an evaluation."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if WARM_UP < row["iteration"] < ITERATIONS]


def python_path() -> str:
    """Return PYTHONPATH for runs that import slow_reward.py."""
    return os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))))


@contextlib.contextmanager
def server(directory: Path, token: str) -> Iterator[str]:
    """Yield the address of a policy server of its own, which has begun."""
    port = free_ports(1)
    command = [sys.executable, "-m", "embodrl", "serve", *MODEL, "model.random_weights=true", "protocol=http"]
    command += [f"serve.port={port}", f"serve.token={token}", "cluster.num_threads=1"]
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def measure(directory: Path, token: str, *settings: str) -> dict[str, float]:
    """Return seconds of an iteration, synchronous, asynchronous and ideal, and the asynchronous staleness."""
    before = rows_of(directory / "synchronous", token, *settings)
    ahead = rows_of(directory / "asynchronous", token, *settings, *AHEAD)
    return compared(before, ahead)


def compared(before: list[dict[str, Any]], ahead: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of ``measure``, means over the iterations of a synchronous and an asynchronous run."""

    def mean(rows: list[dict[str, Any]], *keys: str) -> float:
        return statistics.mean(sum(float(row.get(key) or 0.0) for key in keys) for row in rows)

    rollouts = mean(before, "time/env_s", "time/policy_s")
    training = mean(before, "time/train_s", "time/proximal_s")
    seconds = mean(ahead, "time/total_s")
    return {
        "synchronous_s": mean(before, "time/total_s"),
        "rollouts_s": rollouts,
        "training_s": training,
        "asynchronous_s": seconds,
        "staleness_mean": mean(ahead, "staleness/mean"),
        "of_ideal": max(rollouts, training) / seconds,
    }


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", nargs="+", default=["heavy-tailed", "reward", "server"], help="those to measure")
    arguments = parser.parse_args()
    token = secrets.token_hex(16)
    result: dict[str, Any] = {}
    if "heavy-tailed" in arguments.cases:
        result["heavy-tailed simulators"] = measure(arguments.directory / "heavy", token, *HEAVY_TAILED)
    if "reward" in arguments.cases:
        result["slow reward"] = measure(arguments.directory / "reward", token, *SLOW_REWARD)
    if "server" in arguments.cases:
        with server(arguments.directory / "server", token) as url:
            result["server"] = measure(
                arguments.directory / "server", token, *WAITING, "rollout=remote", f"rollout.remote.urls=[{url}]"
            )
    for name, row in result.items():
        print(name, json.dumps({key: round(value, 3) for key, value in row.items()}), flush=True)
    if arguments.json is not None:
        write_json_file(arguments.json, result | {"hardware": describe_hardware()})


if __name__ == "__main__":
    main()
