"""SyncCollector on the toy environment in this process, with a policy whose answers are known."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from embodrl.algorithms.episodes import split_episodes
from embodrl.config import load_config
from embodrl.envs.pool.local import LocalPool
from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.reporting.rows import is_measured
from embodrl.types import Observation, PolicyOutput
from embodrl.workers.collector import SyncCollector
from embodrl.workers.lockstep import EpisodeStats
from embodrl.workers.recorders import Judging
from embodrl.workers.reward import RewardWorker

CHUNK = 4
FIXED = [
    "env=toy",
    "env.tasks=[reach-red,reach-green]",
    "env.max_episode_steps=8",
    "env.include_state=true",
    "env.train.total_num_envs=4",
    "env.eval.total_num_envs=4",
    "env.eval.num_episodes=4",
    "env.train.max_steps_per_rollout_epoch=16",
    f"model.num_action_chunks={CHUNK}",
    "model.warm_start=null",
    "actor.global_batch_size=8",
    "actor.micro_batch_size=8",
]


def config_of(*overrides: str):
    return load_config([*FIXED, *overrides]).config


class FaultyToy(ToyVectorEnv):
    """Keeps the seeds of its resets; loses the given row of some chunks, by their number."""

    def __init__(self, faults=(), **kwargs):
        super().__init__(**kwargs)
        self._faults, self._num_chunks, self.resets = dict(faults), 0, []
        self.num_rebuilds = 0
        self._ends = not kwargs["auto_reset"]
        self.going = np.ones(kwargs["num_envs"], np.bool_)

    def reset(self, seeds, task_ids, indices):
        self.resets.append(seeds.tolist())
        self.going[indices] = True
        return super().reset(seeds, task_ids, indices)

    def chunk_step(self, actions, active):
        step = super().chunk_step(actions, active)
        if (row := self._faults.get(self._num_chunks)) is not None:
            step.reward[row] = np.nan
        self._num_chunks += 1
        if self._ends:
            self.going &= ~step.done
        return step

    def rebuild(self):
        self.num_rebuilds += 1
        super().rebuild()


class ToyPool(LocalPool):
    """A simulator for each stage, and a record of what was asked of all of them."""

    def __init__(self, config, faults=()):
        stages = config.rollout.pipeline_stages
        kwargs = {
            "num_envs": config.env.train.total_num_envs // stages,
            "tasks": config.env.tasks,
            "image_size": 8,
            "max_episode_steps": config.env.max_episode_steps,
            "include_state": True,
            "auto_reset": config.env.train.auto_reset,
            "ignore_terminations": config.env.train.ignore_terminations,
        }
        super().__init__(FaultyToy, kwargs | {"faults": faults}, stages)
        self.called: list[str] = []
        self.start()

    def call(self, method, arguments=None, *, restart=False):
        self.called.append(method)
        return super().call(method, arguments, restart=restart)


class KnownPolicy:
    """Goes straight to the right; log-probs are -1, the value of an observation is the dot's x coordinate."""

    def __init__(self, speed=0.0):
        self.speed = speed
        self.version = 0
        self.seen: list[int] = []
        self.offloaded_after: list[int] = []

    def offload(self):
        self.offloaded_after.append(len(self.seen))

    def update_weights(self, weights, version):
        assert not list(weights)
        self.version = version

    def make_generators(self, seed):
        return [torch.Generator().manual_seed(sum(seed))]

    def random_state(self):
        return ["before"]

    def set_random_state(self, states):
        self.restored = states

    def act(self, observation: Observation, compute_values: bool, generators=None) -> PolicyOutput:
        self.seen.append(observation.batch_size)
        batch = observation.batch_size
        actions = np.zeros((batch, CHUNK, 7), np.float32)
        actions[:, :, 0] = self.speed
        values = self.values(observation) if compute_values else None
        seen = torch.from_numpy(observation.state.copy())
        return PolicyOutput(actions, torch.full((batch, CHUNK, 7), -1.0), values, {"seen": seen}, self.version)

    def values(self, observation: Observation) -> torch.Tensor:
        return torch.from_numpy(observation.state[:, :1].copy())


