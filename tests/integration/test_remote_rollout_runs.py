"""A run whose rollouts come from policy servers, one of which is killed and started again while it trains."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs

pytest.importorskip("aiohttp", reason="the extra serve is not installed")
CONFIG = (
    runs.LEARNING_OPENVLA
    + """
env:
  tasks: [reach-red]
  max_episode_steps: 10
  pin_cpus: false
  num_processes: 1
  train: {total_num_envs: 8, max_steps_per_rollout_epoch: 20}
  eval: {total_num_envs: 8, num_episodes: 8, decoding: greedy}
actor: {global_batch_size: 80, micro_batch_size: 40, precision: fp32}
rollout: {precision: fp32}
runner: {max_iterations: 15, eval_interval: 15, logger: {tensorboard: false}}
"""
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Server:
    """`embodrl serve` of the run's model, on a port of its own."""

    def __init__(self, directory: Path) -> None:
        self.port, self.log = free_port(), directory / "server.log"
        settings = ("protocol=http", f"serve.port={self.port}", "serve.token=none", "model.random_weights=true")
        self.command = [sys.executable, "-m", "embodrl.__main__", "serve", "-c", f"{directory}/serve.yaml", *settings]

    def start(self) -> None:
        with self.log.open("a") as out:
            self.process = subprocess.Popen(self.command, env=runs.environment(), stdout=out, stderr=out)


def rows(directory: Path) -> list[dict]:
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_server_acts_ahead_of_training(tmp_path):
    """Each answer is one by the version that it names, to which the loss weights it."""
    (tmp_path / "serve.yaml").write_text("presets: {env: toy}" + CONFIG)
    (tmp_path / "train.yaml").write_text("presets: {env: toy, rollout: remote}" + CONFIG)
    server = Server(tmp_path)
    server.start()
    ahead = ("runner.max_staleness=1", "algorithm.decoupled.enabled=true", "runner.max_iterations=5")
    ahead += (f"rollout.remote.urls=[http://127.0.0.1:{server.port}]", "runner.eval_interval=5")
    try:
        done = runs.embodrl("train", "-c", tmp_path / "train.yaml", *ahead, f"runner.output_dir={tmp_path / 'run'}")
    finally:
        server.process.kill()
        server.process.wait()
    assert done.code == 0, done.stderr
    found = rows(tmp_path / "run")
    assert [row["iteration"] for row in found] == list(range(6))
    assert all(row["staleness/max"] <= 1 for row in found[1:]) and max(row["staleness/max"] for row in found[1:]) == 1


def wait_for(run: Path, train: subprocess.Popen, iterations: int) -> None:
    while len(rows(run)) <= iterations:
        assert train.poll() is None, (run.parent / "train.log").read_text()
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_server_that_is_killed_does_not_end_the_run(tmp_path):
    (tmp_path / "serve.yaml").write_text("presets: {env: toy}" + CONFIG)
    (tmp_path / "train.yaml").write_text("presets: {env: toy, rollout: remote}" + CONFIG)
    servers = [Server(tmp_path) for _ in range(2)]
    for server in servers:
        server.start()
    urls = ",".join(f"http://127.0.0.1:{server.port}" for server in servers)
    run = tmp_path / "run"
    settings = (f"rollout.remote.urls=[{urls}]", f"runner.output_dir={run}")
    with (tmp_path / "train.log").open("w") as out:
        command = [sys.executable, "-m", "embodrl.__main__", "train", "-c", f"{tmp_path}/train.yaml", *settings]
        train = subprocess.Popen(command, env=runs.environment(), stdout=out, stderr=out)
    try:
        for number, server in enumerate(servers):  # one after the other, and then both at once
            wait_for(run, train, 3 * number + 2)
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
            server.start()
        wait_for(run, train, 8)
        for server in servers:
            server.process.kill()
            server.process.wait()
        for server in servers:
            server.start()
        assert train.wait(1200) == 0, (tmp_path / "train.log").read_text()
        for server in servers:
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) in (0, 128 + signal.SIGTERM)
    finally:
        for process in (train, *(server.process for server in servers)):
            process.kill()
            process.wait()
    found = rows(run)
    assert [row["iteration"] for row in found] == list(range(16)) and "eval/success_rate" in found[-1]
    assert "does not answer" in (run / "logs" / "embodrl.log").read_text()
    # Every chunk was drawn by the weights that the update began with.
    assert all(row["train/logprob_mismatch"] < 1e-5 for row in found[1:])
