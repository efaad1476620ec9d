"""Where rollouts begin: at failed seeds. SyncCollector on the toy environment in this process."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from embodrl.config import load_config
from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.envs.pool.local import LocalPool
from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.errors import ConfigError
from embodrl.types import Observation, PolicyOutput
from embodrl.workers.collector import RolloutState, SyncCollector
from embodrl.workers.outcomes import EndedEpisode
from embodrl.workers.starts import FailedSeeds, Starts

CHUNK, NUM_ENVS, LIMIT = 4, 8, 8
FIXED = (
    "env=toy",
    "env.tasks=[reach-red,reach-green]",
    f"env.max_episode_steps={LIMIT}",
    "env.include_state=true",
    f"env.train.total_num_envs={NUM_ENVS}",
    f"env.train.max_steps_per_rollout_epoch={LIMIT}",
    f"model.num_action_chunks={CHUNK}",
    "model.warm_start=null",
    "actor.global_batch_size=8",
    "actor.micro_batch_size=8",
)
AGAIN = "env.train.failed_seed_fraction=0.5"


def config_of(*overrides: str) -> Config:
    return load_config([*FIXED, *overrides]).config


class Pool(LocalPool):
    """Two simulators in this process."""

    def __init__(self, config: Config) -> None:
        env = config.env
        kwargs: dict[str, object] = {
            "num_envs": NUM_ENVS // 2,
            "tasks": env.tasks,
            "image_size": 8,
            "max_episode_steps": env.max_episode_steps,
            "include_state": True,
            "auto_reset": env.train.auto_reset,
        }
        super().__init__(ToyVectorEnv, kwargs, 2)
        self.start()


class Right:
    """Goes to the right, which solves some episodes."""

    version = 0
    num_threads = 1

    def act(self, observation: Observation, compute_values: bool, generators: object = None) -> PolicyOutput:
        batch = observation.batch_size
        actions = np.zeros((batch, CHUNK, 7), np.float32)
        actions[:, :, 0] = 1
        seen = {"seen": torch.from_numpy(observation.state.copy())}
        return PolicyOutput(actions, torch.zeros(batch, CHUNK, 7), self.values(observation), seen, 0)

    def values(self, observation: Observation) -> torch.Tensor:
        return torch.zeros(observation.batch_size, 1)

    def update_weights(self, weights: object, version: int) -> None: ...

    def offload(self) -> None: ...

    def random_state(self) -> list[str]:
        return ["none"]

    def set_random_state(self, states: list[str]) -> None: ...


class Worker(SyncCollector):
    """Keeps how rollouts began."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, Pool(config), Right(), lambda: False)  # pyright: ignore[reportArgumentType]
        self.began: list[Starts] = []
        self._choose = self.starts.choose
        self.starts.choose = self.keep

    def keep(self, iteration: int, epoch: int, seeds: Any, tasks: Any) -> Starts:
        self.began.append(self._choose(iteration, epoch, seeds, tasks))
        return self.began[-1]

    def pairs(self, rollout: int) -> list[tuple[int, int]]:
        """Return the seeds and tasks with which a rollout began."""
        began = self.began[rollout]
        return list(zip(began.seeds.tolist(), began.tasks.tolist(), strict=True))


def iterate(worker: SyncCollector, iterations: range) -> list[TrajectoryBatch]:
    batches: list[TrajectoryBatch] = []
    for iteration in iterations:
        batches.append(worker.gather(iteration)[0])
        worker.update_weights([], iteration)
    return batches


def fresh(worker: SyncCollector, iteration: int) -> list[tuple[int, int]]:
    seeds, tasks = worker.schedule.draw(iteration, 0)
    return list(zip(seeds.tolist(), tasks.tolist(), strict=True))