def worker_of(config, policy=None, should_stop=lambda: False, faults=()):
    pool = ToyPool(config, faults)
    return SyncCollector(config, pool, policy or KnownPolicy(), should_stop), pool


def test_seeds_are_equal_within_a_group_and_new_in_every_iteration():
    worker, _ = worker_of(config_of("algorithm.group_size=2"))
    seeds, tasks = worker.schedule.draw(3, 0)
    assert seeds.dtype == np.int64 and tasks.dtype == np.int32
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    np.testing.assert_array_equal(tasks, [1, 1, 0, 0])  # (group + 3) mod 2 tasks
    again, _ = worker.schedule.draw(3, 0)
    np.testing.assert_array_equal(seeds, again)
    for iteration, epoch in ((4, 0), (3, 1)):
        assert not set(worker.schedule.draw(iteration, epoch)[0]) & set(seeds)
    other, _ = worker_of(config_of("algorithm.group_size=2", "runner.seed=1"))[0].schedule.draw(3, 0)
    assert not set(other) & set(seeds)


def test_fixed_reset_states_come_back_in_every_iteration():
    worker, _ = worker_of(config_of("env.train.use_fixed_reset_state_ids=true"))
    seeds, tasks = worker.schedule.draw(0, 0)
    assert tasks.tolist() == [0, 1, 0, 1]
    for iteration, epoch in ((7, 0), (8, 0), (3, 1)):
        for before, now in zip((seeds, tasks), worker.schedule.draw(iteration, epoch), strict=True):
            np.testing.assert_array_equal(before, now)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_rollout_has_the_shapes_and_the_contents_of_what_happened(stages):
    config = config_of(f"rollout.pipeline_stages={stages}")
    worker, pool = worker_of(config, KnownPolicy(0.1))
    batch, metrics = worker.gather(5)
    steps, envs = 4, 4
    assert worker.engine.offloaded_after == [len(worker.engine.seen)] == [steps * stages]  # once, at the end
    assert batch.logprobs.shape == (steps, envs, CHUNK, 7) and batch.logprobs.dtype == torch.float32
    assert batch.values.shape == (steps + 1, envs, 1)
    for name in ("rewards", "valid", "terminated", "truncated"):
        assert getattr(batch, name).shape == (steps, envs, CHUNK), name
    assert batch.bootstrap_values.shape == (steps, envs, 1)
    assert (batch.policy_version == 0).all() and batch.policy_version.shape == (steps, envs)
    seen = batch.forward_inputs["seen"]
    torch.testing.assert_close(batch.values[:-1], seen[..., :1])  # the value belongs to what the policy saw
    # Truncated after two chunks, unless solved before; then new episodes.
    for env in range(envs):
        ends = (batch.terminated | batch.truncated)[:, env].any(-1)
        if not batch.terminated[:2, env].any():
            assert ends[:2].tolist() == [False, True]
            moved = seen[1, env, 0] - seen[0, env, 0]
            assert float(moved) == pytest.approx(4 * 0.1 * 0.15, abs=1e-5) or seen[1, env, 0] == 1
    seeds, tasks = worker.schedule.draw(5, 0)
    assert [seed for env in pool.envs for seed in env.resets[0]] == seeds.tolist()
    np.testing.assert_array_equal(batch.task_id[0].numpy(), tasks)
    assert metrics["rollout/episodes"] >= envs
    assert metrics["time/env_s"] >= 0 and metrics["time/policy_s"] > 0


def summary(episode):
    return (
        *(tuple(column.flatten().tolist()) for column in (episode.rewards, episode.frames, episode.policy_version)),
        *(episode.success, episode.finished, episode.task),
    )


