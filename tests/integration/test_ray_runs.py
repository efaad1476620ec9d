"""Whole runs on Ray: the same run as in one process, on one machine and on two, also when processes die."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import embodrl, metrics, start

pytest.importorskip("ray", reason="the extra ray is not installed")

RESTARTS = ("rollout/restarts", "env/restarts")
PLACES = "cluster.component_placement={actor:0,rollout:0-1,env:0-1}"


@pytest.fixture(scope="module")
def plain(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """The run in one process with two threads."""
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    done = embodrl("train", "--config", config, f"runner.output_dir={run_dir}", "cluster.num_threads=2")
    assert done.code == 0, done.stderr
    return metrics(run_dir)


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Any]]:
    """Starts a Ray with so many raylets."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with contextlib.ExitStack() as closing:

        def start(count: int) -> Any:
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
            closing.callback(cluster.shutdown)
            for _ in range(count - 1):
                cluster.add_node(num_cpus=3)
            cluster.wait_for_nodes()
            return cluster

        yield start


@pytest.fixture
def two_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machines: Callable[[int], Any]) -> Any:
    """A Ray with two raylets, whose workers get STOP_AT: a rollout process is killed in its second
    rollout, and the simulators of each in the eleventh chunk that it plays."""
    monkeypatch.setenv("STOP_AT", "act:6:SIGKILL:rank_1_once,act:11:SIGKILL:simulator")
    monkeypatch.setenv("STOP_AT_CHILDREN", str(tmp_path / "children"))
    return machines(2)


