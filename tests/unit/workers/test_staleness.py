"""The gate between rollouts and training."""

from __future__ import annotations

import random

import pytest

from embodrl.workers.staleness import RunningLimit, StalenessGate


@pytest.mark.parametrize(("staleness", "first"), [(0, 8), (1, 16), (4, 40)])
def test_capacity_when_everything_is_used_at_once(staleness: int, first: int) -> None:
    gate = StalenessGate(staleness, batch_size=8, max_running=1000)
    begun = 0
    for version, expected in ((0, first), (1, 8), (2, 8)):
        assert gate.capacity() == expected
        for _ in range(expected):
            gate.begin(begun)
            gate.finish(begun)
            begun += 1
        assert gate.capacity() == 0
        chosen = gate.choose()
        assert chosen == list(range(8 * version, 8 * version + 8)), "the oldest first"
        gate.give_out(chosen)
        assert gate.capacity() == 0, "what an update trains on still counts"
        gate.update(version + 1)


def test_no_more_run_at_the_same_time_than_there_are_stages() -> None:
    gate = StalenessGate(4, batch_size=8, max_running=3)
    for shard in range(3):
        gate.begin(shard)
    assert gate.capacity() == 0
    gate.finish(1)
    assert gate.capacity() == 1
    gate.abandon(0)
    assert gate.capacity() == 2


def test_the_limit_follows_who_waits() -> None:
    limit = RunningLimit(low=2, high=4, now=4)
    seen = []
    for waited, waiting, dropped in (
        *((True, 0, 0), (False, 3, 0), (False, 1, 0), (False, 1, 0)),  # at the top; shards wait: down to the bottom
        *((False, 0, 0), (True, 0, 0), (True, 2, 0), (True, 0, 1), (False, 0, 1)),  # balance; training waits; too old
    ):
        limit.adapt(waited, waiting, dropped)
        seen.append(limit.now)
    assert seen == [4, 3, 2, 2, 2, 3, 4, 3, 2]


def test_a_limit_bounds_what_runs() -> None:
    gate = StalenessGate(4, batch_size=8, max_running=3, limit=RunningLimit(1, 3, 2))
    assert gate.capacity() == 2
    gate.begin(0)
    gate.begin(1)
    assert gate.limit is not None
    gate.limit.now = 1
    assert gate.capacity() == 0, "what runs goes on"
    gate.finish(0)
    assert gate.capacity() == 0
    gate.finish(1)
    assert gate.capacity() == 1


def test_synchronous_training_takes_turns() -> None:
    gate = StalenessGate(0, batch_size=1, max_running=1)
    gate.begin(0)
    assert gate.choose() is None
    gate.finish(0)
    gate.give_out(gate.choose() or [])
    assert gate.capacity() == 0
    gate.update(1)
    assert gate.capacity() == 1


def test_an_update_waits_for_a_slow_shard_that_would_be_too_old_for_the_next() -> None:
    gate = StalenessGate(1, batch_size=2, max_running=4)
    for shard in range(4):
        gate.begin(shard)
    gate.finish(2)
    gate.finish(3)
    assert gate.choose() == [2, 3], "0 and 1 can be in the next"
    gate.give_out([2, 3])
    gate.update(1)
    gate.begin(4)
    gate.begin(5)
    gate.finish(4)
    gate.finish(5)
    assert gate.choose() is None, "0 and 1 began under version 0: it is this update or none"
    gate.finish(0)
    assert gate.choose() is None
    gate.finish(1)
    assert gate.choose() == [0, 1]


def test_an_update_waits_where_too_many_would_be_left_for_the_last_chance() -> None:
    gate = StalenessGate(2, batch_size=2, max_running=6)
    for shard in range(6):
        gate.begin(shard)
    for shard in (4, 5):
        gate.finish(shard)
    gate.give_out(gate.choose() or [])
    gate.update(1)
    gate.begin(6)
    gate.begin(7)
    gate.finish(6)
    gate.finish(7)
    # 0 to 3 have to be trained on by updates 1 and 2, which take two each.
    assert gate.choose() is None
    gate.finish(3)
    assert gate.choose() is None
    gate.finish(0)
    assert gate.choose() == [0, 3]


def test_what_is_turned_down_makes_room() -> None:
    gate = StalenessGate(1, batch_size=2, max_running=8)
    for shard in range(4):
        gate.begin(shard)
        gate.finish(shard)
    gate.give_out([0, 1])
    gate.give_out([2, 3])
    assert gate.capacity() == 2, "two of the four do not count as trained on"
    gate.update(1)
    assert gate.rejected == 2 and gate.accepted == 2 and gate.capacity() == 4


def test_what_an_interrupted_update_was_given_waits_for_the_next() -> None:
    gate = StalenessGate(1, batch_size=1, max_running=2)
    for shard in range(2):
        gate.begin(shard)
        gate.finish(shard)
    gate.give_out([0])
    gate.take_back()
    assert gate.choose() == [0] and gate.capacity() == 0 and not gate.given_out


def test_a_lower_bound_makes_waiting_shards_too_old() -> None:
    gate = StalenessGate(1, batch_size=1, max_running=4, version=6, waiting={9: 2, 10: 5, 11: 6})
    assert gate.drop_too_old() == [9] and gate.rejected == 1
    assert gate.choose() == [10]


@pytest.mark.parametrize("seed", range(200))
def test_no_shard_is_ever_too_old_and_nothing_gets_stuck(seed: int) -> None:
    rng = random.Random(seed)
    staleness, size, stages = rng.randint(0, 4), rng.randint(1, 4), rng.randint(1, 8)
    gate = StalenessGate(staleness, size, stages)
    next_shard, trained = 0, []
    slow = {shard: rng.random() < 0.3 for shard in range(10_000)}
    while gate.version < 40:
        moves = ["begin"] * gate.capacity() + ["finish"] * (len(gate.running) > 0) + ["train"]
        move = rng.choice(moves)
        if move == "begin":
            gate.begin(next_shard)
            next_shard += 1
        elif move == "finish":
            quick = [shard for shard in gate.running if not slow[shard]] or list(gate.running)
            gate.finish(rng.choice(quick if rng.random() < 0.9 else list(gate.running)))
        elif (chosen := gate.choose()) is not None:
            assert all(gate.version - gate.waiting[shard] <= staleness for shard in chosen)
            gate.give_out(chosen)
            trained += chosen
            gate.update(gate.version + 1)
        else:
            assert gate.running or gate.capacity(), "somebody can still move"
        assert not gate.drop_too_old()
        assert len(gate.waiting) + len(gate.running) <= (staleness + 1) * size
    assert len(trained) == len(set(trained)) == 40 * size and gate.rejected == 0
