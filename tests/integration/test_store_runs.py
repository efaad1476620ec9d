"""Collector, trainer and evaluator share nothing but a store; each is killed once, and the store goes away for a while.

Every attempt that a collector has begun is then in the store exactly once or still open, and the trainer has counted
each episode once.
"""

import contextlib
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import runs

from embodrl.data.shards import EPISODES
from embodrl.runs.store_parts import RESULTS
from embodrl.storage.checkpoint import CheckpointManager
from embodrl.storage.store import Store

pytest.importorskip("pyarrow", reason="the extra datasets is not installed")
CONFIG = """
presets: {env: toy, experiment: hybrid}
env:
  tasks: [reach-red]
  max_episode_steps: 10
  pin_cpus: false
  num_processes: 1
  train: {total_num_envs: 8}
  eval: {total_num_envs: 8, num_episodes: 8}
model:
  warm_start: null
  num_action_chunks: 2
  architecture:
    image_size: 16
    patch_size: 8
    dino: {width: 16, depth: 2, num_heads: 1, mlp_dim: 32}
    siglip: {width: 16, depth: 2, num_heads: 1, mlp_dim: 32}
    hidden_size: 32
    intermediate_size: 64
    num_hidden_layers: 1
    num_attention_heads: 2
  value_head: {hidden_sizes: [8]}
sft: {max_steps: 60, batch_size: 16}
runner: {logger: {tensorboard: false}}
store: {episodes_per_shard: 8, publish_interval: 10, successes_only: false, poll_s: 0.2}
"""


class Role:
    """A process of `embodrl store`, whose output is in a file."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.log = name, (directory / f"{name}.log").open("a")
        paths = (
            f"store.url={directory}/store",
            f"store.spool_dir={directory}/spool",
            f"sft.output_dir={directory}/out",
        )
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


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_episode_is_lost_or_counted_twice(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    moments = random.Random(time.time_ns())
    store = Store(str(tmp_path / "store"))
    store.create()
    roles = [Role(name, tmp_path) for name in ("train", "collect", "eval")]
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
        (tmp_path / "store").rename(tmp_path / "away")
        time.sleep(moments.uniform(1, 10))
        while (tmp_path / "away").exists():
            # What was being copied when it went away may have begun a place of the same name, which has no marks.
            assert not [*(tmp_path / "store").rglob("STABLE")]
            shutil.rmtree(tmp_path / "store", ignore_errors=True)
            with contextlib.suppress(OSError):
                (tmp_path / "away").rename(tmp_path / "store")
        for role in roles:
            assert role.process.wait(1200) == 0, Path(role.log.name).read_text()
    finally:
        for role in roles:
            role.process.kill()
            role.process.wait()
            role.log.close()

    marks = {name: store.mark(name) for name in store.names(EPISODES)}
    found = Counter(one for mark in marks.values() for one in mark.texts("ids"))
    assert set(found.values()) == {1}
    progress = marks[max(marks)].fields("collector")
    opened = {int(number) for number in progress.numbers("open")}
    finished = {int(name.rpartition("-")[2]) for name in found}
    assert finished | opened == set(range(progress.integer("next"))) and not finished & opened
    checkpoint, _ = CheckpointManager(tmp_path / "out", 1).latest_good()
    read = checkpoint.state.fields("data_rng").fields("store").texts("shards")
    assert len(set(read)) == len(read) and set(read) <= set(marks)
    assert sum(len(marks[name].texts("ids")) for name in read) >= 60  # a step each
    assert max(store.names(RESULTS)) == f"{RESULTS}/v000060"
