"""Collector, trainer and evaluator share nothing but a store; each is killed once, and the store goes away for a while.

Every attempt that a collector has begun is then in the store exactly once or still open, and the trainer has counted
each episode once.
"""

import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from s3_server import S3Server, s3_bucket
from safetensors.torch import load_file

from embodrl.config.schema import Config
from embodrl.data.demos import ACTED_BY, POLICY_VERSION, DemoEpisode, Outcomes
from embodrl.data.lerobot_writer import LeRobotWriter
from embodrl.pipelines.load import load_config
from embodrl.storage.checkpoint import CheckpointManager
from embodrl.store.parts import DONE, RESULTS
from embodrl.store.shards import EPISODES, ShardSize, ShardWriter
from embodrl.store.store import Store

pytest.importorskip("pyarrow", reason="the extra datasets is not installed")
CONFIG = (
    runs.LEARNING_OPENVLA
    + """
presets: {env: toy, experiment: hybrid}
env:
  tasks: [reach-red]
  max_episode_steps: 10
  pin_cpus: false
  num_processes: 1
  train: {total_num_envs: 8}
  eval: {total_num_envs: 8, num_episodes: 8, decoding: greedy}
sft: {max_steps: 60, batch_size: 16}
runner: {logger: {tensorboard: false}}
store: {episodes_per_shard: 8, publish_interval: 10, successes_only: false, poll_s: 0.2, steps_per_episode: 0.25}
"""
)


