"""Simulator processes that raise, die, hang or return nonsense, and parents that are killed."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from expect import raises_code

from embodrl.envs.pool.manager import EnvManager
from embodrl.envs.pool.options import EnvTimeouts
from embodrl.envs.pool.pool import EnvPool, FaultCounts
from embodrl.envs.stepping import next_seed
from embodrl.errors import EnvRaised, EnvTimeout, EnvWorkerDied
from embodrl.processes.restarts import RestartBudget

SEEDS, TASKS = np.array([20, 21]), np.array([0, 1], np.int32)
ACTIONS = np.full((2, 3, 7), 0.3, np.float32)
HANG_S = 1.5


def faulty(fault, **kwargs):
    options = {"extensions": ["faulty_envs"], "timeouts": EnvTimeouts(step_s=HANG_S if "hang" in fault else 60)}
    return EnvManager("faulty", {"fault": fault, **kwargs}, name=f"train/{fault}", **options)


def faulty_pool(fault, marker, **kwargs):
    """Two processes of two environments; the first process to reach its second chunk has the fault, once."""
    options = {"extensions": ["faulty_envs"], "timeouts": EnvTimeouts(step_s=HANG_S if "hang" in fault else 60)}
    shards = [{"fault": fault, "at_step": 2, "marker": str(marker)}, {"fault": "none"}]
    options["max_restarts"] = 10
    return EnvPool.create("faulty", kwargs, total_num_envs=4, num_processes=2, shard_kwargs=shards, **options)


def is_gone(pid):
    """Whether the process has ended; one that only waits to be reaped (by whatever is process 1 here) has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pids, deadline_s=20.0):
    deadline = time.monotonic() + deadline_s
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if not is_gone(pid)]}"
        time.sleep(0.01)


def test_an_exception_in_a_step_leaves_the_process_usable():
    with faulty("raise") as manager:
        manager.reset(SEEDS, TASKS)
        with raises_code("env-raised", EnvRaised, "contact solver diverged") as raised:
            manager.step(ACTIONS)
        assert "faulty_envs.py" in str(raised.value) and "seeds 20, 21" in str(raised.value)
        assert manager.step(ACTIONS).valid.any()


@pytest.mark.parametrize(
    ("fault", "end"),
    [
        ("kill", "SIGKILL"),
        ("exit", "code 7"),
        ("segfault", "SIGSEGV"),
        ("fork_and_exit", "code 3"),
        ("memory", "memory"),
    ],
)
def test_a_dead_process_is_named_with_its_end(fault, end):
    with faulty(fault) as manager:
        manager.reset(SEEDS, TASKS)
        pid = manager.pid
        with raises_code("env-worker-died", EnvWorkerDied, end) as died:
            manager.step(ACTIONS)
        message = str(died.value)
        assert f"train/{fault}" in message and "envs 0-1" in message and "during STEP" in message
        assert is_gone(pid) and manager.pid is None
        if fault == "exit":
            assert "lost the device" in message
            assert re.search(r"os\._exit\(7\) was called in .*faulty_envs\.py:\d+ in chunk_step", message)
        if fault == "segfault":
            assert "faulty_envs.py" in message  # the interpreter's own dump, from the log


@pytest.mark.parametrize(("fault", "name"), [("system_exit", "SystemExit"), ("cancelled", "CancelledError")])
def test_what_a_step_raises_and_is_no_exception_is_an_error_that_names_the_line(fault, name):
    with faulty(fault) as manager:
        manager.reset(SEEDS, TASKS)
        with raises_code("env-raised", EnvRaised) as raised:
            manager.step(ACTIONS)
        message = raised.value.message
        assert f"{name} during STEP: 4" in message and "faulty_envs.py" in message and "in chunk_step" in message
        assert manager.step(ACTIONS).valid.any()


