"""Groups that branch: where they begin, what counts, and their advantages, against hand-computed numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from echo_env import EchoVectorEnv
from expect import raises_code

from embodrl.algorithms.advantages import compute_advantages
from embodrl.config import load_config
from embodrl.config.schema import Config
from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.errors import EnvError
from embodrl.types import CameraSpec, EnvSpec, EnvStep, Observation, PolicyOutput
from embodrl.workers.collector import EpisodeSchedule, Share, SyncCollector
from embodrl.workers.env import check_environments
from embodrl.workers.lockstep import LockstepRunner, Shard
from embodrl.workers.play import take_turns

CHUNK, LIMIT, NUM_ENVS = 2, 4, 4  # actions in a chunk, chunks in an episode
FIXED = (
    "env=toy",
    "algorithm=branch",
    "algorithm.group_size=2",
    "algorithm.rollout_epoch=1",
    "env.tasks=[reach-red]",
    f"env.max_episode_steps={CHUNK * LIMIT}",
    f"env.train.total_num_envs={NUM_ENVS}",
    "env.num_processes=1",
    f"model.num_action_chunks={CHUNK}",
)
SEEDS, TASKS = np.zeros(NUM_ENVS, np.int64), np.zeros(NUM_ENVS, np.int32)


def config_of(*overrides: str) -> Config:
    return load_config([*FIXED, *overrides]).config


class Adder:
    """The reward of a chunk is the first number of its first action; what is seen is the sum so far.

    Args:
        ends: the chunk (from 1) with which an episode ends before the limit, and the environment; None for none.
        lost: a fault of the simulator ends it.
    """

    def __init__(self, ends: tuple[int, int] | None = None, lost: bool = False) -> None:
        camera = CameraSpec("base", 1, 1)
        self.spec = EnvSpec(NUM_ENVS, (camera,), 1, 7, (-1.0,) * 7, (1.0,) * 7, CHUNK, ("reach-red",))
        self.managers = ()
        self.ends, self.lost = ends, lost
        self.called: list[str] = []

    def split(self, num_parts: int) -> list[Adder]:
        return [self]

    def call(self, method: str, *, restart: bool = False) -> None:
        self.called.append(method)

    def _observation(self) -> Observation:
        images = np.zeros((NUM_ENVS, 1, 1, 1, 3), np.uint8)
        state = self.total[:, None].astype(np.float32)
        return Observation(images, state, ["add"] * NUM_ENVS, np.zeros(NUM_ENVS, np.int32))

    def reset(self, seeds: np.ndarray, tasks: np.ndarray) -> Observation:
        self.called.append("reset")
        self.total, self.chunks = np.zeros(NUM_ENVS), np.zeros(NUM_ENVS, np.int64)
        return self._observation()

    def step_async(self, actions: np.ndarray, active: np.ndarray) -> None:
        reward, valid = np.zeros((NUM_ENVS, CHUNK), np.float32), np.repeat(active[:, None], CHUNK, 1)
        reward[active, 0] = actions[active, 0, 0]
        self.total += reward[:, 0]
        self.chunks += active
        terminated, truncated = np.zeros_like(valid), np.zeros_like(valid)
        terminated[:, -1] = active & (self.chunks == LIMIT)
        if self.ends is not None and active[self.ends[1]] and self.chunks[self.ends[1]] == self.ends[0]:
            terminated[self.ends[1], -1] = not self.lost
            truncated[self.ends[1], 0] = self.lost
            valid[self.ends[1]] = not self.lost
        nothing = np.zeros(NUM_ENVS, np.bool_)
        self.pending = EnvStep(
            *(self._observation(), reward, valid, terminated, truncated, nothing, self.total.astype(np.float32)),
            *((self.chunks * CHUNK).astype(np.int32), SEEDS, nothing, None),
        )

    def wait(self) -> EnvStep:
        return self.pending

    def step(self, actions: np.ndarray, active: np.ndarray) -> EnvStep:
        self.step_async(actions, active)
        return self.pending

    def get_row_states(self, rows: list[int]) -> dict[int, object]:
        return {row: (self.total[row], self.chunks[row]) for row in rows}

    def set_row_states(self, states: Mapping[int, Any]) -> None:
        for row, (total, chunks) in states.items():
            self.total[row], self.chunks[row] = total, chunks


class Counter:
    """The n-th call answers n, n + 10, n + 20, ... in its rows."""

    version = 0

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def act(self, observation: Observation, compute_values: bool, generators: object = None) -> PolicyOutput:
        assert not compute_values
        self.seen.append(observation.state[:, 0].tolist())
        batch = observation.batch_size
        actions = np.zeros((batch, CHUNK, 7), np.float32)
        actions[:, 0, 0] = len(self.seen) + 10 * np.arange(batch)
        seen = torch.from_numpy(observation.state.copy())
        return PolicyOutput(actions, torch.zeros(batch, CHUNK, 7), None, {"seen": seen}, self.version)

    def random_state(self) -> list[str]:
        return []

    def make_generators(self, numbers: object) -> None:
        return None

    def offload(self) -> None: ...


def play(config: Config, points: list[int], env: Adder) -> tuple[Any, int, Counter]:
    policy = Counter()
    stage: Any = LockstepRunner(config, env, policy, slice(0, NUM_ENVS))  # pyright: ignore[reportArgumentType]
    stage.begin(SEEDS, TASKS)
    num_steps = stage.branch(np.array(points), lambda: False)
    take_turns([stage.play])
    return stage.stack(torch.tensor([0, 0, 1, 1])), num_steps, policy


def test_members_continue_from_the_leader_and_are_each_others_baseline() -> None:
    config = config_of()
    batch, num_steps, policy = play(config, [1, 1, 3, 3], Adder())
    # Leaders: 0 and 0 earn 1 and 11, then the second one 2 and 3. What they played is not in the batch.
    assert policy.seen[:3] == [[0, 0], [11], [13]] and num_steps == 4 * CHUNK
    assert batch.forward_inputs["seen"][0, :, 0].tolist() == [1, 1, 16, 16]
    assert batch.rewards[..., 0].tolist() == [[4, 14, 24, 34], [5, 15, 0, 0], [6, 16, 0, 0], [0, 0, 0, 0]]
    assert batch.valid.all(-1).sum(0).tolist() == [3, 3, 1, 1]
    # Returns from the branch point on: 15 and 45, 24 and 34.
    found = compute_advantages(batch, config.algorithm).advantages[..., 0]
    assert found.tolist() == [[-30, 30, -10, 10], [-30, 30, 0, 0], [-30, 30, 0, 0], [0, 0, 0, 0]]


def test_a_shard_of_rollouts_that_run_ahead_branches_alike() -> None:
    points, groups = [1, 1, 3, 3], torch.tensor([0, 0, 1, 1])
    wanted, num_steps, _ = play(config_of(), points, Adder())
    env = Adder()
    stage: Any = LockstepRunner(config_of(), env, Counter(), slice(0, NUM_ENVS))  # pyright: ignore[reportArgumentType]
    shard = Shard(0, SEEDS, TASKS, groups, (7, 0), points=np.array(points))
    for _ in range(2):  # whatever the stage has played before
        stage.engine.seen.clear()
        batch = stage.roll_out(shard, lambda: False)
        for name in ("rewards", "valid", "terminated", "group_id"):
            assert torch.equal(batch[name], wanted[name]), name
        assert batch.meta["env_steps"] == int(wanted.valid.sum()) + num_steps == (8 + 4) * CHUNK
    assert env.called == ["rebuild", "reset"] * 2
    from_resets = stage.roll_out(Shard(0, SEEDS, TASKS, groups, (7, 0)), lambda: False)
    assert from_resets.valid.all() and from_resets.meta["env_steps"] == NUM_ENVS * LIMIT * CHUNK


def test_a_shard_has_the_points_of_its_part_of_a_rollout() -> None:
    schedule = EpisodeSchedule(config_of(), NUM_ENVS, 1)
    points = schedule.branch_points(5, 1)
    shards = [schedule.shard(5, 1, (0, place), slice(2 * place, 2 * place + 2)) for place in range(2)]
    assert [shard.points.tolist() for shard in shards if shard.points is not None] == points.reshape(2, 2).tolist()
    seeds, tasks = schedule.draw(5, 1)
    assert np.concatenate([shard.seeds for shard in shards]).tolist() == seeds.tolist()
    assert np.concatenate([shard.task_ids for shard in shards]).tolist() == tasks.tolist()
    whole = EpisodeSchedule(config_of("algorithm=rloo", "algorithm.branch.enabled=false"), NUM_ENVS, 1).shard(5, 1, ())
    assert whole.points is None and whole.seeds.tolist() == seeds.tolist()


@pytest.mark.parametrize(
    ("ends", "lost", "begins", "chunks"),
    [
        ((2, 2), False, 1, 2),  # the leader's second chunk ends its episode: back to before it
        ((1, 2), False, 0, 1),  # its first one: back to the reset
        ((2, 2), True, 1, 1),  # a lost chunk was not simulated
        (None, False, 6, 4),  # at the limit
    ],
)
def test_a_leader_that_ends_early_branches_before_its_last_chunk(
    ends: tuple[int, int] | None, lost: bool, begins: float, chunks: int
) -> None:
    env = Adder(ends, lost)
    stage: Any = LockstepRunner(config_of(), env, Counter(), slice(0, NUM_ENVS))  # pyright: ignore[reportArgumentType]
    stage.begin(SEEDS, TASKS)
    assert stage.branch(np.array([0, 0, LIMIT, LIMIT]), lambda: False) == chunks * CHUNK
    assert env.total.tolist() == [0, 0, begins, begins], "the leader adds 1, 2, 3 and 4"


def test_prefixes_are_steps_of_the_rollout_and_need_scenes_without_history() -> None:
    config = config_of()
    env = Adder()
    worker: Any = SyncCollector(config, env, Counter(), lambda: False)  # pyright: ignore[reportArgumentType]
    batch, _ = worker.gather(3)
    points = worker.schedule.branch_points(3, 0)
    assert points.any() and env.called == ["mark", "rebuild", "reset"]
    # Each leader plays the prefix of its group, each environment the rest of the episode.
    assert batch.meta["env_steps"] == (points[::2].sum() + (LIMIT - points).sum()) * CHUNK
    assert int(batch.valid.sum()) == (LIMIT - points).sum() * CHUNK
    with pytest.raises(InterruptedError):
        SyncCollector(config, env, Counter(), lambda: True).gather(3)  # pyright: ignore[reportArgumentType]


def test_branch_points_are_uniform_equal_within_a_group_and_new_in_every_rollout() -> None:
    config = config_of("env.train.total_num_envs=4000", "algorithm.group_size=4")
    schedule = EpisodeSchedule(config, 4000, 1)
    points = schedule.branch_points(0, 0)
    assert (points.reshape(-1, 4) == points[::4, None]).all()
    counts = np.bincount(points[::4])
    assert len(counts) == LIMIT and counts.min() > 200, "0 to the last chunk of an episode"
    assert (schedule.branch_points(0, 0) == points).all()
    assert (schedule.branch_points(0, 1) != points).any() and (schedule.branch_points(1, 0) != points).any()
    shares = [EpisodeSchedule(config, 4000, 1, Share(rank, 2)).branch_points(0, 0) for rank in range(2)]
    assert np.concatenate(shares).tolist() == points.tolist()
    shorter = config_of("algorithm.branch.max_chunks=1")
    assert set(EpisodeSchedule(shorter, 4000, 1).branch_points(0, 0)) == {0, 1}


@pytest.mark.parametrize("question", ["check_state", "check_row_state"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_simulators_that_cannot_tell_their_state_are_refused(question: str, ahead: int) -> None:
    class Stateless(Adder):
        def call(self, method: str, *, restart: bool = False) -> Any:
            return ["World keeps no state" if method == question else []]

    with raises_code("env-state-unsupported", EnvError, "algorithm.branch"):
        check_environments(config_of(f"runner.max_staleness={ahead}"), Stateless())  # pyright: ignore[reportArgumentType]


def test_an_environment_tells_whether_it_keeps_states_of_single_rows() -> None:
    assert "EchoVectorEnv" in str(EchoVectorEnv(1, 8, 2).call("check_row_state", {}))
    assert ToyVectorEnv(num_envs=1).call("check_row_state", {}) == ""
