"""EnvManager and EnvPool with real processes, on the toy environment."""

import os
import signal
import threading
import venv
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from expect import raises_code

from embodrl.envs.pool.manager import EnvManager
from embodrl.envs.pool.pool import EnvPool
from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.errors import CheckpointError, EnvError, EnvRaised
from embodrl.processes.frames import Kind
from embodrl.processes.traffic import totals
from embodrl.types import EnvStep, Observation

KWARGS = {"num_envs": 3, "image_size": 16, "max_episode_steps": 7, "include_state": True}
SEEDS, TASKS = np.array([10, 11, 12]), np.array([0, 1, 0], np.int32)


def actions_of(step: int, num_envs: int = 3, chunk: int = 4) -> np.ndarray:
    return np.random.default_rng(step).uniform(-1, 1, (num_envs, chunk, 7)).astype(np.float32)


def assert_same_observation(left: Observation, right: Observation, rows: np.ndarray | slice = slice(None)) -> None:
    np.testing.assert_array_equal(left.images[rows], right.images[rows])
    np.testing.assert_array_equal(left.state[rows], right.state[rows])
    np.testing.assert_array_equal(left.task_id[rows], right.task_id[rows])
    assert np.array(left.instruction)[rows].tolist() == np.array(right.instruction)[rows].tolist()