@pytest.mark.parametrize("overrides", [(), ("env.train.auto_reset=false", "env.train.max_steps_per_rollout_epoch=8")])
@pytest.mark.parametrize("faults", [(), ((2, 1),), ((0, 1), (1, 1))])
def test_episodes_are_judged_as_they_end_as_they_would_be_in_the_end(overrides, faults):
    """Of each environment: solved, out of time, lost to a fault (its chunk, and row), and cut off by the end."""
    config = config_of(*overrides)
    worker, _ = worker_of(config, KnownPolicy(0.4), faults=faults)
    judged, moments = [], []

    def judge(episode):
        moments.append(len(worker.engine.seen))
        judged.append(episode)
        return len(judged) - 1

    worker.judging = Judging(True, judge)
    batch, _ = worker.gather(0)
    rewards = RewardWorker(config_of("reward.fn='math:isfinite'"), tuple(config.env.tasks))
    episodes = split_episodes(batch.valid, batch.terminated, batch.truncated)
    numbers = episodes.of(batch.call_id)
    assert sorted(numbers.tolist()) == list(range(len(judged))) and (batch.call_id >= 0).sum() == len(judged)
    for index, number in enumerate(numbers.tolist()):
        assert summary(judged[number]) == summary(rewards._record(batch, episodes, index))
        first = tuple((episodes.index == index).nonzero()[0])
        assert judged[number].start_state.equal(batch.forward_inputs["seen"][first])
    assert overrides or min(moments) < worker.config.rollout_chunks, "some are judged while the rollout continues"
    for episode in judged:
        assert episode.actions.shape == (len(episode.rewards), 7) and (episode.actions[:, 0] == np.float32(0.4)).all()
        assert episode.images[:, 0].equal(episode.frames) and episode.states.shape[0] == len(episode.frames)
        assert episode.instruction


def test_chunks_carry_the_version_of_the_weights_that_chose_them():
    worker, _ = worker_of(config_of())
    worker.update_weights([], 3)
    assert (worker.gather(0)[0].policy_version == 3).all()


def test_two_stages_gather_what_one_gathers():
    one, _ = worker_of(config_of(), KnownPolicy(0.5))
    two, _ = worker_of(config_of("rollout.pipeline_stages=2"), KnownPolicy(0.5))
    left, left_metrics = one.gather(2)
    right, right_metrics = two.gather(2)
    for name in ("values", "rewards", "valid", "terminated", "truncated", "bootstrap_values", "task_id"):
        torch.testing.assert_close(getattr(left, name), getattr(right, name), rtol=0, atol=0)
    torch.testing.assert_close(left.forward_inputs["seen"], right.forward_inputs["seen"], rtol=0, atol=0)
    for name, value in left_metrics.items():
        assert is_measured(name) or right_metrics[name] == pytest.approx(value, rel=1e-6), name


def test_the_bootstrap_is_the_value_of_the_last_observation_where_the_step_limit_ended_an_episode():
    worker, _ = worker_of(config_of("algorithm.bootstrap_type=truncation"), KnownPolicy(0.1))
    batch, _ = worker.gather(0)
    truncated = batch.truncated.any(-1)
    assert truncated.any() and not truncated.all()
    assert (batch.bootstrap_values[~truncated] == 0).all()
    # Both chunks of an episode move right by 4 x 0.1 x 0.15, as long as the border at 1 is not reached.
    for step, env in truncated.nonzero().tolist():
        start = float(batch.forward_inputs["seen"][step, env, 0])
        assert float(batch.bootstrap_values[step, env, 0]) == pytest.approx(min(start + 0.06, 1.0), abs=1e-5)

    off, _ = worker_of(config_of("algorithm.bootstrap_type=none"), KnownPolicy(0.1))
    assert not off.gather(0)[0].bootstrap_values.any()


