"""Rollouts beside training, on the toy environment in this process; a policy that waits for a signal sets the pace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from batches import same
from expect import raises_code
from test_rollout import KnownPolicy, ToyPool, config_of, worker_of

from embodrl.config import load_config
from embodrl.config.identity import changes, record_of
from embodrl.errors import CheckpointError, EnvError
from embodrl.types import Observation, PolicyOutput
from embodrl.workers.async_collector import AsyncCollector, make_runners, shard_settings
from embodrl.workers.collector import EpisodeSchedule, RolloutState

CHUNKS = 4
TIMEOUT_S = 60


class PacedPolicy(KnownPolicy):
    """Acts only as often as it is allowed to."""

    def __init__(self, chunks: int | None = None) -> None:
        super().__init__(0.1)
        self.allowed = threading.Semaphore(10**6 if chunks is None else chunks)
        self.asked = threading.Semaphore(0)

    def act(self, observation: Observation, compute_values: bool, generators: Any = None) -> PolicyOutput:
        self.asked.release()
        assert self.allowed.acquire(timeout=TIMEOUT_S)
        return super().act(observation, compute_values, generators)


class StagedPool(ToyPool):
    """Keeps the pools of its stages."""

    def split(self, num_parts: int) -> Any:
        self.parts = super().split(num_parts)
        return self.parts


class Parts:
    """What a test needs of an asynchronous rollout."""

    def __init__(self, *overrides: str, policy: PacedPolicy | None = None, stop: bool = False) -> None:
        self.config = config_of(*overrides)
        self.policy = policy or PacedPolicy()
        self.pool: Any = StagedPool(self.config)
        self.stop = threading.Event()
        if stop:
            self.stop.set()
        engine: Any = self.policy
        runners = make_runners(self.config, self.pool, engine)
        schedule = EpisodeSchedule(self.config, self.pool.spec.num_envs, len(self.pool.spec.tasks))
        self.worker = AsyncCollector(self.config, schedule, runners, engine, self.stop.is_set)

    def began(self) -> list[list[int]]:
        """Return the seeds of the shards that have begun, in the order of the stages."""
        return [seeds for simulator in self.pool.envs for seeds in simulator.resets]

    def wait_until(self, done: Any) -> None:
        with self.worker._changed:
            assert self.worker._changed.wait_for(done, TIMEOUT_S)


def closed_afterwards(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes parts as ``make`` does; their rollouts end with the test."""
    made: list[Any] = []

    def start(*overrides: str, **options: Any) -> Any:
        made.append(make(*overrides, **options))
        return made[-1]

    yield start
    for parts in made:
        parts.policy.allowed.release(10**6)
        parts.worker.close()
        assert not any(thread.is_alive() for thread in parts.worker._threads)


@pytest.fixture
def started() -> Iterator[Callable[..., Any]]:
    yield from closed_afterwards(Parts)


def test_the_first_rollout_is_that_of_a_synchronous_run(started: Any) -> None:
    parts = started("runner.max_staleness=1", "runner.max_iterations=2")
    batch, metrics = parts.worker.gather(0)
    reference, expected = worker_of(config_of(), KnownPolicy(0.1))[0].gather(0)
    for name in ("rewards", "valid", "values", "task_id", "group_id", "success", "policy_version"):
        torch.testing.assert_close(getattr(batch, name), getattr(reference, name), rtol=0, atol=0)
    assert batch.meta == reference.meta
    assert {k: v for k, v in metrics.items() if k.startswith("rollout/")} == {
        k: v for k, v in expected.items() if k.startswith("rollout/")
    }


def test_rollouts_run_ahead_as_far_as_they_may_and_no_farther(started: Any) -> None:
    parts = started("runner.max_staleness=2", "runner.max_iterations=10")
    worker = parts.worker
    for version in range(3):
        batch, _ = worker.gather(version)
        assert int(batch.policy_version.min()) >= version - 2
        parts.wait_until(lambda: len(worker.gate.waiting) == 2 and not worker.gate.running)
        assert len(parts.began()) == version + 3, "two more than trained on or given out"
        worker.update_weights([], version + 1)
    assert [worker.schedule.draw(i, 0)[0].tolist() for i in range(5)] == parts.began()[:5]


