"""Simulators behind an env server: what a simulator here would do, over a connection that breaks."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import runs
from expect import raises_code
from tcp_proxy import TcpProxy
from test_env_manager import KWARGS, SEEDS, TASKS, actions_of, assert_same_observation, assert_same_step

from embodrl.data.video_file import read_video
from embodrl.envs.env_server.link import connect
from embodrl.envs.env_server.relay import probe
from embodrl.envs.env_server.server import TcpEnvServer
from embodrl.envs.env_server.serving import serve
from embodrl.envs.env_server.videos import RemoteVideos
from embodrl.envs.pool.manager import EnvManager
from embodrl.envs.pool.options import RemoteEnv
from embodrl.envs.pool.pool import EnvPool
from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.errors import EnvError, EnvWorkerDied, MessageError, UsageError
from embodrl.reporting.rows import is_measured

TOKEN = "a-token"


class Served:
    """An env server in a thread."""

    def __init__(self, max_processes: int = 4) -> None:
        self.server = TcpEnvServer("127.0.0.1", 0, TOKEN, max_processes)
        self.port = int(self.server.address.rpartition(":")[2])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(self._stop.is_set,))
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setenv("EMBODRL_TOKEN", TOKEN)
    made = Served()
    yield made
    made.stop()


def remote(port: int, reconnect_s: float = 20.0) -> RemoteEnv:
    return RemoteEnv(f"tcp://127.0.0.1:{port}", reconnect_s, pin_cpus=False)


def test_a_simulator_there_does_what_one_here_does(served):
    local = ToyVectorEnv(**KWARGS)
    with EnvManager("toy", KWARGS, remote=remote(served.port)) as manager:
        assert manager.spec == local.spec
        assert_same_observation(manager.reset(SEEDS, TASKS), local.reset(SEEDS, TASKS, np.arange(3)))
        ended = 0
        for number in range(6):
            active = np.array([True, number % 2 == 0, True])
            step = manager.step(actions_of(number), active)
            assert_same_step(step, local.chunk_step(actions_of(number), active))
            ended += step.final_mask.sum()
        assert ended
        assert manager.get_state() == local.get_state()
        assert manager.call("check_state") == local.call("check_state", {})
        for end_process in (False, True):
            manager.offload(end_process)
            manager.start()
            assert_same_step(manager.step(actions_of(9)), local.chunk_step(actions_of(9), np.ones(3, np.bool_)))


def test_a_connection_that_breaks_all_the_time_neither_loses_nor_repeats_a_step(served):
    proxy = TcpProxy(served.port, cut_every=9001)  # a step has some 5,000 bytes
    local = ToyVectorEnv(**KWARGS)
    with EnvManager("toy", KWARGS, remote=remote(proxy.port)) as manager:
        assert_same_observation(manager.reset(SEEDS, TASKS), local.reset(SEEDS, TASKS, np.arange(3)))
        for number in range(15):
            assert_same_step(
                manager.step(actions_of(number)), local.chunk_step(actions_of(number), np.ones(3, np.bool_))
            )
        assert manager.get_state() == local.get_state()
    assert proxy.num_connections > 5
    proxy.close()


def test_after_the_deadline_the_simulator_is_restarted_as_a_dead_one(served, caplog):
    proxy = TcpProxy(served.port)
    with EnvPool([EnvManager("toy", KWARGS, remote=remote(proxy.port, reconnect_s=0.5))]) as pool:
        pool.reset(SEEDS, TASKS)
        proxy.close()
        pool.managers[0].process.launch.config["remote"]["address"] = served.server.address
        lost = pool.step(actions_of(1))
        assert not lost.valid.any() and lost.truncated[:, 0].all()
        assert pool.step(actions_of(2)).valid[:, 0].all() and pool.faults.restarts == 1
    assert "env-remote-unreachable" in caplog.text


def test_a_simulator_whose_server_is_gone_starts_at_another(served, caplog):
    first = Served()
    own = RemoteEnv(first.server.address, 0.5, pin_cpus=False, others=[served.server.address])
    with EnvPool([EnvManager("toy", KWARGS, remote=own)]) as pool:
        pool.reset(SEEDS, TASKS)
        assert first.server._sessions and not served.server._sessions
        first.stop()
        lost = pool.step(actions_of(1))
        assert not lost.valid.any() and lost.truncated[:, 0].all()
        assert pool.step(actions_of(2)).valid[:, 0].all() and pool.faults.restarts == 1
        assert served.server._sessions


def test_a_simulator_goes_to_a_server_with_room(served):
    full = Served(max_processes=1)
    own = RemoteEnv(full.server.address, 0.5, pin_cpus=False, others=[served.server.address])
    try:
        with EnvManager("toy", KWARGS, remote=remote(full.port)), EnvManager("toy", KWARGS, remote=own):
            assert len(full.server._sessions) == len(served.server._sessions) == 1
            with raises_code("env-remote-full", EnvError):
                EnvManager("toy", KWARGS, remote=remote(full.port)).start()
    finally:
        full.stop()


def test_videos_of_simulators_there_are_those_of_simulators_here(served, tmp_path):
    def film(name: str, where: RemoteEnv | None) -> list[str]:
        with EnvManager("toy", KWARGS, remote=where) as manager:
            manager.reset(SEEDS, TASKS)
            for row in (0, 2):
                manager.call("start_video", {"row": row, "path": str(tmp_path / name / f"episode_00{row}")})
            for number in range(6):
                manager.step(actions_of(number))
        return sorted(path.name for path in (tmp_path / name).iterdir())

    names = film("here", None)
    assert len(names) == 2 and film("there", remote(served.port)) == names
    for name in names:
        there, here = (list(read_video(tmp_path / place / name)) for place in ("there", "here"))
        np.testing.assert_array_equal(there, here)


def test_a_run_takes_no_video_that_it_did_not_ask_for(tmp_path):
    videos = RemoteVideos()
    assert videos.start({"row": 1, "path": str(tmp_path / "a")}) == {"row": 1, "number": 0}
    for wrong in ({"1_success.mp4": b"x"}, {"../0_success.mp4": b"x"}, {"0_success.sh": b"x"}, {0: b"x"}, [b"x"]):
        with raises_code("message", MessageError):
            videos.keep(wrong)
    videos.keep({"0_failure.mp4": b"x"})
    assert [path.name for path in tmp_path.iterdir()] == ["a_failure.mp4"]


def test_a_simulator_that_dies_there_is_dead_here(served):
    with EnvManager("toy", KWARGS, remote=remote(served.port)) as manager:
        manager.reset(SEEDS, TASKS)
        (session,) = served.server._sessions.values()
        os.kill(session._manager.pid, signal.SIGKILL)
        with raises_code("env-worker-died", EnvWorkerDied) as caught:
            manager.step(actions_of(0))
        assert "SIGKILL" in caught.value.message
        manager.restart()  # takes the place of the dead one
        assert_same_observation(manager.reset(SEEDS, TASKS), ToyVectorEnv(**KWARGS).reset(SEEDS, TASKS, np.arange(3)))


def test_what_a_server_refuses_has_a_code(served, monkeypatch):
    address = f"tcp://127.0.0.1:{served.port}"
    probe(address)
    with raises_code("env-remote-lost", EnvError):
        connect(address, TOKEN, {"session": "x", "resume": True, "reconnect_s": 1.0})
    with raises_code("env-remote-unknown", EnvError):
        EnvManager("embodrl.envs.toy.env:ToyVectorEnv", KWARGS, remote=remote(served.port)).start()
    for name, kwargs in (("robot", {"robot": "so101_follower"}), ("gymnasium", {"env_id": "os:anything-v0"})):
        with raises_code("env-remote-code", EnvError):
            EnvManager(name, kwargs, remote=remote(served.port)).start()
    for number in range(4):
        connect(address, TOKEN, {"session": str(number), "resume": False, "reconnect_s": 1.0})
    with raises_code("env-remote-full", EnvError):
        connect(address, TOKEN, {"session": "one more", "resume": False, "reconnect_s": 1.0})
    monkeypatch.setenv("EMBODRL_TOKEN", "another")
    with raises_code("env-remote-token", EnvError):
        probe(address)
    monkeypatch.setattr("embodrl.envs.env_server.server.__version__", "0.0.1")
    with raises_code("env-remote-version", EnvError):
        probe(address)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with raises_code("env-remote-unreachable", EnvError):
            probe(f"tcp://127.0.0.1:{free.getsockname()[1]}")


@pytest.mark.long
def test_simulators_that_are_still_ending_count_until_they_are_gone(served, monkeypatch):
    """Four of four belong to a run that has left; their processes end when the test lets them."""
    released, asked = threading.Event(), threading.Event()
    close = EnvManager.close

    def close_late(manager, *arguments):
        if "remote" not in manager.process.launch.config:
            asked.set()
            released.wait()
        close(manager, *arguments)

    address = f"tcp://127.0.0.1:{served.port}"
    hello = {"resume": False, "reconnect_s": 20.0}
    monkeypatch.setattr("embodrl.envs.env_server.server.EnvManager.close", close_late)
    managers = [EnvManager("toy", KWARGS, remote=remote(served.port)) for _ in range(4)]
    for manager in managers:
        manager.start()
    try:
        managers[0].close()
        assert asked.wait(20)
        with raises_code("env-remote-ending", EnvError):
            connect(address, TOKEN, {"session": "too early", **hello})
        threading.Timer(1.0, released.set).start()
        with EnvManager("toy", KWARGS, remote=remote(served.port)) as successor:  # waits for its place
            successor.reset(SEEDS, TASKS)
            assert released.is_set() and len(served.server._sessions) <= 4
    finally:
        released.set()
        for manager in managers:
            manager.close()


def test_noise_ends_its_connection_and_nothing_else(served):
    generator = np.random.default_rng(0)
    for size in (1, 40, 5000, 200_000):
        with socket.create_connection(("127.0.0.1", served.port)) as stranger:
            try:
                stranger.sendall(generator.bytes(size))
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
            except OSError:  # it has been closed already
                pass
    probe(f"tcp://127.0.0.1:{served.port}")


CONFIG = (
    "presets: {env: ENV}"
    + runs.LEARNING_OPENVLA
    + """