def test_a_part_of_the_episodes_takes_failed_seeds_with_their_tasks() -> None:
    worker = Worker(config_of(AGAIN))
    batch, metrics = worker.gather(0)
    began = worker.pairs(0)
    assert began == fresh(worker, 0), "nothing has failed yet"
    assert batch.success is not None and worker.starts.failed is not None
    solved = batch.success.any(0).tolist()
    failed = {pair for pair, good in zip(began, solved, strict=True) if not good}
    known = set(worker.starts.failed.failed())
    assert failed and failed < set(began) and failed <= known and metrics["rollout/failed_seeds"] == len(known)
    worker.update_weights([], 1)
    worker.gather(1)
    again = worker.pairs(1)
    assert len(set(again) & known) == min(NUM_ENVS // 2, len(known)) and set(again) <= known | {*fresh(worker, 1)}


def test_groups_take_a_failed_seed_together() -> None:
    worker = Worker(config_of(AGAIN, "algorithm.group_size=2"))
    iterate(worker, range(4))
    assert worker.pairs(3) != fresh(worker, 3)
    for rollout in range(4):
        assert worker.pairs(rollout)[::2] == worker.pairs(rollout)[1::2]


def test_without_it_rows_are_those_of_the_schedule() -> None:
    worker = Worker(config_of())
    _, metrics = worker.gather(0)
    worker.update_weights([], 1)
    worker.gather(1)
    assert [worker.pairs(0), worker.pairs(1)] == [fresh(worker, 0), fresh(worker, 1)]
    assert "rollout/failed_seeds" not in metrics and set(worker.state().state) == {"random"}


def same(left: list[TrajectoryBatch], right: list[TrajectoryBatch]) -> bool:
    names = ("rewards", "valid", "terminated", "truncated", "success", "task_id")
    return all(torch.equal(a[name], b[name]) for a, b in zip(left, right, strict=True) for name in names)


def check_resume(config: Config) -> None:
    """A run that continues and one that resumes from a checkpoint have the same rollouts."""
    worker = Worker(config)
    iterate(worker, range(3))
    saved = worker.state()
    other = Worker(config)
    other.load_state(RolloutState(json.loads(json.dumps(saved.state)), saved.tensors, saved.blobs), 3)
    assert other.starts.state() == worker.starts.state() != {}
    assert same(iterate(worker, range(3, 6)), iterate(other, range(3, 6)))
    assert [worker.pairs(n) for n in range(3, 6)] == [other.pairs(n) for n in range(3)]
    assert worker.starts.state() == other.starts.state()


def test_failed_seeds_resume_to_the_bit() -> None:
    check_resume(config_of(AGAIN))


def test_an_undone_update_leaves_no_outcomes() -> None:
    worker = Worker(config_of(AGAIN))
    iterate(worker, range(2))
    before = worker.starts.state()
    worker.gather(2)
    assert worker.starts.state() != before
    worker.undo()
    assert worker.starts.state() == before
    worker.gather(2)
    assert worker.pairs(-1) == worker.pairs(-2)


def test_the_newest_outcome_counts_and_old_seeds_are_forgotten() -> None:
    memory = FailedSeeds(3)
    memory.learn([EndedEpisode(0, 0, 11, 0, False), EndedEpisode(1, 0, 12, 1, False)])
    memory.learn([EndedEpisode(0, 0, 11, 0, True), EndedEpisode(1, 0, 13, 0, True), EndedEpisode(2, 0, 13, 0, False)])
    assert memory.failed() == [(12, 1), (13, 0)], "13 failed in one of the two episodes of its group"
    memory.learn([EndedEpisode(0, 0, 14, 0, False)])
    assert memory.failed() == [(13, 0), (14, 0)]


@pytest.mark.parametrize("fraction", ["env.train.failed_seed_fraction=0.5", "env.train.start_from_demos=."])
@pytest.mark.parametrize(
    "setting",
    ["runner.max_staleness=1", "env.train.use_fixed_reset_state_ids=true", "rollout.own_process=true"],
)
def test_outcomes_that_are_not_known_are_refused(fraction: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=fraction.partition("=")[0]):
        config_of(fraction, setting)
