"""What rollout processes have in common: shares, batches and states of several as of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_rollout import config_of, worker_of

from embodrl.errors import CheckpointError
from embodrl.hybrid_engines.base import RolloutEngine
from embodrl.workers.group_source import GroupSource
from embodrl.workers.rollout import EpisodeSchedule, RolloutState
from embodrl.workers.share import Share, share_config


class Processes:
    """Answers as two rollout processes would."""

    size = 2

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.random: list[Any] = []

    def remember(self, random: Any) -> None:
        self.random.append(random)

    def all(self, method: str, *arguments: Any) -> list[Any]:
        self.asked.append((method, arguments))
        return [vars(RolloutState({"random": [str(rank)]}, blobs={"env_0": bytes([rank])})) for rank in range(2)]


def test_shares_are_neighbouring_rows() -> None:
    assert [Share(rank, 3).rows(12) for rank in range(3)] == [slice(0, 4), slice(4, 8), slice(8, 12)]
    config = config_of("env.num_processes=4", "rollout.pipeline_stages=2")
    mine = share_config(config, Share(1, 2))
    assert mine.env.train.total_num_envs == config.env.train.total_num_envs // 2
    assert mine.env.eval.total_num_envs == config.env.eval.total_num_envs // 2
    assert mine.env.num_processes == 2
    assert share_config(config, Share()) is config


def test_the_episodes_of_all_shares_are_those_of_the_run() -> None:
    config = config_of("algorithm.group_size=2", "env.train.ignore_terminations=true")
    whole = EpisodeSchedule(config, 8, 2)
    parts = [EpisodeSchedule(config, 8, 2, Share(rank, 2)) for rank in range(2)]
    for iteration, epoch in ((0, 0), (3, 1)):
        seeds, tasks = whole.draw(iteration, epoch)
        drawn = [part.draw(iteration, epoch) for part in parts]
        assert [s for one, _ in drawn for s in one] == seeds.tolist()
        assert [t for _, one in drawn for t in one] == tasks.tolist()
        assert torch.equal(torch.cat([part.group_ids(epoch) for part in parts]), whole.group_ids(epoch))


def test_processes_draw_as_the_threads_of_one_do() -> None:
    class Engine:
        make_generators = RolloutEngine.make_generators

        def __init__(self, num_threads: int, part: tuple[int, int]) -> None:
            self.num_threads, self.part = num_threads, part

    def seeds(num_threads: int, part: tuple[int, int]) -> list[int]:
        engine: Any = Engine(num_threads, part)
        return [generator.initial_seed() for generator in engine.make_generators([7])]

    assert seeds(2, (0, 2)) + seeds(2, (1, 2)) == seeds(4, (0, 1))
    assert len(set(seeds(4, (0, 1)))) == 4


def test_states_of_processes_are_kept_apart() -> None:
    processes: Any = Processes()
    processes.config = config_of()
    source = GroupSource(processes)
    saved = source.state()
    assert saved.state == {"processes": [{"random": ["0"]}, {"random": ["1"]}]}
    assert saved.blobs == {"rollout_0_env_0": b"\0", "rollout_1_env_0": b"\1"}
    source.load_state(saved, 5)
    method, (states, tensors, blobs) = processes.asked[-1]
    assert method == "load_state" and states == ({"random": ["0"]}, {"random": ["1"]}) and tensors == ({}, {})
    assert blobs == ({"env_0": b"\0"}, {"env_0": b"\1"})
    with pytest.raises(CheckpointError, match="made with 1 rollout process"):
        source.load_state(RolloutState({"random": ["0"]}), 5)


def test_one_process_does_not_go_on_for_several() -> None:
    worker, _ = worker_of(config_of())
    with pytest.raises(CheckpointError, match="made with 2 rollout processes"):
        worker.load_state(RolloutState({"processes": [{}, {}]}), 0)


def test_rollouts_of_an_iteration_come_one_after_the_other() -> None:
    """As from one process: all environments of the first rollout, then those of the second."""
    config = config_of("algorithm.rollout_epoch=2")
    whole, _ = worker_of(config)[0].gather(0)
    size = len(whole) // 2
    rows = torch.arange(len(whole)).view(2, 2, size // 2)
    parts = [{"batch": whole[rows[:, rank].flatten()], "metas": []} for rank in range(2)]
    for part in parts:
        part["batch"].meta["env_steps"] = 3
    processes: Any = Processes()
    processes.config = config
    joined, _ = GroupSource(processes)._join(parts, 2)
    assert torch.equal(joined["group_id"], whole["group_id"]) and joined.meta["env_steps"] == 6
    assert torch.equal(joined.logprobs, whole.logprobs)