def test_a_lost_episode_is_neither_counted_nor_bootstrapped():
    worker, _ = worker_of(config_of(), faults={1: 2})  # the second chunk of environment 2
    clean, _ = worker_of(config_of())
    batch, metrics = worker.gather(0)
    _, clean_metrics = clean.gather(0)
    assert metrics["rollout/lost_episodes"] == 1
    assert metrics["rollout/episodes"] == clean_metrics["rollout/episodes"] - 1
    assert not batch.valid[1, 2].any() and batch.truncated[1, 2].tolist() == [True, False, False, False]
    assert not batch.bootstrap_values[1, 2].any()
    assert batch.valid[1, :2].all() and batch.valid[1, 3].all()


def test_without_auto_reset_an_environment_whose_episode_has_ended_is_left_alone():
    settings = ("env.train.auto_reset=false", "env.max_episode_steps=16", "env.train.total_num_envs=32")
    worker, _ = worker_of(config_of(*settings), KnownPolicy(0.5))
    policy = worker.engine
    batch, metrics = worker.gather(0)
    ends = batch.terminated.any(-1).any(0)
    assert ends.any() and not ends.all(), "some episodes are solved, others reach the limit"
    going = batch.valid.any(-1).sum(1)
    assert policy.seen == going[going > 0].tolist(), "the policy sees only those that are not over"
    for env in range(32):
        played = batch.valid[:, env].flatten()
        length = int(played.sum())
        assert played[:length].all()
        assert length == 16 or batch.terminated[:, env].flatten()[length - 1]
    skipped = ~batch.valid.any(-1)
    assert not batch.logprobs[skipped].any() and not batch.forward_inputs["seen"][skipped].any()
    assert metrics["rollout/episodes"] == 32
    assert metrics["rollout/episode_length"] == int(batch.valid.sum()) / 32


def test_rollout_epochs_lie_side_by_side():
    worker, _ = worker_of(config_of("algorithm.rollout_epoch=2"))
    single, _ = worker_of(config_of())
    batch, _ = worker.gather(1)
    first, _ = single.gather(1)
    assert batch.rewards.shape == (4, 8, CHUNK) and batch.values.shape == (5, 8, 1)
    torch.testing.assert_close(batch.values[:, :4], first.values)
    assert not torch.equal(batch.values[0, 4:], first.values[0])
    assert batch.forward_inputs["seen"].shape == (4, 8, 2)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_stopped_rollout_leaves_no_step_under_way(stages):
    calls = iter([False, False, True])
    worker, pool = worker_of(config_of(f"rollout.pipeline_stages={stages}"), should_stop=lambda: next(calls))
    with pytest.raises(InterruptedError):
        worker.gather(0)
    assert all(manager.process.pending is None for manager in pool.managers)


def test_a_second_attempt_goes_back_to_the_same_mark():
    calls = iter([False] * 4 + [False, True])
    worker, pool = worker_of(config_of(), should_stop=lambda: next(calls))
    worker.gather(0)
    with pytest.raises(InterruptedError):
        worker.gather(0)
    worker.undo()
    assert pool.called == ["mark", "rewind"] and worker.engine.restored == ["before"]
    worker.undo()
    assert pool.called == ["mark", "rewind"], "there is nothing left to undo"


def test_an_update_that_a_later_node_interrupts_is_undone_one_that_happened_is_not():
    worker, pool = worker_of(config_of())
    worker.gather(0)
    worker.undo()
    assert pool.called == ["mark", "rewind"]
    worker.gather(0)
    worker.update_weights([], 1)
    worker.undo()
    assert pool.called == ["mark", "rewind", "mark"]


