"""Processes that live and do not work, and what they leave: found by heartbeat or progress, named, ended."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from expect import raises_code
from runs import TINY, embodrl, metrics
from worker_classes import Trouble

from embodrl.envs.pool.manager import EnvManager
from embodrl.envs.pool.options import EnvTimeouts
from embodrl.errors import EnvTimeout, WorkerDied
from embodrl.processes.child import LOG_BYTES
from embodrl.processes.liveness import Limits
from embodrl.processes.memory import Available, MemoryWatch
from embodrl.processes.restarts import RestartBudget
from embodrl.scheduler.group import WorkerGroup
from embodrl.scheduler.launchers.process import ProcessLauncher

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
START_S, SOON_S = 240.0, 120.0
IMPATIENT = Limits(heartbeat_s=2.0, stall_s=3.0)


@pytest.fixture(scope="module")
def launcher() -> Iterator[ProcessLauncher]:
    found = ProcessLauncher(IMPATIENT)
    yield found
    found.close()


@pytest.fixture
def group(launcher: ProcessLauncher, tmp_path: Path) -> Iterator[WorkerGroup]:
    found = WorkerGroup(Trouble, "trouble").launch(2, launcher, log_dir=tmp_path, timeout_s=START_S)
    yield found
    found.kill()


def gone(pidfd: int) -> bool:
    """Return whether a process ends, by itself, soon."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(SOON_S * 1000))


@pytest.mark.long
def test_a_worker_outlives_signals_that_ask_a_run_to_stop(group: WorkerGroup) -> None:
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
    pids = group.pid().result(SOON_S)
    for number in (*numbers, signal.SIGUSR1, signal.SIGINT):
        os.kill(pids[0], number)
        assert group.pid().result(SOON_S) == pids
    for number in numbers:
        assert group.forked_child_ends_by(int(number)).result(SOON_S) == [True, True]


@pytest.mark.long
def test_a_stopped_worker_fails_the_calls_of_all_ranks_and_is_named(group: WorkerGroup) -> None:
    pids = group.pid().result(SOON_S)
    watched = os.pidfd_open(pids[1])
    handle = group.wait_for_ever()  # as in a collective: rank 0 lives, and waits for rank 1
    os.kill(pids[1], signal.SIGSTOP)
    with raises_code("worker-hung", WorkerDied, "trouble[1]") as caught:
        handle.result(SOON_S)
    assert caught.value.code == "worker-hung" and caught.value.rank == 1
    assert gone(watched)


def test_a_worker_that_holds_the_interpreter_lock_is_named_with_its_stack(group: WorkerGroup) -> None:
    with raises_code("worker-hung", WorkerDied, "trouble[0]") as caught:
        group.hold_the_lock(0).result(SOON_S)
    assert caught.value.code == "worker-hung" and "hold_the_lock" in caught.value.log_tail


@pytest.mark.long
def test_a_worker_that_lives_and_makes_no_progress_is_named_with_its_stack(group: WorkerGroup) -> None:
    with raises_code("worker-hung", WorkerDied) as caught:
        group.wait_for_ever().result(SOON_S)
    assert caught.value.code == "worker-hung" and "wait_for_ever" in caught.value.log_tail


@pytest.mark.long
def test_a_long_call_that_computes_is_let_be(group: WorkerGroup) -> None:
    assert max(group.compute(0, IMPATIENT.stall_s + 1).result(SOON_S)) > 0


def test_what_left_its_session_ends_with_the_worker_and_the_log_is_bounded(group: WorkerGroup, tmp_path: Path) -> None:
    watched = [os.pidfd_open(pid) for pid in group.start_daemon().result(SOON_S)]
    assert group.oom_score_adj().result(SOON_S) == [100, 100]
    group.flood(2 * LOG_BYTES).result(SOON_S)
    group.compute(0, 1.5).result(SOON_S)  # time for a look at the log
    log = (tmp_path / "trouble_0.log").read_text()
    assert len(log) <= LOG_BYTES
    assert log.startswith("the first line") and log.rstrip().endswith("the last line")
    assert "MiB of this log here" in log
    group.kill()
    assert all(gone(pidfd) for pidfd in watched)


