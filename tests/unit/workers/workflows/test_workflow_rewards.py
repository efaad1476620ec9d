"""Episodes of workflows are judged when they end, while the others play, and as if judged after the rollout."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_workflow import NUM_ENVS, SETTINGS, TASK, Compass, rollout

from embodrl.config import load_config
from embodrl.envs.pool.pool import EnvPool
from embodrl.workers.env import make_pool
from embodrl.workers.episode import Episode
from embodrl.workers.recorders import Judging
from embodrl.workers.reward import RewardWorker
from embodrl.workers.workflows.workflow import Chunk, ChunkWorkflow, EpisodeTask, Trajectory, judged

PATIENCE_S = 60.0
judged_episodes: list[Episode] = []
began, played = threading.Event(), threading.Event()


def everything(episode: Episode) -> float:
    """Return a number that depends on all that the episode of a workflow has."""
    judged_episodes.append(episode)
    seen = (episode.rewards, episode.frames, episode.policy_version)
    told = 10 * episode.success + 100 * episode.finished + 1000 * len(episode.task)
    return sum(float(part.double().sum()) for part in seen) + told


def meets_another(episode: Episode) -> float:
    began.set()
    assert played.wait(PATIENCE_S), "the rollout waits for a reward"
    return everything(episode)


CONFIG = load_config([*SETTINGS, "reward.fn=test_workflow_rewards:everything"]).config
MEETING = load_config([*SETTINGS, "reward.fn=test_workflow_rewards:meets_another", "reward.retries=0"]).config


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvPool]:
    with make_pool(CONFIG, NUM_ENVS) as made:
        yield made


class Uneven(ChunkWorkflow):
    """Cuts episodes off, after other numbers of chunks, and rejects one; the second waits for the first's reward."""

    def __init__(self, waits: bool = False) -> None:
        self.waits = waits
        self.begun = 0

    async def run_episode(self, engine: Any, env: Any, task: EpisodeTask) -> Trajectory | None:
        number, self.begun = self.begun, self.begun + 1
        if number == 1 and self.waits:
            assert await asyncio.to_thread(began.wait, PATIENCE_S), "no reward is computed while episodes play"
        trajectory = await super().run_episode(engine, env, replace(task, max_chunks=1 + number % task.max_chunks))
        if number == 1:
            played.set()
        return None if number == 5 else trajectory


def test_an_episode_is_judged_while_another_plays(pool: EnvPool) -> None:
    rewards = RewardWorker(MEETING, tuple(pool.spec.tasks))
    judged_episodes.clear()
    batch, metrics = rollout(pool, Uneven(waits=True), MEETING, judging=rewards.judging).gather(0)
    assert metrics["workflow/failed_episodes"] == 0 and metrics["workflow/rejected_episodes"] == 1
    assert batch.call_id is not None and int((batch.call_id >= 0).sum()) == NUM_ENVS - 1
    assert rewards.apply(batch)["reward/errors"] == 0 and batch.call_id is None
    assert len(judged_episodes) == NUM_ENVS - 1, "each once"
    rewards.close()


def test_the_rewards_are_those_of_judging_after_the_rollout(pool: EnvPool) -> None:
    paid: list[torch.Tensor] = []
    for at_once in (True, False):
        rewards = RewardWorker(CONFIG, tuple(pool.spec.tasks))
        judging = rewards.judging if at_once else Judging(keep_frames=True)
        batch, _ = rollout(pool, Uneven(), CONFIG, judging=judging).gather(0)
        judged_episodes.clear()
        assert (batch.call_id is not None) == at_once
        metrics = rewards.apply(batch)
        assert metrics["reward/errors"] == 0 and metrics["reward/std"] > 0
        paid.append(batch.rewards)
        rewards.close()
    assert torch.equal(*paid)


def test_a_trajectory_may_hold_several_episodes_and_a_fault() -> None:
    def chunk(reward: float, valid: bool = True, terminated: bool = False) -> Chunk:
        flags = torch.tensor([valid, False])
        ends = torch.tensor([terminated, False])
        lost = torch.tensor([not valid, False])
        told = (torch.zeros(1, 1), torch.zeros(1), torch.tensor([reward, 0.0]), flags, ends, lost)
        return Chunk({}, *told, terminated, int(reward), torch.full((2, 2, 3), int(reward), dtype=torch.uint8))

    trajectory = Trajectory(TASK, [chunk(1), chunk(2, terminated=True), chunk(3), chunk(0, valid=False)])
    found: list[Episode] = []

    def judge(episode: Episode) -> int:
        found.append(episode)
        return 6 + len(found)

    returned = judged(trajectory, 4, ["reach-red", "reach-green"], judge)
    assert [each.call_id for each in returned.chunks] == [-1, 7, 8, -1]
    assert [each.call_id for each in trajectory.chunks] == [-1] * 4, "what the workflow keeps is left as it is"
    first, second = found
    assert first.rewards.tolist() == [1, 2] and first.policy_version.tolist() == [1, 2]
    assert first.finished and first.success and first.task == "reach-red" and first.frames.shape == (2, 2, 2, 3)
    assert second.rewards.tolist() == [3] and not second.finished and not second.success
    cut_off = judged(Trajectory(TASK, [chunk(4)]), 4, ["reach-red"], judge)
    assert found[-1].finished and not cut_off.done
    judged(Trajectory(TASK, [chunk(4)]), 1, ["reach-red"], judge)
    assert not found[-1].finished, "the rollout ends, not the episode"


def test_episodes_without_frames_fail(pool: EnvPool) -> None:
    class Blind(ChunkWorkflow):
        async def run_episode(self, engine: Any, env: Any, task: EpisodeTask) -> Trajectory:
            blind = len(judged_episodes) == 0 and task.seed % 2 == 0
            return await super().run_episode(engine, env, replace(task, keep_frames=not blind))

    rewards = RewardWorker(CONFIG, tuple(pool.spec.tasks))
    judged_episodes.clear()
    batch, metrics = rollout(pool, Blind(), CONFIG, engine=Compass(), judging=rewards.judging).gather(0)
    lost = int((~batch.valid.any(-1).any(0)).sum())
    assert metrics["workflow/failed_episodes"] == lost and 0 < lost < NUM_ENVS
    rewards.close()