def test_means_are_over_the_episodes_that_ended():
    stats = EpisodeStats()
    assert stats.metrics()["rollout/success_rate"] is None
    flags = np.array([[True, False], [False, False], [True, False], [True, False]])
    env = ToyVectorEnv(num_envs=4, image_size=8)
    env.reset(np.arange(4), np.zeros(4, np.int32), np.arange(4))
    step = env.chunk_step(np.zeros((4, 2, 7), np.float32), np.ones(4, bool))
    step = replace(
        step,
        terminated=flags,
        truncated=np.zeros_like(flags),
        valid=np.array([[True, False], [True, True], [False, False], [True, False]]),
        success=np.array([True, True, True, True]),
        episode_return=np.array([2.0, 9.0, 9.0, 9.0], np.float32),
        episode_length=np.array([5, 9, 9, 9], np.int32),
    )
    acted = np.array([True, True, True, False])  # the second continues, the third is lost, the fourth idles
    stats.add(step, acted, ["reach-red", "reach-green"] * 2)
    assert stats.metrics() == {
        "rollout/success_rate": 1.0,
        "rollout/return": 2.0,
        "rollout/return_solved": 2.0,
        "rollout/return_failed": None,
        "rollout/episode_length": 5.0,
        "rollout/episodes": 1.0,
        "rollout/lost_episodes": 1.0,
        "rollout/cut_episodes": 0.0,
        "rollout/success_rate_started": 1.0,
    }


def test_returns_of_solved_and_failed_episodes_are_told_apart():
    stats = EpisodeStats(successes=2, episodes=5, returns=7.0, solved_returns=4.0)
    found = stats.metrics()
    assert (found["rollout/return_solved"], found["rollout/return_failed"]) == (2.0, 1.0)
    settings = ("env.train.total_num_envs=32", "actor.global_batch_size=16")
    _, found = worker_of(config_of(*settings), KnownPolicy(0.5))[0].gather(1)
    rate = found["rollout/success_rate"]
    mean = rate * found["rollout/return_solved"] + (1 - rate) * found["rollout/return_failed"]
    assert 0 < rate < 1 and mean == pytest.approx(found["rollout/return"])
    assert found["rollout/return_solved"] > found["rollout/return_failed"]  # by the bonus


def per_task(metrics):
    tasks = ("reach-red", "reach-green")
    return [metrics[f"rollout/{task}/{name}"] for task in tasks for name in ("episodes", "success_rate")]


@pytest.mark.parametrize("stages", [1, 2])
def test_metrics_tell_tasks_apart(stages):
    settings = ("env.train.total_num_envs=32", "actor.global_batch_size=16", f"rollout.pipeline_stages={stages}")
    batch, metrics = worker_of(config_of(*settings), KnownPolicy(0.5))[0].gather(1)
    ended = (batch.terminated | batch.truncated).any(-1)
    expected = []
    for task in (0, 1):
        successes = batch.success[ended & (batch.task_id == task)].float()
        assert 0 < successes.mean() < 1
        expected += [len(successes), pytest.approx(float(successes.mean()))]
    assert per_task(metrics) == expected
    assert expected[0] + expected[2] == metrics["rollout/episodes"]


def test_what_a_task_lost_to_faults_does_not_count():
    lost, clean = (worker_of(config_of(), faults=faults)[0].gather(0)[1] for faults in ({1: 2}, {}))
    assert lost["rollout/reach-red/episodes"] == clean["rollout/reach-red/episodes"] - 1  # environment 2 is red
    assert per_task(lost)[2:] == per_task(clean)[2:]


def test_tasks_are_reported_apart_where_there_are_several_played_or_not():
    _, metrics = worker_of(config_of("env.tasks=[reach-red]"))[0].gather(0)
    assert not any("reach-red" in name for name in metrics)
    stats = EpisodeStats.of(["reach-red", "reach-green"])
    stats.add_to_task("reach-green", True)
    kept = stats.as_dict()
    stats.merge(EpisodeStats(**json.loads(json.dumps(kept))))  # as in a checkpoint
    assert per_task(stats.metrics()) == [0.0, None, 2.0, 1.0]
    assert kept["by_task"] == {"reach-red": [0, 0], "reach-green": [1, 1]}, "what was returned stays as it was"
