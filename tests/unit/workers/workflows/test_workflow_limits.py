"""Workflows at their limits: shards of which nothing is left, episodes that never end, frames that are not used."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expect import raises_code
from test_workflow import CONFIG, NUM_ENVS, SETTINGS, Compass, rollout

from embodrl.config import load_config
from embodrl.config.schema import Config
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EmbodrlError, WorkflowError
from embodrl.workers.env import make_pool
from embodrl.workers.recorders import Judging
from embodrl.workers.workflows.runner import MAX_ATTEMPTS
from embodrl.workers.workflows.workflow import ChunkWorkflow, EpisodeTask, Trajectory, stack_trajectories


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvPool]:
    with make_pool(CONFIG, NUM_ENVS) as made:
        yield made


class Recorded(Compass):
    """Tells what numbers episodes draw from."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds: set[tuple[int, ...]] = set()

    def row_generators(self, seeds: Any) -> None:
        self.seeds |= set(seeds)


class RejectsFirst(ChunkWorkflow):
    """Rejects every episode of the first attempts, some by raising."""

    def __init__(self, plays: int, failing: int = 0) -> None:
        self.tasks: list[EpisodeTask] = []
        self.plays, self.failing = plays, failing

    async def run_episode(self, engine: Any, env: Any, task: EpisodeTask) -> Trajectory | None:
        number = len(self.tasks)
        self.tasks.append(task)
        trajectory = await super().run_episode(engine, env, task)
        if number >= self.plays * NUM_ENVS:
            return trajectory
        if number % NUM_ENVS < self.failing:
            raise RuntimeError("a hiccup")
        return None


def with_settings(*overrides: str) -> Config:
    return load_config([*SETTINGS, *overrides]).config


@pytest.mark.parametrize("failing", [0, 3])
def test_a_shard_that_is_rejected_as_a_whole_is_played_again(pool: EnvPool, failing: int) -> None:
    workflow, engine = RejectsFirst(2, failing), Recorded()
    batch, metrics = rollout(pool, workflow, engine=engine).gather(1)
    assert metrics["workflow/rejected_episodes"] == 2 * (NUM_ENVS - failing)
    assert metrics["workflow/failed_episodes"] == 2 * failing
    assert metrics["rollout/episodes"] == NUM_ENVS and batch.valid.any(-1)[0].all()
    plays = [[task.seed for task in workflow.tasks[i * NUM_ENVS : (i + 1) * NUM_ENVS]] for i in range(3)]
    assert len(workflow.tasks) == 3 * NUM_ENVS and len({seed for play in plays for seed in play}) == 3 * NUM_ENVS // 2
    assert all(play[0::2] == play[1::2] for play in plays), "groups begin in one state"
    # seed, iteration, epoch; then the play, if it is not the first; then row and call
    seed = CONFIG.runner.seed
    assert {numbers[:-2] for numbers in engine.seeds} == {(seed, 1, 0), (seed, 1, 0, 1), (seed, 1, 0, 2)}


def test_fixed_initial_states_stay_as_they_are_when_played_again(pool: EnvPool) -> None:
    workflow = RejectsFirst(1)
    rollout(pool, workflow, with_settings("env.train.use_fixed_reset_state_ids=true")).gather(0)
    seeds = [task.seed for task in workflow.tasks]
    assert seeds[:NUM_ENVS] == seeds[NUM_ENVS:]


def test_a_shard_is_not_retried_for_ever(pool: EnvPool) -> None:
    workflow = RejectsFirst(100, failing=1)
    with raises_code("workflow", WorkflowError, 48, 4, 44, "a hiccup"):
        rollout(pool, workflow).gather(0)
    assert len(workflow.tasks) == MAX_ATTEMPTS * NUM_ENVS


def test_a_play_in_which_everything_fails_is_the_last(pool: EnvPool) -> None:
    workflow = RejectsFirst(100, failing=NUM_ENVS)
    with raises_code("workflow", WorkflowError, "12"):
        rollout(pool, workflow).gather(0)
    assert len(workflow.tasks) == NUM_ENVS


