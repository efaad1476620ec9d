"""Rewards of whole episodes: functions of the user's, and SRPO."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import same
from expect import raises_code
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodrl.algorithms.srpo import (
    SrpoRewards,
    VJepa2Encoder,
    dbscan,
    failure_rewards,
    pixel_encoder,
    sample_frames,
    success_centres,
)
from embodrl.config import load_config
from embodrl.config.schema import RewardConfig, SrpoConfig
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import CheckpointError, RewardError
from embodrl.reporting.rows import is_measured
from embodrl.workers.episode import Episode
from embodrl.workers.recorders import NOT_JUDGED
from embodrl.workers.reward import RewardCalls, RewardWorker

NUM_STEPS, NUM_ENVS, CHUNK = 6, 6, 2
calls: list[Episode] = []
release = threading.Event()


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    calls.clear()
    release.clear()
    yield
    release.set()  # lets go of threads that were given up


def judged_batch(seed: int) -> TrajectoryBatch:
    """Six episodes of random frames, of 3 to 6 chunks; the even ones succeed."""
    generator = torch.Generator().manual_seed(seed)
    valid = torch.ones(NUM_STEPS, NUM_ENVS, CHUNK, dtype=torch.bool)
    terminated, success = torch.zeros_like(valid), torch.zeros(NUM_STEPS, NUM_ENVS, dtype=torch.bool)
    for env in range(NUM_ENVS):
        last = 2 + env % 4
        terminated[last, env, 0] = True
        valid[last, env, 1] = False
        valid[last + 1 :, env] = False
        success[last:, env] = env % 2 == 0
    zeros = torch.zeros(NUM_STEPS, NUM_ENVS, dtype=torch.int64)
    # every episode has a colour of its own
    colours = torch.randint(0, 200, (1, NUM_ENVS, 1, 1, 3), generator=generator)
    noise = torch.randint(0, 56, (NUM_STEPS, NUM_ENVS, 16, 16, 3), generator=generator)
    return TrajectoryBatch.from_rollout(
        forward_inputs={},
        logprobs=torch.zeros(NUM_STEPS, NUM_ENVS, CHUNK, 1),
        values=torch.zeros(NUM_STEPS + 1, NUM_ENVS, 1),
        rewards=torch.randn(NUM_STEPS, NUM_ENVS, CHUNK, generator=generator) * valid,
        valid=valid,
        terminated=terminated,
        truncated=torch.zeros_like(valid),
        bootstrap_values=torch.zeros(NUM_STEPS, NUM_ENVS, 1),
        policy_version=zeros,
        task_id=zeros,
        success=success,
        group_id=zeros,
        frames=(colours + noise).to(torch.uint8),
    )


def call_all(function: Any, episodes: list[Episode], config: RewardConfig) -> tuple[list[object], int]:
    """Return the outcome of each episode, and how many attempts failed."""
    calls = RewardCalls(function, config)
    results = [call.result() for call in [calls.start(episode) for episode in episodes]]
    calls.close()
    return [outcome for outcome, _ in results], sum(failed for _, failed in results)


def episode_of(num_actions: int, **more: Any) -> Episode:
    values: dict[str, Any] = {"success": False, "finished": True, "task": "reach", "frames": torch.zeros(1)}
    return Episode(torch.zeros(num_actions), policy_version=torch.zeros(1), **(values | more))


def worker_of(*overrides: str, function: str | None = None) -> RewardWorker:
    name = [] if function is None else [f"reward.fn='test_rewards:{function}'"]
    return RewardWorker(load_config(["env=toy", *name, *overrides]).config, ("reach-red",))


def steps(episode: Episode) -> float:
    calls.append(episode)
    return float(len(episode.rewards))


async def steps_async(episode: Episode) -> float:
    await asyncio.sleep(0)
    return steps(episode)


def by_instruction(episode: Episode) -> float:
    calls.append(episode)
    return -1.0 if episode.instruction is None else float(len(episode.instruction))


def doubled(episode: Episode) -> Tensor:
    return 2 * episode.rewards


def fails_on_successes(episode: Episode) -> float:
    if episode.success:
        raise RuntimeError(["no network"])
    return steps(episode)


def hangs(episode: Episode) -> float:
    calls.append(episode)
    if episode.success:
        release.wait()
    return 1.0


async def hangs_async(episode: Episode) -> float:
    calls.append(episode)
    if episode.success:
        await asyncio.Event().wait()
    return 1.0


def fails_once(episode: Episode) -> float:
    calls.append(episode)
    if sum(call is episode for call in calls) == 1:
        raise RuntimeError("once")
    return 1.0


def times_out_itself(episode: Episode) -> float:
    raise TimeoutError("the socket timed out")


async def times_out_itself_async(episode: Episode) -> float:
    raise TimeoutError("the socket timed out")


def not_a_number(episode: Episode) -> float:
    return math.nan


def a_word(episode: Episode) -> str:
    return "high"


def too_few(episode: Episode) -> list[float]:
    return [1.0]


def test_the_columns_that_others_share_stay_as_they_were() -> None:
    first = judged_batch(0)
    batch = first.replace()
    worker_of(function="fails_on_successes").apply(batch)
    assert not batch.valid.equal(first.valid) and same(first, judged_batch(0))


@pytest.mark.parametrize("function", ["steps", "steps_async"])
def test_one_number_is_paid_at_the_last_action(function: str) -> None:
    batch = judged_batch(0)
    before = batch.rewards
    metrics = worker_of(function=function).apply(batch)
    for env in range(NUM_ENVS):
        last = 2 + env % 4
        expected = torch.zeros(NUM_STEPS, CHUNK)
        expected[last, 0] = 2 * last + 1  # the actions that were valid
        assert torch.equal(batch.rewards[:, env], expected)
    assert metrics["reward/errors"] == metrics["reward/failed_calls"] == 0
    paid = [2 * (2 + env % 4) + 1 for env in range(NUM_ENVS)]
    assert metrics["reward/mean"] == pytest.approx(sum(paid) / NUM_ENVS)
    assert metrics["reward/std"] == pytest.approx(statistics.pstdev(paid))
    assert batch.rewards is not before, "what others hold is left alone"
    assert {(call.task, call.success, call.finished, len(call.frames)) for call in calls} == {
        ("reach-red", env % 2 == 0, True, 3 + env % 4) for env in range(NUM_ENVS)
    }


def test_several_numbers_are_paid_one_an_action() -> None:
    batch, same = judged_batch(0), judged_batch(0)
    worker_of(function="doubled").apply(batch)
    torch.testing.assert_close(batch.rewards, 2 * same.rewards)


def test_an_episode_without_a_reward_is_not_trained_on_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    batch = judged_batch(0)
    metrics = worker_of("reward.retries=2", function="fails_on_successes").apply(batch)
    assert metrics["reward/errors"] == 3 and metrics["reward/failed_calls"] == 9
    assert not batch.valid[:, ::2].any() and torch.equal(batch.valid[:, 1::2], judged_batch(0).valid[:, 1::2])
    assert "no network" in caplog.text and "3 of 6" in caplog.text


@pytest.mark.parametrize("function", ["hangs", "hangs_async"])
def test_a_call_that_hangs_is_given_up(function: str, caplog: pytest.LogCaptureFixture) -> None:
    batch = judged_batch(0)
    metrics = worker_of("reward.timeout_s=0.5", "reward.retries=1", function=function).apply(batch)
    assert metrics["reward/errors"] == 3 and metrics["reward/failed_calls"] == 6
    assert len(calls) == 3 + 6 and "took more than 0.5 s" in caplog.text
    assert batch.valid[:, 1::2].any() and not batch.valid[:, ::2].any()


def test_an_async_function_that_blocks_is_left_behind_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodrl.workers.reward.ANSWER_S", 0.05)

    async def blocks(episode: Episode) -> float:
        if episode.success:
            release.wait()
        return 1.0

    calls_of = RewardCalls(blocks, RewardConfig(timeout_s=0.2, retries=0))
    outcome, failed = calls_of.start(episode_of(1, success=True)).result(timeout=60)
    assert isinstance(outcome, RewardError) and failed == 1
    assert "took more than 0.2 s" in outcome.message and "blocks" in outcome.message and ".py:" in outcome.message
    assert calls_of.start(episode_of(1)).result(timeout=60)[1] == 0  # on another loop
    release.set()
    calls_of.close()


def test_a_call_that_fails_once_is_made_again() -> None:
    batch = judged_batch(0)
    metrics = worker_of("reward.retries=1", function="fails_once").apply(batch)
    assert metrics["reward/errors"] == 0 and metrics["reward/failed_calls"] == NUM_ENVS
    assert float(batch.rewards.sum()) == NUM_ENVS


@pytest.mark.parametrize(
    ("function", "overrides", "names"),
    [
        ("fails_on_successes", ("reward.on_error=raise",), ["no network"]),
        ("not_a_number", (), ["not finite"]),  # all of them fail
        ("too_few", (), [NUM_ENVS]),
        ("times_out_itself", (), ["TimeoutError: the socket timed out"]),
        ("times_out_itself_async", (), ["test_rewards.py", "times_out_itself_async"]),
        ("a_word", (), [6, "'high'", "str"]),
    ],
)
def test_a_broken_function_stops_the_run(function: str, overrides: tuple[str, ...], names: list[object]) -> None:
    with raises_code("reward", RewardError, *names) as caught:
        worker_of("reward.retries=0", *overrides, function=function).apply(judged_batch(0))
    assert "reward." in caught.value.hint


def test_no_more_calls_at_the_same_time_than_allowed() -> None:
    running, most = 0, 0
    together = threading.Event()

    async def watched(_: Episode) -> float:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        if most == 4:
            together.set()
        await asyncio.to_thread(release.wait)
        running -= 1
        return 0.0

    calls_of = RewardCalls(watched, RewardConfig(max_concurrency=4, timeout_s=600.0))
    begun = [calls_of.start(episode_of(1)) for _ in range(9)]
    assert together.wait(60)
    release.set()
    assert [call.result()[1] for call in begun] == [0] * 9 and most == 4
    calls_of.close()


def test_a_call_that_began_with_the_episode_is_not_made_again() -> None:
    """Episodes 0 to 2 are judged while the rollout continues, by another number than the others."""
    batch, worker = judged_batch(0), worker_of(function="by_instruction")
    batch.call_id = torch.full((NUM_STEPS, NUM_ENVS), -1)
    stale = worker.start(episode_of(1, instruction="of a rollout that was interrupted"))
    for env in range(3):
        batch.call_id[2 + env % 4, env] = worker.start(episode_of(1, instruction=f"env {env}"))
    worker.apply(batch)
    assert batch.call_id is None and len(calls) == 1 + NUM_ENVS
    returns = batch.rewards.sum(dim=(0, 2)).tolist()
    assert returns == [len("env 0")] * 3 + [-1.0] * 3
    for _ in range(2):
        later = judged_batch(0)
        later.call_id = torch.full((NUM_STEPS, NUM_ENVS), -1)
        later.call_id[2, 0] = worker.start(episode_of(1))
        worker.apply(later)
    assert stale not in worker._begun and len(worker._begun) <= 2


def test_a_batch_that_is_ahead_of_training_keeps_the_calls_that_began_before_an_earlier_one() -> None:
    """Two stages run shards at the same time, and the shard that is trained on later had the first call."""
    worker = worker_of("runner.max_staleness=1", function="by_instruction")
    first, second = judged_batch(0), judged_batch(1)
    for batch, words in ((second, "later"), (first, "first")):
        batch.call_id = torch.full((NUM_STEPS, NUM_ENVS), -1)
        for env in range(NUM_ENVS):
            batch.call_id[2 + env % 4, env] = worker.start(episode_of(1, instruction=words))
    worker.apply(first)
    worker.apply(second)
    assert len(calls) == 2 * NUM_ENVS and second.rewards.sum(dim=(0, 2)).tolist() == [len("later")] * NUM_ENVS


@pytest.mark.parametrize("function", ["by_instruction", "doubled", "fails_on_successes"])
def test_rewards_of_another_process_are_those_of_this_one(function: str) -> None:
    """Of two processes, whose batches are joined; the outcomes travel as text."""
    driver, alone = (worker_of("reward.retries=0", function=function) for _ in range(2))
    parts, expected = [judged_batch(0), judged_batch(1)], TrajectoryBatch.concat([judged_batch(0), judged_batch(1)])
    for part in parts:
        other = worker_of("reward.retries=0", function=function)
        part.call_id = torch.full((NUM_STEPS, NUM_ENVS), -1)
        for env in range(NUM_ENVS):
            rewards = part.rewards[:, env][part.valid[:, env]]
            episode = replace(episode_of(1, success=env % 2 == 0), rewards=rewards)
            part.call_id[2 + env % 4, env] = other.start(episode)
        detached = json.loads(json.dumps(other.detach(part, lambda: False)))
        assert sorted(part.call_id.flatten().tolist())[-NUM_ENVS:] == list(range(NUM_ENVS)) and not other._begun
        driver.adopt(part, detached)
    called, batch = len(calls), TrajectoryBatch.concat(parts)
    metrics = [
        {n: v for n, v in worker.apply(each).items() if not is_measured(n)}
        for worker, each in ((driver, batch), (alone, expected))
    ]
    assert metrics[0] == metrics[1] and same(batch, expected)
    assert len(calls) - called == (0 if function == "doubled" else 2 * NUM_ENVS - 6 * (function[0] == "f")), "one's own"


def test_a_checkpoint_keeps_the_rewards_that_are_known() -> None:
    """The others are called for again, with what the batch has."""
    batch, worker = judged_batch(0), worker_of("reward.timeout_s=60", function="hangs")
    batch.call_id = torch.full((NUM_STEPS, NUM_ENVS), -1)
    for env in range(NUM_ENVS):
        batch.call_id[2 + env % 4, env] = worker.start(episode_of(1, success=env == 0))
    wait([begun.call for begun in worker._begun.values()][1:])
    kept = batch.replace()
    known = worker.known(kept)
    assert len(known) == NUM_ENVS - 1
    assert kept.call_id is not None and batch.call_id is not None and int(kept.call_id.max()) == NUM_ENVS - 2
    assert int(kept.call_id[2, 0]) == -1 and int(batch.call_id[2, 0]) > 0, "those of the run are unchanged"
    release.set()
    worker.detach(batch, lambda: False)
    resumed = worker_of(function="steps")
    resumed.adopt(kept, {"outcomes": json.loads(json.dumps(known)), "waited_s": 0.0})
    calls.clear()
    resumed.apply(kept)
    assert len(calls) == 1 and kept.rewards.sum(dim=(0, 2)).tolist() == [5.0] + [1.0] * (NUM_ENVS - 1)


def test_a_rollout_that_is_to_stop_does_not_wait_for_rewards() -> None:
    batch, worker = judged_batch(0), worker_of("reward.timeout_s=60", function="hangs")
    batch.call_id = torch.full((NUM_STEPS, NUM_ENVS), -1)
    batch.call_id[2, 0] = worker.start(episode_of(1, success=True))
    with pytest.raises(InterruptedError):
        worker.detach(batch, lambda: True)
    release.set()
    worker.detach(batch, lambda: False)  # before the next test counts calls


def test_a_second_attempt_at_the_rewards_calls_again_for_what_failed() -> None:
    batch, worker = judged_batch(0), worker_of("reward.retries=0", "reward.on_error=raise", function="fails_once")
    batch.call_id = torch.full((NUM_STEPS, NUM_ENVS), -1)
    begun = [episode_of(1) for _ in range(NUM_ENVS)]
    for env, episode in enumerate(begun):
        batch.call_id[2 + env % 4, env] = worker.start(episode)
    with raises_code("reward", RewardError):
        worker.apply(batch)
    assert len(calls) == NUM_ENVS, "a failure before it is asked for is not tried again"
    assert worker.apply(batch)["reward/errors"] == 0
    assert [sum(call is episode for call in calls) for episode in begun] == [2] * NUM_ENVS


def test_nothing_is_changed_unless_asked_for() -> None:
    batch = judged_batch(0)
    worker = worker_of()
    assert worker.apply(batch) == {} and worker.judging == NOT_JUDGED
    assert torch.equal(batch.rewards, judged_batch(0).rewards)


# -- SRPO -------------------------------------------------------------------------------------------------------------


def test_frames_are_evenly_spaced_and_repeated_in_order() -> None:
    frames = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1)
    assert sample_frames(frames, 3).flatten().tolist() == [0, 2, 4]
    repeated = sample_frames(frames, 10).flatten().tolist()
    assert repeated == sorted(repeated) and repeated[0] == 0 and repeated[-1] == 4 and set(repeated) == set(range(5))
    assert sample_frames(frames[:1], 4).flatten().tolist() == [0] * 4


def test_pixel_embeddings_by_hand() -> None:
    frames = torch.zeros(1, 2, 16, 16, 3, dtype=torch.uint8)
    frames[0, 1, :2, :2, 0] = 255  # one cell of the grid, red, at the end
    embedding = pixel_encoder(frames)[0]
    assert embedding.shape == (384,)
    assert embedding.nonzero().flatten().tolist() == [0, 192]
    assert embedding[0] == 1.0 and embedding[192] == 0.5


def naive_dbscan(points: list[list[float]], eps: float, min_samples: int) -> list[int]:
    """The textbook algorithm with a queue."""

    def near(i: int) -> list[int]:
        width = len(points[0])
        return [
            j
            for j in range(len(points))
            if math.sqrt(sum((a - b) ** 2 for a, b in zip(points[i], points[j], strict=True)) / width) <= eps
        ]

    label: list[int | None] = [None] * len(points)
    cluster = -1
    for i in range(len(points)):
        if label[i] is not None:
            continue
        if len(near(i)) < min_samples:
            label[i] = -1
            continue
        cluster += 1
        label[i], queue = cluster, list(near(i))
        while queue:
            j = queue.pop()
            if label[j] == -1 or label[j] is None:
                fresh = label[j] is None
                label[j] = cluster
                if fresh and len(near(j)) >= min_samples:
                    queue += near(j)
    return [int(x) for x in label if x is not None]


@settings(max_examples=40, deadline=None)
@given(
    points=st.lists(st.lists(st.integers(0, 6).map(float), min_size=2, max_size=2), min_size=1, max_size=10),
    eps=st.sampled_from([0.6, 1.1, 2.3]),
    min_samples=st.integers(1, 4),
)
def test_dbscan_is_the_textbook_s(points: list[list[float]], eps: float, min_samples: int) -> None:
    found = dbscan(torch.tensor(points), eps, min_samples).tolist()
    assert found == naive_dbscan(points, eps, min_samples)


def test_centres_are_the_means_of_clusters_or_of_all() -> None:
    two = torch.tensor([[0.0, 0.0], [0.1, 0.1], [5.0, 5.0], [5.1, 5.1]])
    torch.testing.assert_close(success_centres(two, 0.5, 2), torch.tensor([[0.05, 0.05], [5.05, 5.05]]))
    apart = torch.tensor([[0.0, 0.0], [4.0, 0.0]])
    assert success_centres(apart, 0.5, 2).tolist() == [[2.0, 0.0]]
    assert success_centres(apart[:1], 0.5, 2).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_embeddings_that_differ_by_rounding_are_one_place(size: float) -> None:
    success = torch.full((8, 2), size)
    success[:, 1] += torch.arange(8) * size  # four steps apart in a second dimension: no cluster
    success[::2, 0] = torch.nextafter(success[::2, 0], torch.tensor(torch.inf))
    steady = success.clone()
    steady[:, 0] = size
    torch.testing.assert_close(success_centres(success, 0.5, 2), success_centres(steady, 0.5, 2))
    failures = torch.full((4, 3), size)
    failures[1] = torch.nextafter(failures[1], torch.tensor(torch.inf))
    assert failure_rewards(failures, torch.zeros(1, 3), 0.6, 10.0).tolist() == pytest.approx([0.3] * 4)


def test_rewards_of_failures_by_hand() -> None:
    centres = torch.tensor([[0.0], [10.0]])
    rewards = failure_rewards(torch.tensor([[1.0], [12.0], [6.0]]), centres, 0.6, 10.0)
    # distances 1, 2, 4: 0, 1/3 and 1 of the range
    expected = [0.6 / (1 + math.exp(-10 * (0.5 - d))) for d in (0, 1 / 3, 1)]
    assert rewards.tolist() == pytest.approx(expected, rel=1e-5)
    assert rewards[0] == pytest.approx(0.596, abs=1e-3) and rewards[2] == pytest.approx(0.004, abs=1e-3)
    assert failure_rewards(torch.tensor([[3.0], [3.0]]), centres, 0.6, 10.0).tolist() == pytest.approx([0.3, 0.3])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), order=st.permutations(range(8)))
def test_a_success_earns_more_than_any_failure_whatever_the_order(seed: int, order: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(8, 5, generator=generator)
    success = torch.rand(8, generator=generator) < 0.5
    task = torch.randint(0, 2, (8,), generator=generator)
    rewards = SrpoRewards(SrpoConfig(enabled=True))(embeddings, success, task)
    assert (rewards[success] == 1).all() and (rewards[~success] <= 0.6).all() and (rewards >= 0).all()
    index = torch.tensor(order)
    again = SrpoRewards(SrpoConfig(enabled=True))(embeddings[index], success[index], task[index])
    torch.testing.assert_close(again, rewards[index], atol=1e-5, rtol=1e-4)


def test_tasks_do_not_see_each_other_s_successes_and_remember_their_own() -> None:
    rewards = SrpoRewards(SrpoConfig(enabled=True, memory=2))
    embeddings = torch.tensor([[0.0], [1.0], [5.0], [6.0]])
    success = torch.tensor([True, False, False, False])
    task = torch.tensor([0, 0, 1, 1])
    assert rewards(embeddings, success, task).tolist() == pytest.approx([1.0, 0.3, 0.0, 0.0])
    assert rewards.without_reference == 1
    later = rewards(torch.tensor([[1.0], [3.0]]), torch.zeros(2) > 0, torch.zeros(2, dtype=torch.int64))
    assert later[0] > 0.5 > 0.1 > later[1] and rewards.without_reference == 0
    rewards(torch.tensor([[7.0], [8.0]]), torch.ones(2) > 0, torch.zeros(2, dtype=torch.int64))
    assert rewards.memory[0].tolist() == [[7.0], [8.0]], "the oldest is forgotten"


def test_srpo_pays_episodes_at_their_end() -> None:
    batch = judged_batch(0)
    worker = worker_of("algorithm.srpo.enabled=true")
    metrics = worker.apply(batch)
    for env in range(NUM_ENVS):
        last = 2 + env % 4
        assert batch.rewards[:, env].count_nonzero() == 1
        assert (batch.rewards[last, env, 0] == 1) == (env % 2 == 0)
    failures = torch.tensor([float(batch.rewards[:, env].sum()) for env in (1, 3, 5)])
    assert metrics["srpo/failure_reward"] == pytest.approx(float(failures.mean()))
    assert failures.max() == pytest.approx(0.596, abs=1e-3)
    resumed = worker_of("algorithm.srpo.enabled=true")
    resumed.load_state(worker.state())
    second, same = judged_batch(1), judged_batch(1)
    for one in (second, same):
        assert one.success is not None
        one.success[:] = False
    assert worker.apply(second)["srpo/failure_reward"] == resumed.apply(same)["srpo/failure_reward"] > 0
    assert torch.equal(second.rewards, same.rewards)
    with pytest.raises(CheckpointError):
        worker_of().load_state(worker.state())


def test_srpo_leaves_episodes_out_that_a_fault_has_cost() -> None:
    """The others are paid as if those had never been: their distances do not stretch the range, nor are they judged."""
    batch, alone = judged_batch(0), judged_batch(0)
    for one in (batch, alone):
        one.valid[:2, 3] = one.valid[:2, 4] = True
        one.valid[2:, 3] = one.valid[2:, 4] = False
        one.terminated[:, 3] = one.terminated[:, 4] = False
        one.truncated[2, 3, 0] = one.truncated[2, 4, 0] = True  # a failure and a success so far
    assert batch.frames is not None
    batch.frames[:, 3:5] = 255
    alone.valid[:, 3:5] = False
    metrics, expected = (worker_of("algorithm.srpo.enabled=true").apply(one) for one in (batch, alone))
    assert metrics == expected and metrics["srpo/failure_reward"] > 0
    assert not batch.rewards[:2, 3:5].any()
    assert torch.equal(batch.rewards[:, [0, 1, 2, 5]], alone.rewards[:, [0, 1, 2, 5]])
    lost = judged_batch(0)
    lost.valid[1:] = lost.terminated[:] = False
    lost.truncated[1, :, 0] = True
    assert worker_of("algorithm.srpo.enabled=true").apply(lost)["srpo/failure_reward"] == 0
    assert not lost.rewards[lost.valid].any()


def bad_encoder(frames: Tensor) -> Tensor:
    return torch.full((len(frames), 2), torch.nan)


def test_an_encoder_that_gives_nonsense_is_refused() -> None:
    worker = worker_of("algorithm.srpo.enabled=true", "algorithm.srpo.encoder='test_rewards:bad_encoder'")
    with raises_code("srpo-embeddings"):
        worker.apply(judged_batch(0))


def test_v_jepa_2_is_the_mean_token_of_transformers(tmp_path: Path) -> None:
    from test_algorithm_keys import write_encoders
    from transformers import VJEPA2Model

    write_encoders(tmp_path)
    frames = torch.randint(0, 256, (2, 3, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = VJepa2Encoder(str(tmp_path / "a"))(frames)
    model: Any = VJEPA2Model.from_pretrained(tmp_path / "a").eval()
    even = torch.cat([frames, frames[:, -1:]], dim=1)  # tubelets are two frames long
    pixels = (even.permute(0, 1, 4, 2, 3) / 255 - torch.tensor(VJepa2Encoder.MEAN).view(3, 1, 1)) / torch.tensor(
        VJepa2Encoder.STD
    ).view(3, 1, 1)
    with torch.no_grad():
        expected = model(pixel_values_videos=pixels, skip_predictor=True).last_hidden_state.mean(1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    with raises_code("srpo-encoder"):
        VJepa2Encoder(str(tmp_path))


def test_an_empty_rollout_needs_no_reward() -> None:
    batch = judged_batch(0)
    batch = batch.replace(valid=torch.zeros_like(batch.valid))
    assert worker_of("algorithm.srpo.enabled=true").apply(batch)["srpo/failure_reward"] == 0
    assert worker_of(function="steps").apply(batch)["reward/errors"] == 0


class Own(BaseException):
    pass


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", [asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit, Own])
def test_what_is_no_exception_is_an_error_of_the_function(kind: type[BaseException], asynchronous: bool) -> None:
    def fails(_: Episode) -> float:
        raise kind("gone")

    async def fails_later(episode: Episode) -> float:
        return fails(episode)

    episodes = [episode_of(2, success=True)]
    config = RewardConfig(retries=1, timeout_s=60.0)
    ((outcome,), failed) = call_all(fails_later if asynchronous else fails, episodes, config)
    assert isinstance(outcome, RewardError) and failed == 2
    assert "in fails" in outcome.message and "gone" in outcome.message


def test_an_async_function_whose_time_is_over_is_counted_as_before() -> None:
    async def waits(_: Episode) -> float:
        await asyncio.Event().wait()
        return 0.0

    episodes = [episode_of(2, success=True)]
    ((outcome,), failed) = call_all(waits, episodes, RewardConfig(retries=0, timeout_s=0.01))
    assert isinstance(outcome, RewardError) and "took more than" in outcome.message and failed == 1