def test_a_stopped_simulator_is_found_before_its_time_for_a_step_is_over() -> None:
    timeouts = EnvTimeouts(step_s=600.0, heartbeat_s=2.0)
    with EnvManager("toy", {"num_envs": 1, "image_size": 16}, timeouts=timeouts) as manager:
        manager.reset(np.zeros(1, np.int64), np.zeros(1, np.int32))
        assert manager.pid is not None
        os.kill(manager.pid, signal.SIGSTOP)
        with raises_code("env-timeout", EnvTimeout):
            manager.step(np.zeros((1, 1, manager.spec.action_dim), np.float32))
        assert manager.pid is None


def test_nothing_outlives_a_killed_driver_even_what_hangs_and_was_started_by_a_thread() -> None:
    """Parent-death signals follow the thread, and a thread that sees the end of the connection needs the lock."""
    program = textwrap.dedent("""
        import sys, threading
        sys.path.insert(0, sys.argv[1])
        from worker_classes import Trouble
        from embodrl.scheduler.group import WorkerGroup

        def work():
            group = WorkerGroup(Trouble, "trouble").launch(1, timeout_s=240)
            print(*group.pid().result(), *group.start_daemon().result(), flush=True)
            group.hold_the_lock(0).result()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """)
    driver = subprocess.Popen(
        [sys.executable, "-c", program, str(HELPERS)], stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert driver.stdout is not None
    watched = [os.pidfd_open(int(pid)) for pid in driver.stdout.readline().split()]
    assert len(watched) == 2
    driver.kill()
    driver.wait(SOON_S)
    driver.stdout.close()
    assert all(gone(pidfd) for pidfd in watched)


def test_restarts_count_within_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("embodrl.processes.restarts.time.monotonic", lambda: clock[0])
    budget, granted = RestartBudget(2, window_s=100.0), []
    for clock[0] in (0.0, 50.0, 99.0, 101.0, 120.0, 151.0):
        granted.append(budget.take())
    assert granted == [True, True, False, True, False, True]


def test_the_process_that_takes_the_memory_is_named(group: WorkerGroup) -> None:
    left = [Available(50, 100), Available(5, 100)]
    watch = MemoryWatch(lambda: left.pop(0))
    assert watch.look() == ""
    pids = group.take_memory(1, 64 << 20).result(SOON_S)
    assert f"(process {pids[1]})" in watch.look()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.mark.long
def test_a_run_restarts_a_rollout_process_that_was_stopped(config: Path, tmp_path: Path) -> None:
    run_dir, children = tmp_path / "run", tmp_path / "children"
    done = embodrl(
        *("train", "--config", config, f"runner.output_dir={run_dir}", "cluster.heartbeat_timeout_s=2"),
        "cluster.component_placement={actor:0,rollout:'0:0-1',env:0}",
        stop_at="act:6:SIGSTOP:rank_1_once",
        children=children,
        timeout_s=SOON_S,
    )
    assert done.code == 0, done.stderr
    assert [row.get("rollout/restarts") for row in metrics(run_dir)] == [None, 0, 1, 1, 1]
    assert "rollout[1] is stopped by a signal (state T)" in (run_dir / "logs" / "embodrl.log").read_text()


@pytest.mark.long
def test_a_run_blames_the_trainer_rank_that_was_stopped(config: Path, tmp_path: Path) -> None:
    """Rank 0 waits for it in a collective, and sees its connection end."""
    done = embodrl(
        *("train", "--config", config, f"runner.output_dir={tmp_path / 'run'}", "cluster.heartbeat_timeout_s=2"),
        *("actor.training_backend=fsdp", "actor.max_restarts=0", "cluster.device=cpu"),
        "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}",
        stop_at="fsdp_step:6:SIGSTOP:rank_1",
        timeout_s=SOON_S,
    )
    assert done.code == 1
    assert "actor[1] is stopped by a signal (state T)" in done.stderr and "worker-hung" in done.stderr


@pytest.mark.long
def test_a_signal_ends_a_run_that_waits_for_a_stopped_process(config: Path, tmp_path: Path) -> None:
    children = tmp_path / "children"
    done = embodrl(
        *("train", "--config", config, f"runner.output_dir={tmp_path / 'run'}", "cluster.heartbeat_timeout_s=1000"),
        *("actor.own_process=true", "cluster.stall_timeout_s=1000"),
        stop_at="optimizer_step:10:SIGSTOP:rank_0,optimizer_step:10:SIGTERM:parent_of_0",
        children=children,
        timeout_s=SOON_S,
    )
    assert done.code == 143, done.stderr
    assert "actor[0] is stopped by a signal (state T)" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_every_process_of_a_run_saves(config: Path, tmp_path: Path, number: signal.Signals) -> None:
    """As systemd and schedulers send it; no simulator is lost, so that the resumed run is the undisturbed one."""
    run_dir, children = tmp_path / "run", tmp_path / "children"
    settings = ("actor.own_process=true", "rollout.own_process=true", "runner.save_interval=100")
    done = embodrl(
        *("train", "--config", config, f"runner.output_dir={run_dir}", *settings),
        stop_at=f"act:10:{number.name}:all_of_0",
        children=children,
        timeout_s=SOON_S,
    )
    assert done.code == 128 + number, done.stderr
    assert list((run_dir / "checkpoints").glob("step_*"))
    log = (run_dir / "logs" / "embodrl.log").read_text()
    assert "restart" not in log and "killed by" not in log
    assert embodrl("resume", run_dir, timeout_s=SOON_S).code == 0
    undisturbed = embodrl("train", "--config", config, f"runner.output_dir={tmp_path / 'other'}", *settings)
    assert undisturbed.code == 0 and metrics(run_dir) == metrics(tmp_path / "other")


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("runner.max_staleness=0", "SIGSTOP:rank_0"),
        ("runner.max_staleness=1", "SIGSTOP:rank_0"),
        # It lives, beats, and waits forever: for the end of a simulator that is only stopped.
        ("runner.max_staleness=0", "SIGSTOP:simulator"),
        ("runner.max_staleness=1", "SIGSTOP:simulator"),
    ],
)
def test_a_signal_saves_what_was_trained_while_a_rollout_process_hangs(
    config: Path, tmp_path: Path, mode: str, fault: str
) -> None:
    """The signal comes first, then the process stops."""
    run_dir = tmp_path / "run"
    done = embodrl(
        *("train", "--config", config, f"runner.output_dir={run_dir}", "cluster.heartbeat_timeout_s=1000", mode),
        *("cluster.stall_timeout_s=1000", "rollout.own_process=true", "runner.save_interval=100"),
        stop_at=f"act:10:{fault},act:10:SIGTERM:parent_of_0",
        children=tmp_path / "children",
        timeout_s=SOON_S,
    )
    assert done.code == 143, done.stderr
    log = (run_dir / "logs" / "embodrl.log").read_text()
    assert re.search(r"not restarted, because the run is ending: rollout\[0\] .*; killed", log)
    assert ("in replacement" in log) == (fault != "SIGSTOP:rank_0"), "a stack, unless it is stopped by a signal"
    (saved,) = (run_dir / "checkpoints").glob("step_*")
    assert saved.name in ("step_2", "step_1") and "without saving" not in done.stderr
    resumed = embodrl("resume", run_dir, timeout_s=SOON_S)
    assert resumed.code == 0, resumed.stderr
    assert [row["iteration"] for row in metrics(run_dir)] == [0, 1, 2, 3, 4]


def test_a_worker_that_can_not_allocate_memory_ends_so_that_another_takes_its_place(group: WorkerGroup) -> None:
    with raises_code("worker-died", WorkerDied, "trouble[1]") as caught:
        group.take_memory(1, 1 << 60).result(SOON_S)
    assert "MemoryError" in caught.value.log_tail
