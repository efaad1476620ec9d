"""A sweep of real runs that is killed and continued, and a profile of one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from runs import TINY, embodrl, metrics, start

from embodrl.errors import OutputError
from embodrl.trainer.lock import run_lock

pytestmark = pytest.mark.long
WAIT_S = 120.0


def is_free(run: Path) -> bool:
    try:
        with run_lock(run):
            return True
    except OutputError:
        return False


def test_a_killed_sweep_leaves_no_run_behind_and_is_resumed(tmp_path: Path) -> None:
    config, directory, alone = tmp_path / "tiny.yaml", tmp_path / "sweep", tmp_path / "alone"
    config.write_text(TINY)
    sweep = start("sweep", "--config", config, "runner.seed=0,1", "runner.max_iterations=4", "--output", directory)
    first = directory / "seed-0"
    deadline = time.monotonic() + WAIT_S
    while not (first / "metrics.jsonl").is_file() or not metrics(first):
        assert sweep.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    sweep.kill()
    sweep.communicate()
    while not is_free(first):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    resumed = embodrl("resume", directory)
    assert resumed.code == 0, resumed.stderr
    assert "seed-1: finished" in resumed.stdout
    assert embodrl("train", "--config", config, f"runner.output_dir={alone}").code == 0
    assert metrics(first) == metrics(alone)
    found = json.loads(embodrl("compare", directory, "--json").stdout)
    assert [run["status"] for run in found["runs"]] == ["finished", "finished"]
    assert embodrl("resume", directory, "runner.seed=3").code == 2


def test_a_profile_has_every_process(tmp_path: Path) -> None:
    config, directory = tmp_path / "tiny.yaml", tmp_path / "run"
    config.write_text(TINY)
    arguments = ("rollout.own_process=true", f"runner.output_dir={directory}", "--iterations", 3)
    outcome = embodrl("profile", "--config", config, *arguments)
    assert outcome.code == 0, outcome.stderr
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"main", "env/0"} <= names and any(name.startswith("rollout") for name in names), names
    assert {event["name"] for event in events} >= {"step", "policy", "forward and backward", "iteration 3"}
    head, *lines = outcome.stdout[outcome.stdout.index("component ") :].splitlines()
    assert head.split()[:2] == ["component", "cores"]
    assert [line.split()[0] for line in lines[:3]] == ["main", "env", "rollout"]
    assert "env/0" in outcome.stdout and "forward and backward" in outcome.stdout


def test_a_run_in_progress_is_recorded(tmp_path: Path) -> None:
    config, directory = tmp_path / "tiny.yaml", tmp_path / "run"
    config.write_text(TINY)
    started = start("train", "--config", config, f"runner.output_dir={directory}", "runner.max_iterations=100000")
    try:
        deadline = time.monotonic() + WAIT_S
        while not (directory / "metrics.jsonl").is_file() or len(metrics(directory)) < 2:
            assert started.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        outcome = embodrl("profile", directory, "--seconds", 2)
    finally:
        started.terminate()
        started.wait(60)
    assert outcome.code == 0, outcome.stderr
    assert "env/0" in outcome.stdout and "forward and backward" in outcome.stdout
    events = json.loads((directory / "logs" / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} >= {"main", "env/0"}
    assert not (directory / "logs" / "trace" / "switch").exists()
    assert "profile-not-running" in embodrl("profile", directory).stderr