def test_on_one_machine(config: Path, plain: list[dict[str, object]], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    order = (f"runner.output_dir={run_dir}", "cluster.launcher=ray", "cluster.num_threads=2")
    done = embodrl("train", "--config", config, *order)
    assert done.code == 0, done.stderr
    assert metrics(run_dir) == plain


def test_a_signal_saves(config: Path, plain: list[dict[str, object]], tmp_path: Path) -> None:
    """Ray installs a handler of SIGTERM that ends the process."""
    run_dir = tmp_path / "run"
    order = (f"runner.output_dir={run_dir}", "cluster.launcher=ray", "cluster.num_threads=2")
    done = embodrl("train", "--config", config, *order, stop_at="log:4:SIGTERM")
    assert done.code == 143 and "step_3" in done.stdout, done.stderr
    done = embodrl("resume", run_dir)
    assert done.code == 0 and metrics(run_dir) == plain, done.stderr


def test_a_stopped_rollout_process_is_replaced(config: Path, plain: list[dict[str, object]], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = embodrl(
        *("train", "--config", config, f"runner.output_dir={run_dir}", "cluster.launcher=ray"),
        *("cluster.num_threads=2", "cluster.heartbeat_timeout_s=2"),
        stop_at="act:6:SIGSTOP:rank_0_once",
        children=tmp_path / "children",
    )
    assert done.code == 0, done.stderr
    rows = metrics(run_dir)
    assert [row.get("rollout/restarts") for row in rows] == [None, 0, 1, 1, 1]
    assert [without(row) for row in rows] == [without(row) for row in plain]
    log = (run_dir / "logs" / "embodrl.log").read_text()
    assert "restart 1 of 3 of a rollout process: rollout[0] is stopped by a signal (state T)" in log


def test_on_two_machines_with_deaths(
    config: Path, plain: list[dict[str, object]], tmp_path: Path, two_machines: Any
) -> None:
    run_dir = tmp_path / "run"
    ray = ("cluster.launcher=ray", f"cluster.ray_address={two_machines.address}", "cluster.num_nodes=2")
    done = embodrl("train", "--config", config, f"runner.output_dir={run_dir}", *ray, PLACES)
    assert done.code == 0, done.stderr
    rows = metrics(run_dir)
    assert [row.get("rollout/restarts") for row in rows] == [None, 0, 1, 1, 1]
    assert [row.get("env/restarts") for row in rows] == [None, 0, 0, 1, 2]
    assert rows[3]["rollout/lost_episodes"] == 2
    # Until a simulator is killed: the restarted rollout process repeats its episodes bit-exactly.
    assert [without(row) for row in rows[:3]] == [without(row) for row in plain[:3]]
    log = (run_dir / "logs" / "embodrl.log").read_text()
    (other,) = two_machines.worker_nodes
    for machine, node in enumerate((two_machines.head_node, other)):
        assert f"machine {machine} ({node.node_ip_address}) is Ray's node {node.node_id}" in log
    assert "2 rollout process(es), weights by collective" in log
    assert "restart 1 of 3 of a rollout process: rollout[1] has gone" in log


def test_simulators_on_a_machine_without_rollouts(config: Path, tmp_path: Path, machines: Callable[[int], Any]) -> None:
    one = ("cluster.num_threads=2", "env.video.enabled=true")
    places = "cluster.component_placement={actor:0,rollout:0,env:1}"
    beside, apart = tmp_path / "beside", tmp_path / "apart"
    done = embodrl("train", "--config", config, f"runner.output_dir={beside}", *one)
    assert done.code == 0, done.stderr
    ray = ("cluster.launcher=ray", f"cluster.ray_address={machines(2).address}", "cluster.num_nodes=2", places)
    done = embodrl("train", "--config", config, f"runner.output_dir={apart}", *ray, *one)
    assert done.code == 0, done.stderr
    assert metrics(apart) == metrics(beside)
    assert (apart / "logs" / "simulators_0").is_dir()
    films = [sorted(str(path.relative_to(run)) for path in run.rglob("*.mp4")) for run in (beside, apart)]
    assert films[0] and films[0] == films[1]


def test_a_run_moves_to_a_faster_placement(config: Path, tmp_path: Path, machines: Callable[[int], Any]) -> None:
    run_dir = tmp_path / "run"
    done = embodrl(
        *("train", "--config", config, f"runner.output_dir={run_dir}", "runner.eval_interval=0"),
        *("cluster.launcher=ray", f"cluster.ray_address={machines(3).address}", "cluster.num_nodes=3"),
        *("cluster.device=cpu", "actor=fsdp", "cluster.placement=auto", "cluster.training_share=0.01"),
        *("cluster.rebalance=1", "runner.max_staleness=1", "algorithm.decoupled.enabled=true"),
        "algorithm.update_epoch=20",  # training is most of the work on any processor
    )
    assert done.code == 0, done.stderr
    log = (run_dir / "logs" / "embodrl.log").read_text()
    assert "all processes are started again, on another placement" in log
    assert [row["iteration"] for row in metrics(run_dir)] == [0, 1, 2, 3, 4]


def without(row: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if name not in RESTARTS}


@pytest.mark.timeout(600)
def test_a_sweep_spreads_over_machines_and_resumes_after_a_signal(
    config: Path,
    plain: list[dict[str, object]],
    tmp_path: Path,
    machines: Callable[[int], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of the machines has room for one run of two cores."""
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("RAY_ADDRESS", machines(2).address)
    directory = tmp_path / "sweep"
    order = ("--config", config, "runner.seed=0,1", "--backend", "ray", "--ray", "num_cpus=2", "--output", directory)
    running = start("sweep", *order)
    deadline = time.monotonic() + 240
    rows = [directory / f"seed-{seed}" / "metrics.jsonl" for seed in (0, 1)]
    while not all(path.is_file() and path.read_text().count("\n") for path in rows):
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    stopped = running.communicate(timeout=120)
    assert running.returncode == 143, stopped
    assert not all((path.parent / "policy").exists() for path in rows)  # the first one to start may have ended
    done = embodrl("resume", directory)
    assert done.code == 0, done.stderr
    assert plain in [metrics(path.parent) for path in rows]