env:
  tasks: [TASK]
  max_episode_steps: 10
  num_processes: 2
  train: {total_num_envs: 8, max_steps_per_rollout_epoch: 20}
  eval: {total_num_envs: 8, num_episodes: 8, decoding: greedy}
  video: {enabled: false}
actor: {global_batch_size: 80, micro_batch_size: 40, precision: fp32}
rollout: {precision: fp32}
runner: {max_iterations: 4, eval_interval: 4, logger: {tensorboard: false}}
"""
)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("env", "task"), [("toy", "reach-red"), ("maniskill", "PushCube-v1")])
def test_a_run_whose_network_is_gone_for_20_s_is_the_local_run_to_the_bit(served, tmp_path, env, task):
    """Silent for 20 s, not closed: both sides find it out by themselves, and connect again."""
    if env == "maniskill":
        pytest.importorskip("mani_skill", reason="ManiSkill is not installed")
    (tmp_path / "run.yaml").write_text(CONFIG.replace("ENV", env, 1).replace("TASK", task))
    proxy = TcpProxy(served.port, delay_s=0.001)

    def train(name: str, *settings: str) -> subprocess.Popen:
        command = ["train", "-c", f"{tmp_path}/run.yaml", f"runner.output_dir={tmp_path / name}", *settings]
        return subprocess.Popen([sys.executable, "-m", "embodrl.__main__", *command], env=runs.environment())

    assert train("local").wait() == 0
    remote_run = train("remote", f"env.remote=[tcp://127.0.0.1:{proxy.port}]")
    metrics = tmp_path / "remote" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert remote_run.poll() is None
        time.sleep(0.05)
    proxy.open.clear()
    time.sleep(20)
    proxy.open.set()
    assert remote_run.wait() == 0
    assert proxy.num_connections > 4  # a probe, two processes, and both of them again

    def rows(name: str) -> list[dict]:
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not is_measured(k)} for line in lines]

    assert rows("remote") == rows("local")
    proxy.close()


def test_tokens_are_secrets_and_are_asked_for_where_others_reach_the_server():
    for token, host in (("", "127.0.0.1"), ("short", "127.0.0.1"), ("none", "0.0.0.0")):
        with raises_code("env-server-token", UsageError):
            serve(host, 0, token, 1, (), None, print)


def test_a_client_with_a_token_believes_no_server_that_asks_for_none():
    server = TcpEnvServer("127.0.0.1", 0, None, 4)
    over = threading.Event()
    thread = threading.Thread(target=server.run, args=(over.is_set,))
    thread.start()
    try:
        connect(server.address, None, {"session": "x", "resume": False, "reconnect_s": 1.0}).close()
        with raises_code("env-remote-token", EnvError):
            connect(server.address, TOKEN, {"session": "y", "resume": False, "reconnect_s": 1.0})
    finally:
        over.set()
        thread.join(60)
