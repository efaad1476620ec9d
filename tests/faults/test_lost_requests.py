"""A process that dies between two requests costs evaluations and collections its episodes, and nothing else."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from expect import raises_code
from test_env_faults import wait_until_gone

from embodrl.config import load_config
from embodrl.config.schema import Config
from embodrl.data.raw import RawWriter
from embodrl.envs.pool.faults import Bounds
from embodrl.envs.pool.pool import EnvPool
from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.errors import EnvQuarantined
from embodrl.types import PolicyOutput
from embodrl.workers.collection import DemoCollector
from embodrl.workers.demonstrations import NumberedAttempts
from embodrl.workers.evaluator import Evaluator

SETTINGS = [
    "env=toy",
    "env.tasks=[reach-red]",
    "env.max_episode_steps=20",
    "env.train.total_num_envs=4",
    "env.eval.total_num_envs=4",
    "env.eval.num_episodes=12",
    "model.num_action_chunks=2",
    "model.warm_start=null",
    "actor.global_batch_size=8",
    "actor.micro_batch_size=8",
    "collect.noise_fraction=0",
    "collect.num_episodes=12",
]


class Mortal(EnvPool):
    """Before the given call of the given name, its second process dies."""

    def doom(self, name: str, number: int) -> None:
        send = self.requests.send
        self.left = number

        def dying(rank: int, method: str, arguments: Mapping[str, object] | None) -> None:
            if method == name and rank == 1:
                self.left -= 1
                if self.left == 0:
                    pid = self.managers[1].pid
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
                    wait_until_gone([pid])
            send(rank, method, arguments)

        self.requests.send = dying  # type: ignore[method-assign]


def mortal(**kwargs: object) -> Mortal:
    settings = {"tasks": ["reach-red"], "image_size": 8, "max_episode_steps": 20, "max_chunk": 2, **kwargs}
    return Mortal(EnvPool.create("toy", settings, total_num_envs=4, num_processes=2).managers)


def collect(config: Config, pool: EnvPool, directory: Path) -> DemoCollector:
    collector = DemoCollector(config, pool.spec.tasks, RawWriter(directory))
    NumberedAttempts(config, pool, None, collector.take, collector.add).run(lambda: collector.finished)
    return collector


@pytest.mark.parametrize(("name", "number"), [("expert_actions", 5), ("expert_reset", 1), ("expert_reset", 3)])
def test_a_collection_restarts_its_attempts(name: str, number: int, tmp_path: Path) -> None:
    config = load_config([*SETTINGS, f"collect.output_dir={tmp_path}"]).config
    with mortal(auto_reset=False) as pool:
        pool.doom(name, number)
        collector = collect(config, pool, tmp_path)
        collector.close({})
        assert pool.left <= 0 and pool.faults.restarts == 1
    assert collector.kept.tolist() == [12] and collector.solved.tolist() == collector.tried.tolist()
    episodes = json.loads((tmp_path / "index.json").read_text())["episodes"]
    assert [episode["seed"] for episode in episodes] == list(range(config.collect.seed, config.collect.seed + 12))
    assert [episode["length"] for episode in episodes] == [expert_steps(episode["seed"]) for episode in episodes]


def test_a_collection_of_which_nothing_can_be_true_stops(tmp_path: Path) -> None:
    config = load_config([*SETTINGS, f"collect.output_dir={tmp_path}"]).config
    with mortal(auto_reset=False) as pool:
        pool.doom("", 0)
        pool.recovery.bounds = Bounds(reward=1e-6)
        with raises_code("env-quarantined", EnvQuarantined, "task reach-red"):
            collect(config, pool, tmp_path)


def expert_steps(seed: int) -> int:
    """Return how many actions the expert takes: an episode put together from two attempts would have more or fewer."""
    env = ToyVectorEnv(1, ["reach-red"], image_size=8, auto_reset=False)
    env.reset(np.array([seed]), np.zeros(1, np.int32), np.zeros(1, np.int64))
    steps = 0
    while True:
        steps += 1
        if env.chunk_step(env.expert_actions()[:, None], np.ones(1, np.bool_)).done.any():
            return steps


class Idle:
    """A policy that does nothing."""

    decodings = ("greedy",)

    def offload(self) -> None: ...

    def decide(self, observation: object, decoding, generators=None) -> PolicyOutput:
        count = len(observation.images)  # type: ignore[attr-defined]
        return PolicyOutput(np.zeros((count, 2, 7), np.float32), None, None, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "number"), [("start_video", 1), pytest.param("start_video", 2, marks=pytest.mark.long), ("mark", 1)]
)
def test_an_evaluation_plays_again_what_it_lost(name: str, number: int, tmp_path: Path) -> None:
    config = load_config(SETTINGS).config
    with mortal() as pool:
        pool.doom(name, number)
        result = Evaluator(config, pool, Idle()).run(tmp_path)  # type: ignore[arg-type]
        assert pool.left <= 0 and pool.faults.restarts == 1
        assert [record.seed for record in result.records] == list(
            range(config.env.eval.seed, config.env.eval.seed + 12)
        )
        assert result.lost_episodes == 0
        assert result.mean_length == 20, "restarted processes do not reset by themselves, either"


def test_an_evaluation_ends_though_one_environment_breaks_off_what_is_played_again(tmp_path: Path) -> None:
    """Chosen because they were lost, they are lost in a row, which says nothing about the environment."""
    config = load_config([*SETTINGS, "env.eval.num_episodes=16"]).config
    with mortal() as pool:
        pool.doom("", 0)
        pool.recovery.max_restarts, sound = 2, pool.recovery.quarantine

        def spoil(rank: int, step: object) -> object:
            broken = (
                pool.managers[rank].episodes.seeds - config.env.eval.seed
            ) % 5 == 0  # one in each environment at first
            step.reward[broken & step.valid.any(axis=1)] = np.nan  # type: ignore[attr-defined]
            return sound(rank, step)  # type: ignore[arg-type]

        pool.recovery.quarantine = spoil  # type: ignore[assignment, method-assign]
        result = Evaluator(config, pool, Idle()).run(tmp_path)  # type: ignore[arg-type]
        assert (result.episodes, result.lost_episodes) == (12, 4)
        assert pool.faults.quarantined == 4 * 3
