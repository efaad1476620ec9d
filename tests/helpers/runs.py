"""Whole runs of the command line at the smallest size, as a user starts them."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml
from fork_server import fork_servers

from embodrl.reporting.rows import is_measured

HERE = Path(__file__).parent
GONE_S = 20.0
TINY_POLICY = (
    (HERE.parents[1] / "benchmarks" / "smallest_run.yaml").read_text()
    + """
runner:
  max_iterations: 4
  eval_interval: 2
  save_interval: 2
  logger: {tensorboard: false, console: plain}
extensions: [stop_at]
"""
)
TINY = (
    """
presets: {env: toy}
env:
  tasks: [reach-red, reach-green]
  max_episode_steps: 6
  pin_cpus: false
  cameras: [{height: 16, width: 16}]
  # Only the step limit ends an episode, so that the steps of a rollout are known: 4 x 12.
  train: {total_num_envs: 4, max_steps_per_rollout_epoch: 12, ignore_terminations: true}
  eval: {total_num_envs: 4, num_episodes: 6, decoding: greedy}
collect: {num_episodes: 6}
"""
    + TINY_POLICY
)
# One run of TINY: 2 waves of evaluation x 2 chunks, then 4 iterations of 4 chunks and 4 optimizer steps, an evaluation
# and a checkpoint after iterations 2 and 4.

LEARNING_OPENVLA = """
model:
  warm_start: null
  num_action_chunks: 2
  architecture:
    image_size: 16
    patch_size: 8
    dino: {width: 16, depth: 2, num_heads: 1, mlp_dim: 32}
    siglip: {width: 16, depth: 2, num_heads: 1, mlp_dim: 32}
    hidden_size: 32
    intermediate_size: 64
    num_hidden_layers: 1
    num_attention_heads: 2
  value_head: {hidden_sizes: [8]}
"""
"""Large enough to learn the toy environment from demonstrations in seconds."""


def tiny() -> dict[str, object]:
    """Return the smallest run as a mapping."""
    config = yaml.safe_load(TINY)
    config["runner"] |= {"max_iterations": 1, "eval_interval": 0, "logger": {"tensorboard": False, "console": "off"}}
    config["actor"]["optim"]["critic_warmup_iterations"] = 0
    config["extensions"] = []
    config["env"]["num_processes"] = 1
    return config


@dataclass
class Outcome:
    code: int
    stdout: str
    stderr: str


def embodrl(
    *args: object,
    stop_at: str = "",
    children: Path | None = None,
    search_path: Path | str | None = None,
    timeout_s: float = 480.0,
) -> Outcome:
    """Run the command line to its end; ``children`` gets the process ids that live when the signal is sent."""
    environ = environment(stop_at, children, search_path)
    return Outcome(*next(fork_servers()).run([str(each) for each in args], environ, timeout_s))


def script(
    path: Path, *args: object, search_path: Path | None = None, timeout_s: float = 480.0, check: bool = True
) -> Outcome:
    """Run a Python script to its end, which succeeds unless ``check`` is off."""
    environ = environment(search_path=search_path)
    outcome = Outcome(*next(fork_servers()).run([str(each) for each in args], environ, timeout_s, path))
    assert not check or outcome.code == 0, outcome.stderr
    return outcome


def start(*args: object, search_path: Path | None = None) -> subprocess.Popen[str]:
    """Start the command line, as a child of this process."""
    command = [sys.executable, "-m", "embodrl.__main__", *map(str, args)]
    environ = environment(search_path=search_path)
    return subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def environment(
    stop_at: str = "", children: Path | None = None, search_path: Path | str | None = None
) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("STOP_AT")}
    environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), str(search_path or ""), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "STOP_AT": stop_at,
        "COLUMNS": "200",
    }
    return environ | {"STOP_AT_CHILDREN": str(children or os.devnull)}


def assert_gone(children: Path) -> None:
    """Two simulators (and what guards them) were alive when the signal came, and none is left."""
    pids = [int(line) for line in children.read_text().split()]
    assert len(pids) >= 2
    deadline = time.monotonic() + GONE_S
    while left := [pid for pid in pids if psutil.pid_exists(pid) and is_running(pid)]:
        assert time.monotonic() < deadline, f"{left} outlived the run"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """A zombie, which somebody else has to reap, is not running."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def metrics(run_dir: Path) -> list[dict[str, object]]:
    """All that does not depend on the clock and the machine."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not is_measured(name)} for row in rows]