def test_a_process_that_outlives_its_kill_is_a_timeout_that_leaves_nothing_open(monkeypatch):
    with faulty("none") as manager:
        popen, before = manager.process.child._popen, set(Path("/proc/self/fd").iterdir())

        wait_in_earnest = popen.wait

        def wait(timeout=None):
            if timeout is None:  # the thread that reaps what ends late
                return wait_in_earnest()
            raise subprocess.TimeoutExpired("simulator", timeout)

        monkeypatch.setattr(popen, "wait", wait)
        with raises_code("env-timeout", EnvTimeout, popen.pid, "10 s"):
            manager.process.drop()
        assert len(set(Path("/proc/self/fd").iterdir())) <= len(before) - 4  # socket, log, memory file, pidfd
        monkeypatch.undo()
        wait_until_gone([popen.pid])


def test_restarts_of_several_threads_add_up_to_the_limit_and_no_further():
    faults, budget, granted = FaultCounts(), RestartBudget(3000), []

    def restart_often():
        allowed = sum(budget.take() for _ in range(1000))
        for _ in range(allowed):
            faults.count("restarts")
        granted.append(allowed)

    threads = [threading.Thread(target=restart_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults.restarts == sum(granted) == 3000


@pytest.mark.parametrize("fault", ["hang", "hang_in_native_code"])
def test_a_hang_times_out_and_shows_where(fault):
    with faulty(fault) as manager:
        manager.reset(SEEDS, TASKS)
        pid = manager.pid
        with raises_code("env-timeout", EnvTimeout, "1.5", "STEP") as hung:
            manager.step(ACTIONS)
        assert is_gone(pid)
        assert "faulty_envs.py" in str(hung.value) and "chunk_step" in str(hung.value)
        manager.restart()
        manager.reset(SEEDS, TASKS)


def test_a_build_that_fails_says_why():
    with raises_code("env-raised", EnvRaised, "no licence for the simulator"):
        faulty("build").start()


def test_an_interpreter_that_ends_at_once_is_reported_with_its_words(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho libpython is missing >&2\nexit 127\n")
    python.chmod(0o755)
    with raises_code("env-worker-died", EnvWorkerDied, 127, "START", "libpython is missing"):
        EnvManager("toy", python=str(python)).start()


@pytest.mark.parametrize(("fault", "name"), [("long_instruction", "1000 bytes"), ("wrong_shape", "images")])
def test_results_that_do_not_fit_are_refused(fault, name):
    with faulty(fault) as manager:
        manager.reset(SEEDS, TASKS)
        with raises_code("env-step-result", EnvRaised, name):
            manager.step(ACTIONS)
        assert manager.step(ACTIONS).valid.any()


def test_what_a_simulator_started_ends_with_it():
    manager = faulty("none")
    manager.start()
    helpers = [manager.call("spawn_helper", {"own_session": own}) for own in (False, True)]
    manager.close()
    wait_until_gone(helpers)


@pytest.mark.parametrize("fault", ["kill", "hang", "raise"])
def test_a_pool_restarts_the_shard_and_keeps_the_others(fault, tmp_path):
    with faulty_pool(fault, tmp_path / "fired") as pool:
        start = pool.reset(np.arange(4), np.zeros(4, np.int32), copy=True)
        actions = np.concatenate([ACTIONS, ACTIONS])
        pids = [manager.pid for manager in pool.managers]
        good = pool.step(actions, copy=True)
        step = pool.step(actions, np.array([True, False, True, True]), copy=True)
        assert (pool.faults.restarts, pool.faults.lost_episodes) == (1, 1)
        np.testing.assert_array_equal(step.valid.all(axis=1), [False, False, True, True])
        assert not step.valid[:2].any() and not step.reward[:2].any()
        np.testing.assert_array_equal(step.done, [True, False, False, False])
        assert step.truncated[0, 0] and step.final_mask.tolist() == [True, False, False, False]
        np.testing.assert_array_equal(step.final_observation.images[0], good.observation.images[0])
        np.testing.assert_array_equal(step.observation.images[:2], start.images[:2])
        assert pool.managers[0].pid != pids[0] and pool.managers[1].pid == pids[1]
        assert pool.step(actions).valid.all()
        assert pool.faults.restarts == 1


def test_death_between_steps_is_survived(tmp_path):
    with faulty_pool("none", tmp_path / "fired") as pool:
        pool.reset(np.arange(4), np.zeros(4, np.int32))
        actions = np.concatenate([ACTIONS, ACTIONS])
        pid = pool.managers[1].pid
        os.kill(pid, signal.SIGKILL)
        wait_until_gone([pid])
        assert pool.step(actions).valid.any(axis=1).tolist() == [True, True, False, False]
        pid = pool.managers[0].pid
        os.kill(pid, signal.SIGKILL)
        wait_until_gone([pid])
        pool.reset(np.arange(4), np.zeros(4, np.int32))
        assert pool.faults.restarts == 2
        assert pool.step(actions).valid.all()


@pytest.mark.parametrize("death", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_a_request_between_episodes_survives_a_process_that_is_lost(death, tmp_path):
    options = {"extensions": ["faulty_envs"], "timeouts": EnvTimeouts(reset_s=5.0)}
    with EnvPool.create("faulty", {"fault": "none"}, total_num_envs=4, num_processes=2, **options) as pool:
        first = pool.reset(np.arange(4), np.zeros(4, np.int32), copy=True)
        lost = pool.managers[0].pid
        os.kill(lost, death)
        assert pool.call("mark", restart=True) == [None, None]
        assert pool.faults.restarts == 1
        wait_until_gone([lost])
        os.kill(pool.managers[1].pid, death)
        assert all(isinstance(state, bytes) for state in pool.get_state(restart=True))
        assert pool.faults.restarts == 2
        again = pool.reset(np.arange(4), np.zeros(4, np.int32))
        np.testing.assert_array_equal(again.images, first.images)


def test_a_request_within_an_episode_does_not_hide_that_it_is_lost(tmp_path):
    with faulty_pool("none", tmp_path / "fired") as pool:
        pool.reset(np.arange(4), np.zeros(4, np.int32))
        pid = pool.managers[0].pid
        os.kill(pid, signal.SIGKILL)
        wait_until_gone([pid])
        with pytest.raises(EnvWorkerDied):
            pool.call("mark")
        assert pool.faults.restarts == 0


def test_a_restarted_process_gets_the_requests_of_the_one_before(tmp_path):
    with faulty_pool("kill", tmp_path / "fired", max_episode_steps=6) as pool:
        pool.reset(np.arange(4), np.zeros(4, np.int32))
        pool.call("set_auto_reset", {"value": False})
        actions = np.zeros((4, 3, 7), np.float32)
        pool.step(actions)
        assert not pool.step(actions).valid[:2].any() and pool.faults.restarts == 1
        pool.step(actions)
        ended = pool.step(actions, copy=True)  # the sixth step of the new episodes
        assert ended.done[:2].all()
        np.testing.assert_array_equal(ended.observation.images[:2], ended.final_observation.images[:2])


def test_a_request_that_finds_its_process_dead_leaves_the_others_in_order(tmp_path):
    with faulty_pool("none", tmp_path / "fired") as pool:
        pool.reset(np.arange(4), np.zeros(4, np.int32))
        pid = pool.managers[0].pid
        os.kill(pid, signal.SIGKILL)
        wait_until_gone([pid])
        for _ in range(2):
            with pytest.raises(EnvWorkerDied):
                pool.call("expert_actions")
        first = pool.reset(np.arange(10, 14), np.ones(4, np.int32), copy=True)  # not to the seeds that it had
        assert pool.faults.restarts == 1 and pool.faults.lost_episodes == 0
        np.testing.assert_array_equal(pool.reset(np.arange(10, 14), np.ones(4, np.int32)).images, first.images)
        pid = pool.managers[1].pid
        os.kill(pid, signal.SIGKILL)
        wait_until_gone([pid])
        with pytest.raises(EnvWorkerDied):
            pool.call_one(1, "expert_actions")
        step = pool.step(np.zeros((4, 3, 7), np.float32))
        assert step.valid.any(axis=1).tolist() == [True, True, False, False]
        assert pool.faults.restarts == 2 and pool.faults.lost_episodes == 2


def test_the_memory_of_a_lost_process_is_freed_at_once(tmp_path):
    def mapped():
        maps = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[4] for line in maps if "memfd:embodrl-env" in line}

    gc.collect()
    before = mapped()
    gc.disable()  # errors and frames that hold one another would wait for it
    try:
        with faulty_pool("raise", tmp_path / "fired") as pool:
            pool.reset(np.arange(4), np.zeros(4, np.int32))
            actions = np.zeros((4, 3, 7), np.float32)
            for number in range(4):
                os.kill(pool.managers[number % 2].pid, signal.SIGKILL)
                for _ in range(3):
                    pool.step(actions)
                assert len(mapped() - before) == 2
            assert pool.faults.restarts >= 4
    finally:
        gc.enable()


def test_experts_that_return_something_else_are_named(tmp_path, monkeypatch):
    with faulty_pool("none", tmp_path / "fired") as pool:
        pool.reset(np.arange(4), np.zeros(4, np.int32))
        assert pool.expert_actions().shape == (4, 7) and pool.expert_actions().dtype == np.float32
        monkeypatch.setattr(pool, "call", lambda method: [np.zeros((2, 7)), [1, 2]])
        with raises_code("env-raised", EnvRaised) as raised:
            pool.expert_actions()
        assert "expert_actions() returned list, not floats [2, 7]" in raised.value.message


def test_a_state_that_is_not_bytes_is_refused_where_it_is_made():
    with faulty("state") as manager:
        manager.reset(SEEDS, TASKS)
        with raises_code("env-state-type", EnvRaised) as raised:
            manager.get_state()
        assert "get_state() of FaultyVectorEnv returned dict, not bytes" in raised.value.message
        assert manager.step(ACTIONS).valid.any()


def test_a_request_that_raises_is_not_repeated(tmp_path):
    with faulty_pool("none", tmp_path / "fired") as pool:
        pool.reset(np.arange(4), np.zeros(4, np.int32))
        with pytest.raises(EnvRaised):
            pool.call("no_such_request", restart=True)
        assert pool.faults.restarts == 0


def test_faults_that_go_on_stop_with_the_cause():
    managers = [EnvManager("faulty", {"fault": "exit"}, extensions=["faulty_envs"])]
    with EnvPool(managers, max_restarts=2) as pool:
        pool.reset(SEEDS, TASKS)
        for _ in range(2):
            assert not pool.step(ACTIONS).valid.any()
        with raises_code("env-worker-died", EnvWorkerDied, 2, "lost the device"):
            pool.step(ACTIONS)
        assert pool.faults.restarts == 2


@pytest.mark.parametrize("fault", ["reset", "raise"])
def test_an_exception_before_any_chunk_has_worked_ends_the_run_with_one_short_traceback(fault):
    managers = [EnvManager("faulty", {"fault": fault}, extensions=["faulty_envs"])]
    with EnvPool(managers, max_restarts=10) as pool:
        with pytest.raises(EnvRaised) as raised:
            pool.reset(SEEDS, TASKS)
            pool.step(ACTIONS)
        assert pool.faults.restarts == 0
    message = raised.value.message
    assert "faulty_envs.py" in message and "worker_main" not in message
    assert message.count("File ") == 1 and len(message.splitlines()) <= 4
    assert raised.value.hint.startswith("fix the simulator code")


def test_an_exception_after_a_chunk_that_worked_is_a_fault_to_recover_from(tmp_path):
    kwargs = {"fault": "raise", "at_step": 2, "marker": str(tmp_path / "fired")}
    with EnvPool([EnvManager("faulty", kwargs, extensions=["faulty_envs"])], max_restarts=1) as pool:
        pool.reset(SEEDS, TASKS)
        assert pool.step(ACTIONS).valid.any()
        assert not pool.step(ACTIONS).valid.any()
        assert pool.faults.restarts == 1


def test_actions_that_are_not_finite_are_the_policys_fault():
    with EnvPool([EnvManager("toy", {"num_envs": 2, "image_size": 8})]) as pool:
        pool.reset(SEEDS, TASKS)
        actions = ACTIONS.copy()
        actions[1, 0, 0] = np.nan
        with raises_code("actions-not-finite") as raised:
            pool.step(actions)
        assert "the policy returned non-finite actions for environments 1" in str(raised.value)
        # The actions of an environment that is not stepped may be anything.
        assert pool.step(actions, np.array([True, False])).valid[0].any()


def test_a_planned_error_of_a_simulator_has_no_traceback():
    with pytest.raises(EnvRaised) as raised:
        EnvManager("tooy").start()
    assert "did you mean 'toy'" in str(raised.value)
    assert "File " not in raised.value.message and "Traceback" not in raised.value.message


@pytest.mark.parametrize("fault", ["nan_reward", "nan_state"])
def test_what_is_not_finite_is_quarantined(fault, tmp_path):
    with faulty_pool(fault, tmp_path / "fired", include_state=True) as pool:
        start = pool.reset(np.arange(4), np.zeros(4, np.int32), copy=True)
        actions = np.concatenate([ACTIONS, ACTIONS])
        good = pool.step(actions, copy=True)
        step = pool.step(actions)
        assert (pool.faults.quarantined, pool.faults.lost_episodes, pool.faults.restarts) == (1, 1, 0)
        assert np.isfinite(step.reward).all() and np.isfinite(step.observation.state).all()
        assert step.valid.any(axis=1).tolist() == [True, False, True, True]
        assert step.done.tolist() == [False, True, False, False]
        np.testing.assert_array_equal(step.final_observation.state[1], good.observation.state[1])
        np.testing.assert_array_equal(step.observation.state[1], start.state[1])
        assert pool.step(actions).valid.all()


def test_a_crash_after_an_auto_reset_names_the_seeds_that_are_played_and_plays_them_again(tmp_path, caplog):
    with faulty_pool("kill", tmp_path / "fired", max_episode_steps=3) as pool:
        pool.reset(np.arange(4), np.zeros(4, np.int32))
        actions = np.zeros((4, 3, 7), np.float32)
        actions[1] = 0.3
        first = pool.step(actions, copy=True)
        assert first.done.all() and first.episode_seed.tolist() == [0, 1, 2, 3]
        seeds = [next_seed(seed) for seed in range(4)]
        assert [manager.episodes.seeds.tolist() for manager in pool.managers] == [seeds[:2], seeds[2:]]
        step = pool.step(actions, copy=True)
        assert not step.valid[:2].any() and step.episode_seed.tolist() == seeds
        assert f"seeds {seeds[0]}, {seeds[1]})" in caplog.text and "seeds 0, 1)" not in caplog.text
        np.testing.assert_array_equal(step.observation.images[:2], first.observation.images[:2])
        again = pool.step(actions)
        assert again.valid.all() and again.episode_seed[:2].tolist() == seeds[:2]


def test_seeds_stay_where_episodes_are_not_followed_by_others(tmp_path):
    with faulty_pool("none", tmp_path / "fired", max_episode_steps=3) as pool:
        pool.call("set_auto_reset", {"value": False})
        pool.reset(np.arange(4), np.zeros(4, np.int32))
        assert pool.step(np.zeros((4, 3, 7), np.float32)).done.all()
        assert [manager.episodes.seeds.tolist() for manager in pool.managers] == [[0, 1], [2, 3]]
        os.kill(pool.managers[0].pid, signal.SIGKILL)
        pool.reset(np.arange(4), np.zeros(4, np.int32))  # a restarted process is reported again
        assert pool.step(np.zeros((4, 3, 7), np.float32)).done.all()
        assert [manager.episodes.seeds.tolist() for manager in pool.managers] == [[0, 1], [2, 3]]


PARENT = """
import sys, threading, numpy as np
from embodrl.envs.pool.manager import EnvManager
def start():
    manager = EnvManager("faulty", {"fault": sys.argv[1]}, extensions=["faulty_envs"])
    manager.start()
    manager.reset(np.array([1, 2]), np.array([0, 0]))
    if sys.argv[1] != "none":
        manager.step_async(np.zeros((2, 1, 7), np.float32))
    managers.append(manager)
managers = []
if sys.argv[2] == "thread":
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
else:
    start()
print(managers[0].pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("fault", "where"), [("none", "main"), ("hang_in_native_code", "main"), ("hang", "thread"), ("none", "thread")]
)
def test_no_orphan_survives_a_killed_parent(fault, where):
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, fault, where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
    )
    with parent:
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        parent.kill()
    wait_until_gone([pid])


def test_signals_that_ask_to_stop_are_left_to_the_parent():
    with faulty("none") as manager:
        manager.reset(SEEDS, TASKS)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(manager.pid, number)
            assert manager.step(ACTIONS).valid.any()
