"""Processes join a run with a store, are killed, leave and come back; the run takes each rollout once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import runs
from redis_server import fake_redis, redis_cluster, redis_server
from tcp_proxy import TcpProxy

from embodrl.storage.checkpoint import CheckpointManager
from embodrl.store.join import load_joined
from embodrl.store.rollout_shards import ROLLOUTS, SETTINGS, TAKEN, Ledger
from embodrl.store.shards import place_of
from embodrl.store.store import Store
from embodrl.workers.collector import EpisodeSchedule

pytestmark = [pytest.mark.slow, pytest.mark.long]

CONFIG = """
presets: {env: toy, model: mlp, algorithm: ppo_gaussian}
env:
  tasks: [reach-red]
  state: full
  pin_cpus: false
  num_processes: 1
  cameras: [{height: 16, width: 16}]
  train: {total_num_envs: 8, max_steps_per_rollout_epoch: 10, auto_reset: true}
  eval: {total_num_envs: 8, num_episodes: 8, decoding: greedy}
algorithm: {decoupled: {enabled: true}}
actor: {global_batch_size: 40, micro_batch_size: 40}
cluster: {num_threads: 1}
runner: {max_staleness: 1, eval_interval: 0, save_interval: 1, logger: {tensorboard: false, console: plain}}
store: {poll_s: 0.05}
"""
STEPS = 40
"""Of a rollout of four environments."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def metrics_of(directory: Path) -> list[dict[str, float]]:
    (path,) = directory.glob("*/collector-0/collect_metrics.jsonl")  # in the directory of the run
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def started(directory: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    with (directory / f"{'-'.join(map(str, arguments[:1]))}.log").open("ab") as log:
        command = [sys.executable, "-m", "embodrl", *map(str, arguments)]
        process = subprocess.Popen(command, env=runs.environment(), stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def until(condition: Callable[[], bool], *processes: subprocess.Popen[bytes]) -> None:
    """Wait for a condition, as long as the processes live."""
    while not condition():
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)


@pytest.mark.timeout(240)
def test_a_server_acts_for_the_environments_of_a_run(tmp_path: Path) -> None:
    """Trainer, inference server and environments are three commands that share a directory."""
    pytest.importorskip("aiohttp", reason="the extra serve is not installed")
    config, run_dir, store = tmp_path / "config.yaml", tmp_path / "run", Store(str(tmp_path / "store"))
    config.write_text(CONFIG)
    port = free_port()
    serve = ["serve", "--config", config, "protocol=http", f"serve.port={port}", "serve.token=none"]
    serve += ["model.random_weights=true"]  # before the first version of the run
    acting = ["rollout.backend=remote", f"rollout.remote.urls=[http://127.0.0.1:{port}]"]
    with ExitStack() as closing:
        places = [f"store.url={store.url}", f"runner.output_dir={run_dir}", "runner.max_iterations=4"]
        trainer = closing.enter_context(started(tmp_path, "train", "--config", config, *places))
        closing.enter_context(started(tmp_path, *serve))
        until(lambda: Path(store.url, SETTINGS, "STABLE").is_file(), trainer)
        spool = f"store.spool_dir={tmp_path / 'spool'}"
        joined = closing.enter_context(started(tmp_path, "join", store.url, spool, *acting))
        assert trainer.wait() == 0, (tmp_path / "train.log").read_text()
        assert joined.wait() == 0, (tmp_path / "join.log").read_text()
    rows = runs.metrics(run_dir)
    assert [row["iteration"] for row in rows] == list(range(5))
    assert all(row["train/behavior_weight_max"] < 10 for row in rows[1:]), "by the weights that they say"
    versions = {int(line["collect/policy_version"]) for line in metrics_of(tmp_path / "spool")}
    assert len(versions) > 1, "the server took new weights"


@pytest.fixture(params=["fake", "server", "cluster"])
def redis_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    servers = {"fake": fake_redis, "server": lambda: redis_server(tmp_path), "cluster": lambda: redis_cluster(tmp_path)}
    with servers[request.param]() as address:
        yield Store(f"{address}/run")


@pytest.mark.timeout(240)
def test_a_process_joins_a_run_in_redis(tmp_path: Path, redis_store: Store) -> None:
    config, run_dir = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(CONFIG)
    with ExitStack() as closing:
        places = [f"store.url={redis_store.url}", f"runner.output_dir={run_dir}", "runner.max_iterations=4"]
        trainer = closing.enter_context(started(tmp_path, "train", "--config", config, *places))
        until(lambda: redis_store._fs.exists(redis_store._path(SETTINGS, "STABLE")), trainer)
        joined = closing.enter_context(
            started(tmp_path, "join", redis_store.url, f"store.spool_dir={tmp_path / 'spool'}")
        )
        assert trainer.wait() == 0, (tmp_path / "train.log").read_text()
        assert joined.wait() == 0, (tmp_path / "join.log").read_text()
    assert [row["iteration"] for row in runs.metrics(run_dir)] == list(range(5))
    assert max(redis_store.names("weights")) == "weights/v000004"
    assert len({line["collect/policy_version"] for line in metrics_of(tmp_path / "spool")}) > 1


def counted_in(run_dir: Path) -> tuple[int, int]:
    """Return how many rollouts the newest checkpoint counts, and how many of them were rejected."""
    checkpoint = CheckpointManager(run_dir, 1).latest_good()[0]
    assert checkpoint is not None
    state = checkpoint.state.fields("rollout").fields("state")
    ledger = Ledger.read(state.fields("ledger"))
    counted = sum(ledger.has(name, n) for name in ledger.next for n in range(ledger.next[name]))
    return counted, state.integer("rejected")


@pytest.mark.timeout(240)
def test_a_network_that_loses_answers_loses_no_rollout(tmp_path: Path) -> None:
    """Connections are reset between requests and answers all the time, so that writes are repeated."""
    config, run_dir, log = tmp_path / "config.yaml", tmp_path / "run", tmp_path / "join.log"
    config.write_text(CONFIG)
    with redis_server(tmp_path) as address, ExitStack() as closing:
        store = Store(f"{address}/run")
        proxy = TcpProxy(int(address.split(":")[2].split("/")[0]))
        closing.callback(proxy.close)
        places = [f"store.url={store.url}", f"runner.output_dir={run_dir}", "runner.max_iterations=6"]
        trainer = closing.enter_context(started(tmp_path, "train", "--config", config, *places))
        until(lambda: store._fs.exists(store._path(SETTINGS, "STABLE")), trainer)
        own = [f"store.spool_dir={tmp_path / 'spool'}", "env.train.total_num_envs=4"]
        joined = closing.enter_context(started(tmp_path, "join", f"redis://127.0.0.1:{proxy.port}/0/run", *own))
        until(lambda: "gathering for" in log.read_text(), trainer, joined)

        def has_ended() -> bool:
            proxy.cut()
            return trainer.poll() is not None

        until(has_ended)  # the joined process may end first
        assert trainer.wait() == 0, (tmp_path / "train.log").read_text()
        assert joined.wait() == 0, log.read_text()
        made = max(place_of(name)[1] for name in store.names(ROLLOUTS)) + 1
        waiting = len(store.names(ROLLOUTS))
    assert "retrying" in log.read_text() and proxy.num_connections > 10
    counted, rejected = counted_in(run_dir)
    assert counted == 2 * 6 + rejected and runs.metrics(run_dir)[-1]["env_steps"] == counted * STEPS
    assert counted <= made <= counted + waiting, "all are counted or in the store"


@pytest.mark.timeout(240)
def test_who_joins_waits_for_a_store_that_is_away(tmp_path: Path) -> None:
    config, run_dir, store = tmp_path / "config.yaml", tmp_path / "run", Store(str(tmp_path / "store"))
    config.write_text(CONFIG)
    place, away, log = tmp_path / "store", tmp_path / "away", tmp_path / "join.log"
    with ExitStack() as closing:
        places = [f"store.url={store.url}", f"runner.output_dir={run_dir}", "runner.max_iterations=2"]
        trainer = closing.enter_context(started(tmp_path, "train", "--config", config, *places))
        until(lambda: (place / SETTINGS / "STABLE").is_file(), trainer)
        store.put_note("leases/collector-0", {"owner": "another", "beats": 1})
        joined = closing.enter_context(started(tmp_path, "join", store.url, f"store.spool_dir={tmp_path / 'spool'}"))
        until(lambda: "belonged to another process" in log.read_text(), trainer, joined)
        place.rename(away)
        until(lambda: "retrying" in log.read_text(), trainer, joined)
        (away / "leases" / "collector-0" / "STABLE").unlink()
        away.rename(place)
        assert trainer.wait() == 0, (tmp_path / "train.log").read_text()
        assert joined.wait() == 0, log.read_text()
    assert "the store is available again" in log.read_text()
    assert [row["iteration"] for row in runs.metrics(run_dir)] == list(range(3))


@pytest.mark.timeout(240)
def test_two_training_processes_learn_from_who_joined(tmp_path: Path) -> None:
    config, run_dir, store = tmp_path / "config.yaml", tmp_path / "run", Store(str(tmp_path / "store"))
    config.write_text(CONFIG)
    sharded = ["actor=fsdp", "cluster.device=cpu", "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}"]
    sharded += ["actor.micro_batch_size=20", f"store.url={store.url}", "runner.max_iterations=3"]
    with ExitStack() as closing:
        trainer = closing.enter_context(
            started(tmp_path, "train", "--config", config, *sharded, f"runner.output_dir={run_dir}")
        )
        until(lambda: Path(store.url, SETTINGS, "STABLE").is_file(), trainer)
        joined = closing.enter_context(started(tmp_path, "join", store.url, f"store.spool_dir={tmp_path / 'spool'}"))
        assert trainer.wait() == 0, (tmp_path / "train.log").read_text()
        assert joined.wait() == 0, (tmp_path / "join.log").read_text()
    assert [row["iteration"] for row in runs.metrics(run_dir)] == list(range(4))


@pytest.mark.timeout(240)
def test_a_run_learns_from_branches_of_who_joined(tmp_path: Path) -> None:
    config, run_dir, store = tmp_path / "config.yaml", tmp_path / "run", Store(str(tmp_path / "store"))
    config.write_text(CONFIG.replace("ppo_gaussian", "branch").replace("auto_reset: true", "auto_reset: false"))
    branched = [
        "algorithm.group_size=4",
        "algorithm.rollout_epoch=1",
        "env.max_episode_steps=10",
        "env.train.ignore_terminations=true",
    ]
    branched += [f"store.url={store.url}", "runner.max_iterations=3", "runner.output_dir=" + str(run_dir)]
    with ExitStack() as closing:
        trainer = closing.enter_context(started(tmp_path, "train", "--config", config, *branched))
        until(lambda: Path(store.url, SETTINGS, "STABLE").is_file(), trainer)
        joined = closing.enter_context(started(tmp_path, "join", store.url, f"store.spool_dir={tmp_path / 'spool'}"))
        assert trainer.wait() == 0, (tmp_path / "train.log").read_text()
        assert joined.wait() == 0, (tmp_path / "join.log").read_text()
        made = load_joined(store.url, []).config
    train = made.env.train.model_copy(update={"seed": made.env.train.seed + zlib.crc32(b"collector-0")})
    made = made.model_copy(update={"env": made.env.model_copy(update={"train": train})})
    rows = runs.metrics(run_dir)
    count = 3 + int(rows[-1]["staleness/rejected_shards"])
    points = [EpisodeSchedule(made, 8, 1).branch_points(number, 0) for number in range(count)]
    chunk = made.model.num_action_chunks
    # Each leader plays the way to its branch, each environment the rest of the episode.
    steps = [chunk * int(each[::4].sum()) + int((10 - chunk * each).sum()) for each in points]
    assert len(rows) == 4 and any(each.any() for each in points)
    assert rows[-1]["env_steps"] == sum(steps), "those of rejected ones count, too"


@pytest.mark.timeout(240)
def test_processes_join_a_run_leave_it_and_are_killed(tmp_path: Path) -> None:
    config, run_dir, store = tmp_path / "config.yaml", tmp_path / "run", Store(str(tmp_path / "store"))
    config.write_text(CONFIG)

    def made(name: str) -> int:
        """The number of rollouts that a collector has brought."""
        places = [place_of(one) for one in store.names(ROLLOUTS)]
        return max((number + 1 for collector, number in places if collector == name), default=0)

    with ExitStack() as closing:

        def join(name: str, target: object = store.url) -> subprocess.Popen[bytes]:
            own = [f"store.collector={name}", f"store.spool_dir={tmp_path / 'spool'}", "env.train.total_num_envs=4"]
            return closing.enter_context(started(tmp_path, "join", target, *own))

        places = [f"store.url={store.url}", f"runner.output_dir={run_dir}", "runner.max_iterations=60"]
        trainer = closing.enter_context(started(tmp_path, "train", "--config", config, *places))
        until(lambda: Path(store.url, SETTINGS, "STABLE").is_file(), trainer)
        first, second = join("first"), join("second", run_dir)
        until(lambda: made("first") > 1 and made("second") > 1, trainer, first, second)
        os.kill(trainer.pid, signal.SIGSTOP)
        first.kill()
        second.terminate()
        assert second.wait() == 143
        again, third = join("first"), join("third")
        until(lambda: Path(store.url, "leases", "third", "STABLE").is_file(), again, third)
        before = made("first")
        os.kill(trainer.pid, signal.SIGCONT)
        until(lambda: made("first") > before, again)
        assert trainer.wait() == 0, (tmp_path / "train.log").read_text()
        assert (again.wait(), third.wait()) == (0, 0), "they end with the trainer"
    rows = runs.metrics(run_dir)
    assert [row["iteration"] for row in rows] == list(range(61))
    checkpoint = CheckpointManager(run_dir, 1).latest_good()[0]
    assert checkpoint is not None
    state = checkpoint.state.fields("rollout").fields("state")
    ledger = Ledger.read(state.fields("ledger"))
    taken = {name: [n for n in range(ledger.next[name]) if ledger.has(name, n)] for name in ledger.next}
    assert set(taken) == {"first", "second", "third"}
    counted = sum(map(len, taken.values()))
    # Each update has eight environments of twenty rollouts or more; what was too old counts as steps alone.
    assert rows[-1]["env_steps"] == counted * STEPS and counted == 2 * 60 + state.integer("rejected")
    assert all(row["staleness/rejected_shards"] <= state.integer("rejected") for row in rows[1:])
    told = Ledger.read(store.note(TAKEN).fields("ledger"))  # before the last update
    assert all(ledger.has(name, n) for name in told.next for n in range(told.next[name]) if told.has(name, n))