class Disk:
    """A store in a directory, which goes away as one that is not mounted any more."""

    def __init__(self, directory: Path) -> None:
        self.store, self._away = directory / "store", directory / "away"
        self.url = str(self.store)

    def go_away(self) -> None:
        self.store.rename(self._away)

    def come_back(self) -> None:
        while self._away.exists():
            # What was being copied when it went away may have begun a place of the same name, which has no marks.
            assert not [*self.store.rglob("STABLE")]
            shutil.rmtree(self.store, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._away.rename(self.store)


class Bucket:
    """A store on an S3 server, which refuses connections while it is away."""

    url = "s3://bucket/prefix"

    def __init__(self, server: S3Server) -> None:
        self.go_away, self.come_back = server.shut, server.open


@pytest.fixture(params=["directory", "s3"])
def place(request, tmp_path, monkeypatch):
    if request.param == "directory":
        yield Disk(tmp_path)
        return
    with s3_bucket(tmp_path, monkeypatch) as server:
        yield Bucket(server)


class Role:
    """A process of `embodrl store`, whose output is in a file."""

    def __init__(self, name: str, directory: Path, url: str) -> None:
        self.name, self.log = name, (directory / f"{name}.log").open("a")
        paths = (f"store.url={url}", f"store.spool_dir={directory}/spool", f"sft.output_dir={directory}/out")
        self.command = [sys.executable, "-m", "embodrl.__main__", "store", name, "-c", f"{directory}/config.yaml"]
        self.command += paths
        self.start()

    def start(self) -> None:
        out = self.log
        self.process = subprocess.Popen(self.command, env=runs.environment(), stdout=out, stderr=out)

    def restart(self) -> None:
        assert self.process.poll() is None, Path(self.log.name).read_text()
        self.process.kill()
        self.process.wait()
        self.start()

    def says(self, text: str) -> bool:
        """Tell whether the output has a text, whatever lines it is broken into."""
        return text in " ".join(Path(self.log.name).read_text().split())


def assert_each_attempt_counts_once(marks: dict) -> None:
    """Every attempt that the collector has begun is in one shard, or was under way when the newest was written."""
    found = Counter(one for mark in marks.values() for one in mark.texts("ids"))
    assert set(found.values()) == {1}
    progress = marks[max(marks)].fields("collector")
    opened = {int(number) for number in progress.numbers("open")}
    finished = {int(name.rpartition("-")[2]) for name in found}
    assert finished | opened == set(range(progress.integer("next"))) and not finished & opened


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_no_episode_is_lost_or_counted_twice(tmp_path, place):
    (tmp_path / "config.yaml").write_text(CONFIG)
    moments = random.Random(time.time_ns())
    store = Store(place.url)
    store.create()
    roles = [Role(name, tmp_path, place.url) for name in ("train", "collect", "eval")]
    try:
        # Each is killed at a random moment after it has begun to write.
        begun = {"train": "weights", "collect": EPISODES, "eval": RESULTS}
        waiting = list(roles)
        while waiting:
            for role in [role for role in waiting if store.names(begun[role.name])]:
                time.sleep(moments.uniform(0, 10))
                role.restart()
                waiting.remove(role)
            time.sleep(0.1)
        trainer, collector, evaluator = roles
        for role, text in ((trainer, "following"), (collector, "collecting into"), (evaluator, "evaluating the")):
            while Path(role.log.name).read_text().count(text) < 2:  # begun once more
                time.sleep(0.1)
        place.go_away()
        is_training = trainer.process.poll() is None
        time.sleep(60)
        place.come_back()
        for role in roles:
            assert role.process.wait(1200) == 0, Path(role.log.name).read_text()
        if is_training:
            for text in ("retrying", "the store is available again"):
                assert trainer.says(text) and collector.says(text)
    finally:
        for role in roles:
            role.process.kill()
            role.process.wait()
            role.log.close()

    marks = {name: store.mark(name) for name in store.names(EPISODES)}
    assert_each_attempt_counts_once(marks)
    checkpoint, _ = CheckpointManager(tmp_path / "out", 1).latest_good()
    read = checkpoint.state.fields("data_rng").fields("store").texts("shards")
    assert len(set(read)) == len(read) and set(read) <= set(marks)
    assert sum(len(marks[name].texts("ids")) for name in read) >= 240  # a quarter of a step each
    assert max(store.names(RESULTS)) == f"{RESULTS}/v000060"


def test_imitation_in_two_processes_has_the_losses_and_weights_of_one(tmp_path):
    settings = ("env=toy", "model=mlp", "env.state=full", "algorithm=ppo_gaussian", "env.pin_cpus=false")
    settings += ("actor.precision=fp32", "rollout.precision=fp32", "sft.max_steps=6", "sft.log_interval=1")
    settings += ("sft.batch_size=8", "store.publish_interval=3", "store.steps_per_episode=1", "sft.lr_warmup_steps=1")
    config = load_config([*settings, "store.url=/a"], verb="store").config
    store = Store(str(tmp_path / "store"))
    store.create()
    write_episodes(store, tmp_path / "spool", config, 8)
    two = ("actor=fsdp", "cluster.device=cpu", "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}")
    rows, weights = {}, {}
    for name, places in (("one", ()), ("two", two)):
        out = tmp_path / name
        url = f"store.url={shutil.copytree(store.url, tmp_path / f'store_{name}')}"
        done = runs.embodrl("store", "train", *settings, *places, url, f"sft.output_dir={out}")
        assert done.code == 0, done.stderr
        rows[name] = [json.loads(line)["loss"] for line in (out / "store_metrics.jsonl").read_text().splitlines()]
        weights[name] = load_file(out / "policy" / "model.safetensors")
        assert max(Store(str(tmp_path / f"store_{name}")).names("weights")) == "weights/v000006"
    assert len(rows["one"]) == 6 and rows["one"] == pytest.approx(rows["two"], rel=1e-4)
    assert len(set(rows["one"])) == 6
    for name, tensor in weights["one"].items():
        torch.testing.assert_close(weights["two"][name], tensor, rtol=1e-4, atol=1e-5)
    shards = (tmp_path / "two" / "checkpoints" / "step_6" / "optimizer").glob("shard-*.safetensors")
    assert len(list(shards)) == 2
    longer = runs.embodrl("resume", tmp_path / "two", "sft.max_steps=8")
    assert longer.code == 0, longer.stderr
    assert len((tmp_path / "two" / "store_metrics.jsonl").read_text().splitlines()) == 8


def write_episodes(store: Store, spool: Path, config: Config, count: int) -> None:
    """Write a shard of solved episodes of six frames, whose actions follow their states."""
    camera = config.env.cameras[0]
    draw = np.random.default_rng(0)

    def make(directory: Path) -> LeRobotWriter:
        return LeRobotWriter(directory, [camera.name], 10, resume=True)

    found = []
    for number in range(count):
        state = draw.uniform(-1, 1, (6, 4)).astype(np.float32)
        actions = 0.5 * np.resize(state.T, (config.model.action_dim, 6)).T
        ends = Outcomes(actions, np.zeros(6, np.float32), np.arange(6) == 5, np.zeros(6, np.float32))
        images = np.zeros((6, 1, camera.height, camera.width, 3), np.uint8)
        extra = {POLICY_VERSION: np.zeros(6, np.int64), ACTED_BY: np.zeros(6, np.int64)}
        task = config.env.tasks[0]
        found.append(DemoEpisode(images, state, actions, "reach", task, number, True, ends, extra, f"a-{number}"))
    writer = ShardWriter(store, spool, "a", make, ShardSize(count, 1e9))
    writer.add(found, {"next": count, "open": []})
    writer.upload()
    writer.close()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_full_store_takes_the_rest_when_there_is_room(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(disk)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk takes privileges that this process does not have")
    try:
        (tmp_path / "config.yaml").write_text(CONFIG)
        store = Store(str(disk / "store"))
        collector = Role("collect", tmp_path, store.url)
        try:
            while not collector.says("is full: No space left on device"):
                assert collector.process.poll() is None, Path(collector.log.name).read_text()
                time.sleep(0.2)
            before = store.names(EPISODES)
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
            while not collector.says("the store is available again"):
                assert collector.process.poll() is None, Path(collector.log.name).read_text()
                time.sleep(0.2)
            collector.process.terminate()
            assert collector.process.wait(120) == 143, Path(collector.log.name).read_text()
        finally:
            collector.process.kill()
            collector.process.wait()
            collector.log.close()
        assert len(store.names(EPISODES)) > len(before)
        assert_each_attempt_counts_once({name: store.mark(name) for name in store.names(EPISODES)})
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


REWARD = """
presets: {env: toy, model: mlp, algorithm: rlpd}
env:
  tasks: [reach-red]
  state: full
  pin_cpus: false
  num_processes: 1
  cameras: [{height: 16, width: 16}]
  train: {total_num_envs: 8, max_steps_per_rollout_epoch: 10}
  eval: {total_num_envs: 8, num_episodes: 16, decoding: greedy}
algorithm: {off_policy: {utd: 0.2, warm_up: 40}}
actor: {global_batch_size: 32, micro_batch_size: 32}
cluster: {num_threads: 1}
collect: {num_episodes: 40000}
runner: {max_iterations: 6, eval_interval: 6, save_interval: 1, logger: {tensorboard: false, console: plain}}
store: {episodes_per_shard: 4, poll_s: 0.2}
extensions: [stop_at]
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_run_learns_by_reward_from_each_episode_once(tmp_path):
    config, store, run_dir = tmp_path / "config.yaml", Store(str(tmp_path / "store")), tmp_path / "run"
    config.write_text(REWARD)
    store.create()
    demos = runs.embodrl(
        "collect", "--config", config, "collect.num_episodes=4", f"collect.output_dir={tmp_path}/demos"
    )
    assert demos.code == 0, demos.stderr
    url = f"store.url={store.url}"
    collector = subprocess.Popen(
        [sys.executable, "-m", "embodrl.__main__", "store", "collect", "-c", str(config), url,
         f"store.spool_dir={tmp_path}/spool"],
        env=runs.environment(),
    )  # fmt: skip
    settings = (url, f"runner.output_dir={run_dir}", f"algorithm.off_policy.demos={tmp_path}/demos")
    try:
        killed = runs.embodrl("train", "--config", config, *settings, stop_at="learn:30:SIGKILL")
        assert killed.code == -signal.SIGKILL, killed.stderr
        before = CheckpointManager(run_dir, 1).latest_good()[0].state.integer("iteration")
        assert 0 < before < 6
        done = runs.embodrl("resume", run_dir)
        assert done.code == 0 and "starts over" not in done.stderr, done.stderr
        assert collector.wait(120) == 0, "it ends with the trainer"
    finally:
        collector.kill()
        collector.wait()
    rows = runs.metrics(run_dir)
    assert [row["iteration"] for row in rows] == list(range(7))
    state = CheckpointManager(run_dir, 1).latest_good()[0].state
    read = state.fields("rollout").fields("state").fields("store").texts("shards")
    assert len(set(read)) == len(read)
    # Steps are counted by the marks of shards alone: each one that was read counts once, and no other.
    lengths = {name: sum(frames_of_shard(Path(store.url) / name)) for name in read}
    assert rows[-1]["env_steps"] == sum(lengths.values()) >= 6 * 80
    assert store.mark(DONE).integer("version") == 6 and max(store.names("weights")) == "weights/v000006"
    assert rows[-1]["staleness/max"] >= 0 and rows[-1]["replay/size"] > 0


def frames_of_shard(shard: Path) -> list[int]:
    """The number of frames of each episode of a shard."""
    import pyarrow.parquet as parquet

    files = sorted((shard / "meta" / "episodes").rglob("*.parquet"))
    return [number for path in files for number in parquet.read_table(path).column("length").to_pylist()]