def test_fewer_shards_run_while_finished_ones_wait(started: Any) -> None:
    settings = ("runner.max_staleness=2", "runner.max_iterations=10", "rollout.pipeline_stages=2")
    parts = started(*settings, "rollout.min_running_shards=1")
    worker = parts.worker
    assert worker.gather(0)[1]["staleness/running_limit"] == 2, "training has waited"
    parts.wait_until(lambda: len(worker.gate.waiting) == 4 and not worker.gate.running)
    worker.update_weights([], 1)
    parts.wait_until(lambda: len(worker.gate.waiting) == 6 and not worker.gate.running)
    assert worker.gather(1)[1]["staleness/running_limit"] == 1
    saved = worker.state()
    other = started(*settings, "rollout.min_running_shards=1").worker
    other.load_state(saved, 1)
    assert other.gate.limit.now == 1
    assert started(*settings).worker.gate.limit is None


def test_new_weights_reach_a_rollout_that_is_under_way(started: Any) -> None:
    parts = started("runner.max_staleness=1", "runner.max_iterations=2", policy=PacedPolicy(CHUNKS + 1))
    worker, policy = parts.worker, parts.policy
    first, _ = worker.gather(0)
    for _ in range(CHUNKS + 2):
        assert policy.asked.acquire(timeout=TIMEOUT_S)  # the second chunk of the second rollout is asked for
    worker.update_weights([], 1)
    policy.allowed.release(CHUNKS)
    second, metrics = worker.gather(1)
    assert (first.policy_version == 0).all()
    assert second.policy_version[:, 0].tolist() == [0, 1, 1, 1]
    assert metrics["rollout/episodes"], "no episode was dropped"