def assert_same_step(left: EnvStep, right: EnvStep) -> None:
    assert_same_observation(left.observation, right.observation)
    for name in ("reward", "valid", "terminated", "truncated", "success", "episode_return", "episode_length"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
    np.testing.assert_array_equal(left.episode_seed, right.episode_seed)
    np.testing.assert_array_equal(left.final_mask, right.final_mask)
    if left.final_mask.any():
        assert_same_observation(left.final_observation, right.final_observation, left.final_mask)


def test_a_process_gives_what_the_environment_gives():
    local = ToyVectorEnv(**KWARGS)
    with EnvManager("toy", KWARGS) as manager:
        assert manager.spec == local.spec
        assert_same_observation(manager.reset(SEEDS, TASKS), local.reset(SEEDS, TASKS, np.arange(3)))
        truncations = 0
        for number in range(12):
            chunk = 1 + number % 5
            active = np.array([True, number % 2 == 0, True])
            step = manager.step(actions_of(number, chunk=chunk), active)
            assert step.reward.shape == (3, chunk)
            assert_same_step(step, local.chunk_step(actions_of(number, chunk=chunk), active))
            truncations += step.final_mask.sum()
        assert truncations > 0
        some = manager.reset(np.array([99]), np.array([1], np.int32), np.array([2]))
        assert_same_observation(some, local.reset(np.array([99]), np.array([1], np.int32), np.array([2])))


def test_the_bytes_of_actions_and_results_are_counted():
    frame, environments, chunk = 33, 2, 3  # of a frame, its header
    with EnvManager("toy", {"num_envs": environments, "image_size": 16}) as manager:
        manager.reset(np.arange(2), np.zeros(2, np.int32))
        before = totals()["env"]
        manager.step(actions_of(0, environments, chunk))
        after = totals()["env"]
        per_action, per_chunk = 4 + 3 * 1, 1 + 4 + 4 + 8  # reward, three flags; success, return, length, seed
        observation = 16 * 16 * 3 + 512 + 4 + 4  # image, instruction and its length, task
        result = observation + manager.spec.max_chunk * per_action + per_chunk
    assert after.sent - before.sent == frame + environments * chunk * 7 * 4
    assert after.received - before.received == frame + environments * result


def test_views_live_until_the_next_but_one_result():
    with EnvManager("toy", KWARGS | {"auto_reset": False}, debug=True) as manager:
        manager.reset(SEEDS, TASKS)
        first = manager.step(actions_of(0))
        before = first.observation.state.copy()
        kept = manager.step(actions_of(1), copy=True)
        np.testing.assert_array_equal(first.observation.state, before)
        manager.step_async(actions_of(2))
        assert kept.observation.state.flags.owndata
        third = manager.wait()
        assert np.shares_memory(third.observation.state, first.observation.state)
        assert not np.array_equal(kept.observation.state, third.observation.state)


def test_a_large_state_passes():
    with EnvManager("toy", {"num_envs": 30_000, "image_size": 2}) as manager:
        seeds = np.arange(30_000)
        manager.reset(seeds, np.zeros(30_000, np.int32))
        state = manager.get_state()
        assert len(state) > 1_000_000
        manager.set_state(state)
        assert manager.get_state() == state


def test_call_takes_and_returns_arrays():
    with EnvManager("toy", KWARGS) as manager:
        manager.reset(SEEDS, TASKS)
        expert = manager.call("expert_actions")
        assert expert.shape == (3, 7) and expert.dtype == np.float32
        with raises_code("message"):
            manager.call("expert_actions", {"function": print})


def test_an_error_of_embodrl_keeps_its_class_hint_and_code_across_processes():
    with raises_code("unknown-name", EnvRaised) as raised:
        EnvManager("no-such-simulator").start()
    assert "unknown environment 'no-such-simulator'" in raised.value.message and "File " not in raised.value.message


def test_a_planned_error_needs_no_traceback_and_the_process_continues():
    with EnvManager("toy", KWARGS, name="train/0", first_env=6) as manager:
        manager.reset(SEEDS, TASKS)
        pid = manager.pid
        with pytest.raises(EnvRaised) as raised:
            manager.call("no_such_method")
        message = str(raised.value)
        assert "train/0" in message and "envs 6-8" in message and "seeds 10, 11, 12" in message
        assert "reach-green, reach-red" in message
        assert "Traceback" not in message  # one of embodrl's own, whose message says enough
        assert "expert_actions" in message  # what it could have been
        assert manager.step(actions_of(0)).valid.any() and manager.pid == pid


def test_an_unknown_environment_or_argument_fails_at_start():
    with raises_code("unknown-name", EnvRaised, "'toy'"):
        EnvManager("toyy").start()
    manager = EnvManager("toy", {"num_envs": 2, "colour": "blue"})
    with raises_code("env-raised", EnvRaised, "colour"):
        manager.start()
    assert manager.pid is None


def test_wrong_use_is_refused_with_words():
    manager = EnvManager("toy", KWARGS)
    with raises_code("env-order", EnvError):
        manager.reset(SEEDS, TASKS)
    with manager:
        with raises_code("actions-shape", EnvError, "[3, 9, 7]", "[3, 1 to 8, 7]"):
            manager.step_async(np.zeros((3, 9, 7), np.float32))
        with raises_code("actions-shape", EnvError, "[3, 2, 6]"):
            manager.step_async(np.zeros((3, 2, 6), np.float32))
        with raises_code("env-reset", EnvError, "3"):
            manager.reset_async(SEEDS[:2], TASKS)
        with raises_code("env-reset", EnvError):
            manager.reset_async(SEEDS[:2], TASKS[:2], np.array([1, 1]))
        with raises_code("env-reset", EnvError):
            manager.reset_async(SEEDS, TASKS + 1)
        with raises_code("env-order", EnvError, "STEP"):
            manager.wait()
        manager.reset_async(SEEDS, TASKS)
        with raises_code("env-order", EnvError, "RESET"):
            manager.step_async(actions_of(0))
        manager.wait_reset()
        with raises_code("env-order", EnvError):
            manager.start()
    manager.close()


def test_cpu_binding_thread_limits_and_memory():
    cpu = max(os.sched_getaffinity(0))
    with EnvManager("toy", KWARGS, cpu=cpu, environ={"EMBODRL_TEST": "1"}) as manager:
        assert os.sched_getaffinity(manager.pid) == {cpu}
        environ = Path(f"/proc/{manager.pid}/environ").read_bytes().split(b"\0")
        assert {b"OMP_NUM_THREADS=1", b"LP_NUM_THREADS=1", b"EMBODRL_TEST=1"} <= set(environ)
        maps = Path(f"/proc/{manager.pid}/maps").read_text()
        assert "memfd:embodrl-env" in maps and "/dev/shm" not in maps
        assert "torch" not in maps
    unusable = max(os.sched_getaffinity(0)) + 4096
    with raises_code("cpu-unavailable", EnvRaised, f"CPU {unusable}"):
        EnvManager("toy", KWARGS, cpu=unusable).start()


def test_max_chunk_can_be_widened():
    with EnvManager("toy", KWARGS, max_chunk=20) as manager:
        manager.reset(SEEDS, TASKS)
        assert manager.step(actions_of(0, chunk=20)).reward.shape == (3, 20)


def test_a_manager_started_in_a_thread_outlives_the_thread():
    manager = EnvManager("toy", KWARGS)
    thread = threading.Thread(target=manager.start)
    thread.start()
    thread.join()
    manager.reset(SEEDS, TASKS)
    assert manager.step(actions_of(0)).valid.any()
    manager.close()


def test_another_interpreter_needs_numpy_only(tmp_path):
    venv.create(tmp_path / "sim", symlinks=True, with_pip=False)
    packages = next((tmp_path / "sim").glob("lib/python*/site-packages"))
    numpy_path = Path(np.__file__).parent
    for path in [numpy_path, *numpy_path.parent.glob("numpy.libs")]:
        (packages / path.name).symlink_to(path)
    python = tmp_path / "sim/bin/python"
    with EnvManager("toy", KWARGS, python=str(python)) as manager, EnvManager("toy", KWARGS) as twin:
        assert Path(f"/proc/{manager.pid}/cmdline").read_bytes().startswith(str(python).encode() + b"\0")
        assert_same_observation(manager.reset(SEEDS, TASKS), twin.reset(SEEDS, TASKS))
        assert_same_step(manager.step(actions_of(0)), twin.step(actions_of(0)))
    with raises_code("python-not-runnable", EnvError, "no-such-python"):
        EnvManager("toy", KWARGS, python="/no-such-python").start()


def test_log_file(tmp_path):
    with EnvManager("toy", KWARGS, name="train/0", log_dir=tmp_path / "logs"):
        pass
    assert (tmp_path / "logs/train_0.log").exists()


def test_stages_step_on_their_own_and_offload_together():
    kwargs = {"image_size": 16, "max_episode_steps": 7}
    with EnvPool.create("toy", kwargs, total_num_envs=4, num_processes=2) as pool:
        first, second = pool.split(2)
        assert [stage.spec.num_envs for stage in (first, second)] == [2, 2]
        first.reset(np.array([0, 1]), np.zeros(2, np.int32))
        second.reset(np.array([2, 3]), np.zeros(2, np.int32))
        first.step_async(actions_of(0, 2))
        second.step_async(actions_of(1, 2))
        assert second.wait().valid.any() and first.wait().valid.any()
        states = pool.get_state()
        expected = [stage.step(actions_of(2, 2), copy=True) for stage in (first, second)]
        pool.set_state(states)
        pool.offload()
        assert all(manager.pid is None for manager in pool.managers)
        pool.start()
        for stage, step in zip((first, second), expected, strict=True):
            assert_same_step(stage.step(actions_of(2, 2)), step)


def test_shards_that_do_not_come_out_even_are_refused():
    with raises_code("pool-layout", EnvError, "env.num_processes"):
        EnvPool.create("toy", {}, total_num_envs=5, num_processes=2)
    with raises_code("pool-layout", EnvError, "2", "3"):
        EnvPool.create("toy", {}, total_num_envs=4, num_processes=2).split(3)


def toy_pool(num_envs, **kwargs):
    options = {"image_size": 8, "tasks": ["reach-red"], "include_state": True, **kwargs}
    return EnvPool.create("toy", options, total_num_envs=num_envs, num_processes=2, name="train")


def test_a_state_of_other_environments_is_refused_with_the_settings():
    @contextmanager
    def started(num_envs, **kwargs):
        with toy_pool(num_envs, **kwargs) as pool:
            pool.reset(np.arange(num_envs), np.zeros(num_envs, np.int32))
            yield pool

    with started(4) as pool:
        states = pool.get_state()
        step = pool.step(np.full((4, 2, 7), 0.2, np.float32), copy=True)
    others = {
        "environments (env.train.total_num_envs): 4 in the checkpoint, 8 now": (8, {}),
        "cameras (env.cameras): base_camera 8x8 in the checkpoint, base_camera 16x16 now": (4, {"image_size": 16}),
        "numbers of the state (env.include_state)": (4, {"include_state": False}),
        "tasks (env.tasks): reach-red in the checkpoint, reach-green now": (4, {"tasks": ["reach-green"]}),
    }
    for words, (num_envs, kwargs) in others.items():
        with started(num_envs, **kwargs) as pool:
            with raises_code("env-state-mismatch", CheckpointError) as raised:
                pool.set_state(states)
            assert words in raised.value.message
            assert pool.faults.restarts == 0
    with started(4, tasks=["reach-red", "reach-green"]) as pool:  # a further task changes no number
        pool.set_state(states)
        np.testing.assert_array_equal(
            pool.step(np.full((4, 2, 7), 0.2, np.float32)).observation.images, step.observation.images
        )
        for damaged in (states[0][:200], states[0][:30] + b"\0" * 200):
            with raises_code("checkpoint-damaged", CheckpointError):
                pool.set_state([damaged, states[1]])


def test_a_state_is_taken_where_its_shapes_fit():
    with toy_pool(4) as pool, toy_pool(8) as larger:
        for made, count in ((pool, 4), (larger, 8)):
            made.reset(np.arange(count), np.zeros(count, np.int32))
        states = pool.get_state()
        pool.set_state(states)
        with raises_code("env-state-mismatch", CheckpointError):
            larger.set_state(states)


def test_a_pool_moves_single_environments_to_other_rows_and_processes():
    kwargs = {k: v for k, v in KWARGS.items() if k != "num_envs"}
    none, zeros = np.zeros(6, np.bool_), actions_of(0, num_envs=6) * 0
    with EnvPool.create("toy", kwargs, total_num_envs=6, num_processes=2) as pool:
        pool.reset(np.arange(6), np.zeros(6, np.int32))
        pool.step(actions_of(1, num_envs=6))
        before = pool.step(zeros, none, copy=True).observation
        states = pool.get_row_states([1, 4])
        assert sorted(states) == [1, 4]
        pool.set_row_states({0: states[4], 5: states[1], 3: states[1]})
        after = pool.step(zeros, none, copy=True).observation
        assert_same_observation(after, before.select(np.array([4, 1, 2, 1, 4, 1])))

        pid = pool.managers[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert sorted(pool.get_row_states([1, 4])) == [1], "the process of environment 4 is lost"
        pool.set_row_states({0: states[1], 4: states[1]})
        after = pool.step(zeros, none, copy=True).observation
        assert pool.faults.restarts == 1 and pool.faults.lost_episodes == 0
        assert_same_observation(after, before, np.array([1, 2]))
        fresh = pool.reset(np.arange(6), np.zeros(6, np.int32), copy=True)
        assert_same_observation(after, fresh, slice(3, 6))


def test_requests_that_were_interrupted_are_drained_before_others():
    kwargs = {name: value for name, value in KWARGS.items() if name != "num_envs"}
    with EnvPool.create("toy", kwargs, total_num_envs=4, num_processes=2) as pool:
        seeds, tasks = np.arange(4), np.zeros(4, np.int32)
        pool.reset(seeds, tasks)
        wanted = pool.get_state()
        first, second = pool.managers
        for interrupted in (
            lambda: first.call_async("mark"),
            lambda: second.process.request(Kind.GET_STATE, 5.0),
            lambda: (first.call_async("rewind"), second.call_async("rewind")),
        ):
            pool.call("mark")
            interrupted()
            with raises_code("env-order"):
                pool.get_state()
            pool.requests.drain()
            assert pool.get_state() == wanted
        pool.step_async(np.zeros((4, 2, 7), np.float32))
        pool.requests.drain()
        wanted = pool.get_state()
        first.process.request(Kind.OFFLOAD, 5.0)
        pool.requests.drain()
        assert first.is_offloaded and pool.get_state() == wanted
        first.call_async("mark")
        os.kill(first.pid, signal.SIGKILL)
        pool.requests.drain()
        assert len(pool.get_state(restart=True)) == 2 and pool.faults.restarts == 1