class HangsOnce(ChunkWorkflow):
    """One episode waits forever, in the middle."""

    def __init__(self, how_many: int = 1) -> None:
        self.left = how_many

    async def run_episode(self, engine: Any, env: Any, task: EpisodeTask) -> Trajectory | None:
        if not self.left:
            return await super().run_episode(engine, env, task)
        self.left -= 1
        output = await engine.act(await env.initialize(task.name, task.seed))
        await env.execute("act", {"actions": output.actions[0]})
        self.hanging()
        await asyncio.Event().wait()
        return None

    def hanging(self) -> None:
        """For those who make the time pass."""


def test_an_episode_without_an_end_is_given_up_and_its_environment_continues(
    pool: EnvPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks, limits, timeout = dict[Any, asyncio.Timeout](), set[float | None](), asyncio.timeout

    def kept(limit: float | None) -> asyncio.Timeout:
        limits.add(limit)
        return clocks.setdefault(asyncio.current_task(), timeout(limit))

    class TimeIsOver(HangsOnce):
        def hanging(self) -> None:
            clocks[asyncio.current_task()].reschedule(0.0)

    monkeypatch.setattr(asyncio, "timeout", kept)
    worker = rollout(pool, TimeIsOver(), with_settings("rollout.episode_timeout_s=1000"))
    batch, metrics = worker.gather(0)
    assert limits == {1000.0}
    assert metrics["workflow/failed_episodes"] == 1 and metrics["workflow/rejected_episodes"] == 0
    assert not batch.valid[:, 0].any() and batch.valid[0, 1:].any(-1).all()
    again, metrics = worker.gather(1)
    wanted, _ = rollout(pool, ChunkWorkflow()).gather(1)
    assert metrics["workflow/failed_episodes"] == 0
    assert torch.equal(again.valid, wanted.valid) and torch.equal(again.rewards, wanted.rewards)


def test_if_all_episodes_take_too_long_the_run_stops_and_names_the_key(pool: EnvPool) -> None:
    with raises_code("workflow", WorkflowError, "0.5 s") as caught:
        rollout(pool, HangsOnce(NUM_ENVS), with_settings("rollout.episode_timeout_s=0.5")).gather(0)
    cause = caught.value.__cause__
    assert isinstance(cause, EmbodrlError) and "rollout.episode_timeout_s" in cause.hint


def test_a_time_limit_of_the_workflow_s_own_is_reported_as_such(pool: EnvPool) -> None:
    class Impatient(ChunkWorkflow):
        async def run_episode(self, engine: Any, env: Any, task: EpisodeTask) -> Trajectory | None:
            raise TimeoutError("the judge does not answer")

    with raises_code("workflow", WorkflowError, "TimeoutError: the judge does not answer"):
        rollout(pool, Impatient()).gather(0)


def test_the_time_limit_has_no_effect_without_a_workflow() -> None:
    loaded = load_config([*SETTINGS, "rollout.episode_timeout_s=5"])
    assert [note.key for note in loaded.notes if "rollout.workflow is null" in note.message] == [
        "rollout.episode_timeout_s"
    ]
    named = load_config(
        [*SETTINGS, "rollout.episode_timeout_s=null", "rollout.workflow=test_workflow_limits:HangsOnce"]
    )
    assert named.config.rollout.episode_timeout_s is None and not any("null" in note.message for note in named.notes)


@pytest.mark.parametrize("keep", [False, True])
def test_frames_are_kept_where_they_are_wanted(pool: EnvPool, keep: bool) -> None:
    class Watched(ChunkWorkflow):
        played: list[Trajectory]

        async def run_episode(self, engine: Any, env: Any, task: EpisodeTask) -> Trajectory:
            trajectory = await super().run_episode(engine, env, task)
            self.played = [*getattr(self, "played", []), trajectory]
            return trajectory

    workflow = Watched()
    batch, _ = rollout(pool, workflow, judging=Judging(keep)).gather(0)
    frames = [chunk.frame for trajectory in workflow.played for chunk in trajectory.chunks]
    assert all((frame is not None) == keep for frame in frames) and (batch.frames is not None) == keep
    if not keep:
        with raises_code("workflow-trajectory"):
            stack_trajectories(workflow.played, 4, torch.zeros(NUM_ENVS).long(), judging=Judging(True))
