"""Workers that die, raise or hang, and killed drivers: reported within seconds, and no process is left."""

import os
import select
import signal
import threading
from pathlib import Path

import pytest
from expect import raises_code
from worker_classes import Talker, Trouble

from embodrl.deployment import ProcessPlace
from embodrl.errors import WorkerDied, WorkerTimeout
from embodrl.processes.liveness import Limits
from embodrl.scheduler.group import WorkerGroup, wait_all
from embodrl.scheduler.launchers.process import ProcessLauncher

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
START_S, SOON_S = 240.0, 60.0


@pytest.fixture
def group():
    found = WorkerGroup(Trouble, "trouble").launch(2, timeout_s=START_S)
    yield found
    found.kill()


def gone(pidfd):
    """Whether a process ends, by itself, soon."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(SOON_S * 1000))


def watch(pids):
    return [os.pidfd_open(pid) for pid in pids]


def test_a_killed_worker_is_reported_with_rank_and_last_words(group):
    handle = group.kill_yourself(1)
    with raises_code("worker-died", WorkerDied, "trouble[1]", "SIGKILL") as caught:
        handle.result(SOON_S)
    assert caught.value.rank == 1 and "these are my last words" in caught.value.log_tail
    with raises_code("worker-died", WorkerDied, "SIGKILL"):
        group.pid()
    with pytest.raises(WorkerDied):
        group.check()


def test_a_crash_in_native_code_shows_the_stack(group):
    with raises_code("worker-died", WorkerDied, "SIGSEGV") as caught:
        group.kill_yourself(0, int(signal.SIGSEGV)).result(SOON_S)
    assert "kill_yourself" in caught.value.log_tail


def test_a_death_from_outside_fails_calls_of_all_ranks(group):
    pids = group.pid().result(SOON_S)
    handle = group.wait_for_ever()
    os.kill(pids[1], signal.SIGKILL)
    with raises_code("worker-died", WorkerDied, "trouble[1]"):
        handle.result(SOON_S)
    assert handle.done  # rank 0 lives and waits, but nothing waits for it


def test_a_hang_names_the_rank_and_the_line(group):
    with raises_code("worker-timeout", WorkerTimeout, "0", "1") as caught:
        group.wait_for_ever().result(0.5)
    assert "wait_for_ever" in caught.value.log_tail


def test_a_death_in_one_group_ends_waiting_for_another():
    launcher = ProcessLauncher()
    channel = launcher.channel("numbers")
    sink = WorkerGroup(Talker, "sink").launch(1, launcher, {"numbers": channel}, timeout_s=START_S)
    source = WorkerGroup(Trouble, "source").launch(1, launcher, timeout_s=START_S)
    try:
        with raises_code("worker-died", WorkerDied, "source[0]"):
            wait_all([sink.consume(1), source.kill_yourself(0)], SOON_S)
    finally:
        sink.kill()
        source.kill()
        launcher.close()


def test_closing_ends_even_those_that_hang(group):
    watched = watch(group.pid().result(SOON_S))
    group.wait_for_ever()
    group.close(grace_s=0.1)
    assert all(gone(pidfd) for pidfd in watched)
    with raises_code("group-order"):
        group.pid()


def test_what_a_worker_started_ends_with_it(group):
    watched = watch(group.start_child().result(SOON_S))
    group.kill()
    assert all(gone(pidfd) for pidfd in watched)


def test_a_restart_after_a_death(group):
    pids = group.pid().result(SOON_S)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        while True:  # until its death is known
            group.pid().result(SOON_S)
    group.restart(1, START_S)
    found = group.pid().result(SOON_S)
    assert found[0] == pids[0] and found[1] not in pids


def test_a_dead_ray_actor_is_reported_with_rank_and_last_words():
    pytest.importorskip("ray", reason="Ray is not installed (extra: ray)")
    from embodrl.scheduler.launchers.ray.launcher import RayLauncher

    places = [ProcessPlace("trouble", rank) for rank in range(2)]
    launcher = RayLauncher(places, timeout_s=120, num_cpus=2)
    group = WorkerGroup(Trouble, "trouble").launch(places, launcher, timeout_s=START_S)
    try:
        with raises_code("worker-died", WorkerDied, "trouble[1]") as caught:
            group.kill_yourself(1).result(SOON_S)
        assert caught.value.rank == 1 and "these are my last words" in caught.value.log_tail
        with raises_code("ray-resources"):
            RayLauncher([ProcessPlace("more", rank) for rank in range(9)], timeout_s=0.5)
    finally:
        group.kill()
        launcher.close()


def test_a_ray_actor_that_is_stopped_or_hangs_is_reported_and_replaced():
    pytest.importorskip("ray", reason="Ray is not installed (extra: ray)")
    from embodrl.scheduler.launchers.ray.launcher import RayLauncher

    places = [ProcessPlace("trouble", rank) for rank in range(2)]
    launcher = RayLauncher(places, timeout_s=120, limits=Limits(heartbeat_s=2.0, stall_s=3.0), num_cpus=2)
    group = WorkerGroup(Trouble, "trouble", independent=True).launch(places, launcher, timeout_s=START_S)
    try:
        assert group.call_on(0, "compute", 0, 4.0).result(SOON_S) > 0, "it computes"
        (watched,) = watch([group.call_on(1, "pid").result(SOON_S)])
        waits = group.call_on(1, "wait_for_ever")
        signal.pidfd_send_signal(watched, signal.SIGSTOP)
        with raises_code("worker-hung", WorkerDied, "trouble[1]", "state T") as caught:
            waits.result(SOON_S)
        assert isinstance(caught.value, WorkerDied) and caught.value.rank == 1 and gone(watched)
        with raises_code("worker-hung", WorkerDied):
            group.call_on(1, "pid").result(SOON_S)
        group.restart(1, START_S)
        for request in ("hold_the_lock", "wait_for_ever"):
            with raises_code("worker-hung", WorkerDied, "trouble[1]") as caught:
                group.call_on(1, request, *((1,) if request == "hold_the_lock" else ())).result(SOON_S)
            assert isinstance(caught.value, WorkerDied) and request in caught.value.log_tail, "its stack"
            group.restart(1, START_S)
        assert group.call_on(1, "pid").result(SOON_S) > 0
    finally:
        group.kill()
        launcher.close()


def test_workers_live_on_when_the_thread_that_started_them_ends():
    found = []
    thread = threading.Thread(target=lambda: found.append(WorkerGroup(Trouble, "t").launch(1, timeout_s=START_S)))
    thread.start()
    thread.join()
    (group,) = found
    try:
        assert len(group.pid().result(SOON_S)) == 1
    finally:
        group.kill()


def test_a_class_of_the_program_itself_is_refused():
    local = type("Local", (Trouble,), {"__module__": "__main__"})
    with raises_code("worker-class"):
        WorkerGroup(local, "local").launch(1)
