"""What a reward of one second costs an iteration: `python benchmarks/slow_reward.py DIRECTORY`.

Trains the smallest policy in simulators whose chunks take 0.25 s and whose episodes last three chunks, with no
reward function and with one that takes a second; where the main process acts, and with two rollout processes. Prints
the seconds of an iteration, the median of all but the first and the last.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.workers.episode import Episode

HERE = Path(__file__).parent
CHUNK_S, REWARD_S, ITERATIONS = 0.25, 1.0, 5
TWO = "cluster.component_placement={actor:0,rollout:'0:0-1',env:0}"
AHEAD = ("runner.max_staleness=1", "algorithm.decoupled.enabled=true")
PLACES: dict[str, tuple[str, ...]] = {
    "main process": (),
    "two rollout processes": (TWO,),
    "two rollout processes, one update ahead": (TWO, *AHEAD),
}


class _Slow:
    """Has every chunk of the toy environment take ``CHUNK_S``; as an extension this reaches the simulators."""

    original = ToyVectorEnv.chunk_step

    @staticmethod
    def chunk_step(env: ToyVectorEnv, *args: Any, **kwargs: Any) -> Any:
        time.sleep(CHUNK_S)
        return _Slow.original(env, *args, **kwargs)


if __name__ != "__main__":
    ToyVectorEnv.chunk_step = _Slow.chunk_step


async def one_second(episode: Episode) -> float:
    """Return what the environment has paid, after ``REWARD_S``."""
    await asyncio.sleep(REWARD_S)
    return float(episode.rewards.sum())


def seconds(run_dir: Path, *overrides: str) -> float:
    """Return the median seconds of an iteration of a run."""
    command = [sys.executable, "-m", "embodrl", "train", "--config", str(HERE / "smallest_run.yaml"), "env=toy"]
    settings = (
        "extensions=[slow_reward]",
        "env.num_processes=2",
        "env.train.total_num_envs=8",
        "env.max_episode_steps=9",
        "env.train.max_steps_per_rollout_epoch=36",
        "env.pin_cpus=false",
        "runner.eval_at_start=false",
        "runner.eval_interval=0",
        "env.eval.num_episodes=4",
        "runner.logger.tensorboard=false",
        f"runner.max_iterations={ITERATIONS}",
        f"runner.output_dir={run_dir}",
    )
    subprocess.run([*command, *settings, *overrides], check=True, capture_output=True)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["time/total_s"] for row in rows[-ITERATIONS + 1 : -1])


def main(directory: Path) -> None:
    """Print a row for each place."""
    for name, where in PLACES.items():
        place = directory / name.replace(" ", "_").replace(",", "")
        plain = seconds(place / "plain", *where)
        slow = seconds(place / "slow", "reward.fn='slow_reward:one_second'", *where)
        print(f"{name}: {plain:.2f} s without, {slow:.2f} s with a reward of {REWARD_S:g} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
