"""Groups that branch, on the toy environment in processes of its own."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runs import TINY

from embodrl import Session
from embodrl.config import load_config
from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.hybrid_engines.rollout.native import make_rollout_engine
from embodrl.types import Observation, PolicyOutput
from embodrl.workers.async_collector import AsyncCollector, make_runners
from embodrl.workers.collector import EpisodeSchedule, SyncCollector
from embodrl.workers.env import make_pool
from embodrl.workers.policy import build_policy

GROUP, NUM_ENVS, CHUNK, CHUNKS = 4, 16, 3, 4
SETTINGS = (
    "algorithm=branch",
    f"algorithm.group_size={GROUP}",
    "algorithm.rollout_epoch=1",
    "env.train.auto_reset=false",
    f"env.max_episode_steps={CHUNK * CHUNKS}",
    f"env.train.max_steps_per_rollout_epoch={CHUNK * CHUNKS}",
    f"env.train.total_num_envs={NUM_ENVS}",
    "env.num_processes=2",
)


def config_of(tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.replace("extensions: [stop_at]", "").replace("critic_warmup_iterations: 1, ", ""))
    return load_config([*SETTINGS, *overrides], path).config


def gather(config: Config, engine: Any, iteration: int = 1) -> TrajectoryBatch:
    with make_pool(config, NUM_ENVS) as pool:
        return SyncCollector(config, pool, engine, lambda: False).gather(iteration)[0]


class Seeing:
    """Keeps what it sees, and does the same wherever it sees the same."""

    version = 0

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def act(self, observation: Observation, compute_values: bool, generators: object = None) -> PolicyOutput:
        self.seen.append(observation.select(np.arange(observation.batch_size)))
        batch = observation.batch_size
        level = observation.images.reshape(batch, -1).mean(1) / 255
        actions = np.broadcast_to(level[:, None, None], (batch, CHUNK, 7)).astype(np.float32)
        return PolicyOutput(actions, torch.zeros(batch, CHUNK, 7), None, {"level": torch.from_numpy(level)}, 0)

    def random_state(self) -> list[str]:
        return []

    def make_generators(self, numbers: object) -> None:
        return None

    def update_weights(self, weights: object, version: int) -> None: ...

    def offload(self) -> None: ...


def test_all_members_begin_bit_identically_in_the_midst_of_an_episode(tmp_path: Path) -> None:
    config, policy = config_of(tmp_path), Seeing()
    batch = gather(config, policy)
    points = EpisodeSchedule(config, NUM_ENVS, 2).branch_points(1, 0)
    assert len(set(points.tolist())) > 2
    first = policy.seen[points.max()]  # before it come the prefixes, which leaders alone play
    assert [seen.batch_size for seen in policy.seen[: points.max()]] == [
        int((points[::GROUP] > played).sum()) for played in range(points.max())
    ]
    leaders = np.arange(NUM_ENVS) // GROUP * GROUP
    for array in (first.images, first.state, first.task_id, np.array(first.instruction)):
        np.testing.assert_array_equal(array, array[leaders])
    playing = leaders[::GROUP][points[::GROUP] > 0]
    assert (first.images[playing] != policy.seen[0].images).any(), "it is not where they were reset"
    # The same actions lead to the same, up to the end of an episode of which the prefix is a part.
    for name in ("rewards", "valid", "terminated", "truncated", "success"):
        column = batch[name]
        assert torch.equal(column, column[:, leaders.tolist()]), name
    assert batch.valid.any(-1).sum(0).tolist() == (CHUNKS - points).tolist()
    assert batch.meta["env_steps"] == (points[::GROUP].sum() + (CHUNKS - points).sum()) * CHUNK


def test_rollouts_that_run_ahead_begin_where_those_in_turns_do(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    wanted = [gather(config, Seeing(), iteration) for iteration in range(2)]
    ahead = config_of(tmp_path, "runner.max_staleness=1")
    policy: Any = Seeing()
    with make_pool(ahead, NUM_ENVS) as pool:
        schedule = EpisodeSchedule(ahead, NUM_ENVS, 2)
        worker = AsyncCollector(ahead, schedule, make_runners(ahead, pool, policy), policy, lambda: False)
        with closing(worker):
            for iteration, expected in enumerate(wanted):
                batch, _ = worker.gather(iteration)
                for name in ("rewards", "valid", "terminated", "truncated", "success", "task_id"):
                    assert torch.equal(batch[name], expected[name]), name
                assert not batch.valid[-1].any(-1).all(), "some begin within an episode"
                assert batch.meta["env_steps"] == expected.meta["env_steps"]
                worker.update_weights([], iteration + 1)


def test_a_session_trains_on_branches_of_rollouts_that_run_ahead(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.replace("extensions: [stop_at]", "").replace("critic_warmup_iterations: 1, ", ""))
    ahead = ("runner.max_staleness=1", "algorithm.decoupled.enabled=true", f"runner.output_dir={tmp_path / 'run'}")
    with Session(path, [*SETTINGS, *ahead]) as session:
        for _ in range(2):
            batch = session.rollout()
            assert batch.valid[0].any(-1).all() and not batch.valid[-1].any(-1).all()
            assert batch.meta["env_steps"] > int(batch.valid.sum())
            session.train(batch, session.advantages(batch))
            assert session.sync()["staleness/max"] <= 1


def test_the_same_seed_gives_the_same_rollout(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    left, right = (gather(config, make_rollout_engine(config, build_policy(config), 1)) for _ in range(2))
    for name in ("rewards", "valid", "terminated", "truncated", "logprobs"):
        assert torch.equal(left[name], right[name]), name
    for name, column in left.forward_inputs.items():
        assert torch.equal(column, right.forward_inputs[name]), name
    assert any(
        not torch.equal(left.logprobs[0, row], left.logprobs[0, row + 1]) for row in range(0, NUM_ENVS, GROUP)
    ), "each member draws its own actions"