def test_stages_play_shards_of_their_own(started: Any) -> None:
    parts = started(
        "runner.max_staleness=1",
        "rollout.pipeline_stages=2",
        "env.num_processes=2",
        "runner.max_iterations=1",
        "algorithm.group_size=2",
        "env.train.total_num_envs=8",
    )
    batch, _ = parts.worker.gather(0)
    assert len(batch) == 8 and batch.group_id[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    seeds, _ = parts.worker.schedule.draw(0, 0)
    assert sorted(parts.began()) == sorted([seeds[:4].tolist(), seeds[4:].tolist()])


def test_simulators_forget_their_history_now_and_then(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodrl.workers.async_collector._SHARDS_A_JOURNAL", 2)
    parts = started("runner.max_staleness=1", "runner.max_iterations=5")
    for version in range(5):
        parts.worker.gather(version)
        parts.worker.update_weights([], version + 1)
    assert parts.pool.envs[0].num_rebuilds == 2


def test_a_run_rolls_out_no_more_than_it_needs(started: Any) -> None:
    parts = started("runner.max_staleness=4", "runner.max_iterations=2")
    for version in range(2):
        parts.worker.gather(version)
        parts.worker.update_weights([], version + 1)
    parts.wait_until(lambda: not parts.worker.gate.running)
    assert len(parts.began()) == 2


def test_a_second_batch_for_an_update_makes_room_for_another(started: Any) -> None:
    parts = started("runner.max_staleness=1", "runner.max_iterations=2")
    worker = parts.worker
    first, _ = worker.gather(0)
    more, metrics = worker.gather_more(0, 1, 1)
    assert metrics["rollout/episodes"] >= len(first) * 2
    assert not set(first.group_id[0].tolist()) & set(more.group_id[0].tolist()), (
        "groups of one update are all different"
    )
    worker.update_weights([], 1)
    assert worker.gate.rejected == 1 and worker.gate.accepted == 1 + len(worker.gate.waiting)
    worker.gather(1)
    assert len(parts.began()) == 3
    worker.gather_more(1, 1, 1)  # the last update may ask for more, too
    assert len(parts.began()) == 4


def test_further_rollouts_come_one_at_a_time(started: Any) -> None:
    """As in a synchronous run, whatever ``algorithm.rollout_epoch``."""
    parts = started(
        "runner.max_staleness=1",
        "runner.max_iterations=2",
        "algorithm.rollout_epoch=2",
        "rollout.pipeline_stages=2",
        "env.train.total_num_envs=4",
    )
    first, _ = parts.worker.gather(0)
    more, _ = parts.worker.gather_more(0, 2, 4)
    assert (len(first), len(more)) == (8, 4)
    assert sorted({*first.group_id[0].tolist(), *more.group_id[0].tolist()}) == list(range(12))
    parts.worker.update_weights([], 1)
    assert parts.worker.gate.rejected == 2
    again, _ = parts.worker.gather(1)
    assert again.group_id[0].min() == 0


def test_further_groups_are_those_that_are_missing(started: Any) -> None:
    """Two stages of two environments: one group of one environment is missing, so one stage's shard is enough."""
    parts = started(
        *("runner.max_staleness=1", "runner.max_iterations=2", "rollout.pipeline_stages=2"),
        "env.train.total_num_envs=4",
    )
    first, _ = parts.worker.gather(0)
    more, _ = parts.worker.gather_more(0, 1, 1)
    assert (len(first), len(more)) == (4, 2)
    parts.worker.update_weights([], 1)
    assert parts.worker.gate.rejected == 1


def test_a_checkpoint_loses_and_repeats_nothing(started: Any) -> None:
    """Two rollouts wait, one is under way when the run is killed; a new one continues from its checkpoint."""
    overrides = ("runner.max_staleness=3", "runner.max_iterations=6")
    parts = started(*overrides, policy=PacedPolicy(3 * CHUNKS + 2))
    trained = [parts.worker.gather(0)[0]]
    parts.wait_until(lambda: len(parts.worker.gate.waiting) == 2 and len(parts.worker.gate.running) == 1)
    parts.worker.update_weights([], 1)
    saved = parts.worker.state()
    assert len(saved.tensors) == 2 and len(saved.state["shards"]) == 2 and saved.state["again"] == [3]

    resumed = started(*overrides)
    resumed.policy.version = 1
    resumed.worker.load_state(RolloutState(saved.state, saved.tensors), 1)
    for version in range(1, 6):
        trained.append(resumed.worker.gather(version)[0])
        resumed.worker.update_weights([], version + 1)
    drawn = [parts.worker.schedule.draw(i, 0)[0].tolist() for i in range(6)]
    assert sorted(resumed.began()) == sorted(drawn[3:]), "only what had not been finished is played"
    plain = started("runner.max_staleness=1", "runner.max_iterations=6")
    for version, batch in enumerate(trained):
        expected, _ = plain.worker.gather(version)
        plain.worker.update_weights([], version + 1)
        torch.testing.assert_close(batch.rewards, expected.rewards, rtol=0, atol=0)
        torch.testing.assert_close(batch.forward_inputs["seen"], expected.forward_inputs["seen"], rtol=0, atol=0)
        assert batch.meta == expected.meta


def test_a_checkpoint_of_other_sizes_is_refused(started: Any) -> None:
    saved = started("runner.max_staleness=1").worker.state()
    other = started("runner.max_staleness=1", "env.train.total_num_envs=8", "algorithm.group_size=2")
    with raises_code(
        "checkpoint-other-settings", CheckpointError, "total_num_envs", "4", "8", "group_size", "1", "2"
    ) as caught:
        other.worker.load_state(saved, 0)
    assert caught.value.hint == "resume with env.train.total_num_envs=4 algorithm.group_size=1"


@pytest.mark.parametrize(
    "setting",
    [
        "env.include_state=true",
        "env.cameras=[{name: base, height: 24, width: 24}]",
        "env.reward_mode=sparse",
        "reward.on_error=raise",
    ],
)
def test_shards_depend_on_all_that_their_episodes_do(setting: str) -> None:
    base = ["env=toy", "runner.max_staleness=1"]
    before = shard_settings(load_config(base).config, 1)
    now = shard_settings(load_config([*base, setting]).config, 1)
    assert list(changes(record_of(before), now)) == [setting.partition("=")[0]]
    learning = ["actor.optim.lr=0.1", "algorithm.clip_ratio_high=0.3", "runner.max_iterations=99", "env.eval.seed=3"]
    assert shard_settings(load_config([*base, *learning]).config, 1) == before
    shorter = load_config([*base, "algorithm=branch", "algorithm.branch.max_chunks=1"]).config
    assert shard_settings(shorter, 1)["algorithm.branch.max_chunks"] == 1


def test_an_update_that_asks_twice_gets_the_same_rollouts(started: Any) -> None:
    """A rollout node that fails after it has gathered may be retried, in the last update too."""
    parts = started("runner.max_staleness=1", "runner.max_iterations=2")
    for version in range(2):
        first, _ = parts.worker.gather(version)
        again, _ = parts.worker.gather(version)
        assert same(first, again)
        parts.worker.update_weights([], version + 1)
    assert parts.worker.gate.rejected == 0 and len(parts.began()) == 2


def test_an_update_that_does_not_happen_keeps_its_rollouts(started: Any) -> None:
    parts = started("runner.max_staleness=1", "runner.max_iterations=3", policy=PacedPolicy(CHUNKS))
    parts.worker.gather(0)
    parts.wait_until(lambda: parts.worker.gate.running)
    saved = parts.worker.state()
    assert list(saved.state["shards"]) == ["0"] and saved.state["again"] == [1]


def test_an_interrupted_update_gives_back_what_it_had(started: Any) -> None:
    parts = started("runner.max_staleness=1", "runner.max_iterations=3", policy=PacedPolicy(CHUNKS))
    batch, _ = parts.worker.gather(0)
    parts.wait_until(lambda: parts.worker.gate.running)
    parts.stop.set()
    with pytest.raises(InterruptedError):
        parts.worker.gather_more(0, 1, 1)
    saved = parts.worker.state()
    assert list(saved.state["shards"]) == ["0"] and saved.state["again"] == [1]
    (tensors,) = saved.tensors.values()
    torch.testing.assert_close(tensors['["rewards"]'], batch.rewards)


def test_others_may_use_the_environments_once_rollouts_under_way_are_done(started: Any) -> None:
    parts = started("runner.max_staleness=2", "runner.max_iterations=9")
    parts.worker.gather(0)
    with parts.worker.paused():
        assert not parts.worker.gate.running
        begun = len(parts.began())
        parts.worker.update_weights([], 1)
        assert len(parts.began()) == begun
    parts.wait_until(lambda: len(parts.began()) > begun or len(parts.worker.gate.waiting) == 3)
    parts.worker.gather(1)


def test_a_failure_of_a_stage_reaches_the_trainer(started: Any) -> None:
    parts = started("runner.max_staleness=1")

    def fail(*arguments: object) -> None:
        raise EnvError("given up after 3 restarts", "look at the log")

    parts.pool.parts[0].reset = fail
    with raises_code("env", EnvError, "given up"):
        parts.worker.gather(0)
    with raises_code("env", EnvError, "given up"), parts.worker.paused():
        pass


def test_a_stop_ends_the_waiting_and_leaves_no_step_under_way(started: Any) -> None:
    parts = started("runner.max_staleness=1", policy=PacedPolicy(2), stop=True)
    with pytest.raises(InterruptedError):
        parts.worker.gather(0)
    parts.policy.allowed.release(1)
    parts.worker.close()
    assert all(manager.process.pending is None for manager in parts.pool.managers)
    assert parts.worker.state().state["again"] == [0]


def test_a_run_continues_with_another_number_of_runners(started: Any) -> None:
    """The waiting rollouts have other environments: they are dropped, and their steps count."""
    settings = ("runner.max_staleness=2", "runner.max_iterations=3")
    before = started(*settings)
    before.worker.gather(0)
    before.worker.update_weights([], 1)
    before.wait_until(lambda: len(before.worker.gate.waiting) == 2 and not before.worker.gate.running)
    saved = before.worker.state()
    assert saved.state["next_shard"] == 3
    steps = sum(entry["meta"]["env_steps"] for entry in saved.state["shards"].values())
    saved.state["settings"]["players"] = 2  # shards 0 and 1 were a rollout of all environments, 2 the half of the next
    after = started(*settings)
    after.worker.load_state(RolloutState(saved.state, saved.tensors), 1)
    first, _ = after.worker.gather(1)
    own = after.worker._shards.finished[2].meta["env_steps"]
    assert first.meta["env_steps"] == own + steps > own
    after.worker.update_weights([], 2)
    after.worker.gather(2)
    draws = [after.worker.schedule.draw(number, 0)[0].tolist() for number in (2, 3)]
    assert after.began() == draws
    del saved.state["settings"]["players"]  # a checkpoint of before
    after.worker.close()
    started(*settings).worker.load_state(RolloutState(saved.state, saved.tensors), 1)
