"""Groups of episodes that begin and end independently, on the toy environment in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from test_async_rollout import PacedPolicy, closed_afterwards
from test_rollout import FaultyToy, KnownPolicy, ToyPool, config_of, worker_of

from embodrl.envs.pool.local import LocalPool
from embodrl.workers.async_collector import AsyncCollector
from embodrl.workers.collector import EpisodeSchedule, RolloutState
from embodrl.workers.lockstep import Shard
from embodrl.workers.remote_backend import RemoteStream
from embodrl.workers.streaming import ShardStream, StreamRunner, play_given

EPISODES = ("env.train.auto_reset=false", "env.train.max_steps_per_rollout_epoch=8")
STREAM = (*EPISODES, "runner.max_staleness=1", "rollout.streaming=true")


class RowPolicy(PacedPolicy):
    """Draws by row, and keeps what it was asked to draw from."""

    def __init__(self, chunks: int | None = None) -> None:
        super().__init__(chunks)
        self.numbers: list[list[tuple[int, ...]]] = []

    def row_generators(self, seeds: Any) -> None:
        self.numbers.append([*seeds])


class ShortToy(FaultyToy):
    """Episodes of the first environment end with their first chunk."""

    def chunk_step(self, actions: Any, active: Any) -> Any:
        step = super().chunk_step(actions, active)
        step.terminated[0, -1] |= bool(active[0])
        return step


class ShortPool(ToyPool):
    def __init__(self, config: Any) -> None:
        kwargs = {"num_envs": config.env.train.total_num_envs, "tasks": config.env.tasks, "image_size": 8}
        kwargs |= {"max_episode_steps": 16, "include_state": True, "auto_reset": False, "ignore_terminations": False}
        LocalPool.__init__(self, ShortToy, kwargs, 1)
        self.called: list[str] = []
        self.start()


class Processes:
    """Answers as rollout processes would, each with a pool; each may die in one of its requests."""

    def __init__(self, config: Any, make: Callable[[], StreamRunner], size: int) -> None:
        self.config, self.make = config, make
        self.runners = [make() for _ in range(size)]
        self.about = {"num_envs": self.runners[0].pool.spec.num_envs}
        self.dies_at: dict[int, int] = {}
        self.asked: list[list[list[int]]] = [[] for _ in range(size)]

    def call(self, method: str, arguments: Any, ranks: list[int], should_stop: Callable[[], bool]) -> list[Any]:
        assert method == "stream"
        ((shards, shards_a_journal),), (rank,) = arguments, ranks
        given = {number: Shard(**shard) for number, shard in shards}
        while True:
            self.asked[rank].append([*given])
            ended = play_given(self.runners[rank], given, shards_a_journal, should_stop)
            if len(self.asked[rank]) != self.dies_at.get(rank):
                return [{"ended": [{"number": n, "batch": batch, "rewards": None} for n, batch in ended]}]
            self.runners[rank] = self.make()

    def accept_batch(self, answer: Any) -> Any:
        return answer["batch"]


class Parts:
    def __init__(
        self, *overrides: str, policy: RowPolicy | None = None, pool: Any = ToyPool, processes: int = 0
    ) -> None:
        self.config = config_of(*STREAM, *overrides)
        self.policy = policy or RowPolicy()
        self.pools: list[Any] = []
        engine: Any = self.policy

        def make() -> StreamRunner:
            self.pools.append(pool(self.config))
            return StreamRunner(self.config, self.pools[-1], engine)

        streams: list[ShardStream]
        if processes:
            self.processes: Any = Processes(self.config, make, processes)
            self.runner = self.processes.runners[0]
            streams = [RemoteStream(self.processes, rank) for rank in range(processes)]
        else:
            self.runner = make()
            streams = [self.runner]
        self.pool = self.pools[0]
        schedule = EpisodeSchedule(self.config, self.pool.spec.num_envs * len(streams), len(self.pool.spec.tasks))
        self.worker = AsyncCollector(self.config, schedule, streams, engine, lambda: False)


@pytest.fixture(params=[0, 1], ids=["here", "in a process"])
def started(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    yield from closed_afterwards(partial(Parts, processes=request.param))


@pytest.mark.parametrize("group_size", [1, 2])
def test_the_first_update_has_the_episodes_of_a_synchronous_run(started: Any, group_size: int) -> None:
    groups = f"algorithm.group_size={group_size}"
    parts = started(groups, "runner.max_iterations=2")
    batch, metrics = parts.worker.gather(0)
    reference, expected = worker_of(config_of(*EPISODES, groups), KnownPolicy(0.1))[0].gather(0)
    for name in ("rewards", "valid", "terminated", "values", "task_id", "group_id", "success", "policy_version"):
        torch.testing.assert_close(getattr(batch, name), getattr(reference, name), rtol=0, atol=0)
    acted = batch.valid.any(-1)
    torch.testing.assert_close(batch.forward_inputs["seen"][acted], reference.forward_inputs["seen"][acted])
    assert batch.meta == reference.meta
    assert metrics["rollout/episodes"] == expected["rollout/episodes"] == 4
    assert parts.runner.num_shards == 4 // group_size == parts.worker.gate.batch_size


def test_an_update_takes_what_has_ended_while_others_go_on(started: Any) -> None:
    small = ("env.train.total_num_envs=2", "env.tasks=[reach-red]", "env.max_episode_steps=16")
    small += ("env.train.max_steps_per_rollout_epoch=16",)
    parts = started(*small, "runner.max_iterations=3", policy=RowPolicy(2), pool=ShortPool)
    worker, policy = parts.worker, parts.policy
    batch, _ = worker.gather(0)  # two chunks are enough for two episodes of the first environment
    assert batch.valid.any(-1).sum(0).tolist() == [1, 1] and batch.group_id[0].tolist() == [0, 1]
    assert next(iter(worker.gate.running.values())) == 0 and worker.state().state["again"][0] == 1
    worker.update_weights([], 1)
    policy.allowed.release(2)
    second, _ = worker.gather(1)
    long = int(second.valid.any(-1).sum(0).argmax())
    assert second.policy_version[:, long].tolist() == [0, 0, 1, 1], "the episode went on over the update"
    assert int(second.policy_version[second.valid.any(-1)].min()) == 0
    numbers = [row for asked in policy.numbers for row in asked]
    assert len(set(numbers)) == len(numbers), "no two chunks draw from the same numbers"


def test_simulators_forget_their_history_between_episodes(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodrl.workers.async_collector._SHARDS_A_JOURNAL", 2)
    parts = started("runner.max_iterations=5")
    call = parts.pool.call
    running: list[int] = []

    def noted(method: str, *arguments: Any, **options: Any) -> Any:
        if method == "rebuild":
            running.append(len(parts.worker.gate.running))
        return call(method, *arguments, **options)

    parts.pool.call = noted
    for version in range(5):
        parts.worker.gather(version)
        parts.worker.update_weights([], version + 1)
    assert parts.pool.envs[0].num_rebuilds == 2, "twenty shards of four environments, a rebuild after every eight"
    assert all(running), "nobody else, such as an evaluation, may use the simulators meanwhile"


def test_all_begin_again_when_a_simulator_was_lost_between_two_chunks(started: Any) -> None:
    parts = started("runner.max_iterations=2")
    reset = parts.pool.reset

    def fail_once(*arguments: Any, **options: Any) -> Any:
        parts.pool.reset = reset
        parts.pool.faults.restarts += 1
        return reset(*arguments, **options)

    parts.pool.reset = fail_once
    batch, _ = parts.worker.gather(0)
    reference, _ = worker_of(config_of(*EPISODES), KnownPolicy(0.1))[0].gather(0)
    torch.testing.assert_close(batch.rewards, reference.rewards, rtol=0, atol=0)
    assert parts.worker.gate.rejected == 0


def test_a_checkpoint_loses_and_repeats_no_episode(started: Any) -> None:
    parts = started("runner.max_iterations=3")
    trained = [parts.worker.gather(0)[0]]
    parts.worker.update_weights([], 1)
    with parts.worker.paused():
        saved = parts.worker.state()
    resumed = started("runner.max_iterations=3")
    resumed.policy.version = 1
    resumed.worker.load_state(RolloutState(saved.state, saved.tensors), 1)
    for version in (1, 2):
        trained.append(resumed.worker.gather(version)[0])
        resumed.worker.update_weights([], version + 1)
    drawn = np.concatenate([parts.worker.schedule.draw(iteration, 0)[0] for iteration in range(3)])
    played = [seed for one in (parts, resumed) for env in one.pool.envs for seeds in env.resets for seed in seeds]
    assert sorted(set(played) - {0}) == sorted(drawn.tolist())
    assert sum(int(batch.valid.any(-1).any(0).sum()) for batch in trained) == 12


@pytest.mark.parametrize("started", [2], indirect=True)
def test_who_dies_gives_its_episodes_to_its_successor(started: Any) -> None:
    """Each is trained on once, under its number and within the bound, whoever plays it."""
    small = ("env.train.total_num_envs=2", "env.tasks=[reach-red]", "env.max_episode_steps=16")
    small += ("env.train.max_steps_per_rollout_epoch=16", "runner.max_iterations=4")
    parts = started(*small, pool=ShortPool)
    parts.processes.dies_at = {0: 1, 1: 2}
    for version in range(4):
        batch, metrics = parts.worker.gather(version)
        assert metrics["rollout/episodes"] == parts.worker.gate.batch_size == 4
        assert version - int(batch.policy_version[batch.valid.any(-1)].min()) <= 1
        parts.worker.update_weights([], version + 1)
    assert parts.worker.gate.version == 4 and parts.worker.gate.rejected == 0
    assert not parts.worker.gate.running and parts.worker._shards.next == 16
    assert len(parts.pools) == 4, "two processes and their successors"
    of_first, of_second = [[{*asked} for asked in mine] for mine in parts.processes.asked]
    assert of_first[0] == of_first[1] and of_second[1] == of_second[2], "a successor is asked for the same"
    assert set.union(*of_first).isdisjoint(set.union(*of_second))
    assert set.union(*of_first, *of_second) == {*range(16)}


@pytest.mark.parametrize("started", [1], indirect=True)
def test_a_process_with_room_is_asked_after_each_chunk(started: Any) -> None:
    """So that what may begin later begins while the others go on."""
    parts = started("runner.max_iterations=2")
    runner = parts.runner
    shards = {0: parts.worker._shard(0)}
    assert play_given(runner, shards, 64, lambda: False) == [] and runner.numbers == [0]
    both = shards | {1: parts.worker._shard(1)}
    while not (ended := play_given(runner, both, 64, lambda: False)):
        assert runner.numbers == [0, 1]
    assert [number for number, _ in ended] == [0] and runner.numbers == [1], "the second began a chunk later"
    assert play_given(runner, {2: parts.worker._shard(2)}, 64, lambda: False) == [] and runner.numbers == [2]
    with pytest.raises(InterruptedError):
        play_given(runner, {2: parts.worker._shard(2)}, 64, lambda: True)
    assert runner.numbers == []
