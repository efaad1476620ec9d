"""Episodes reach the reader of a store exactly once, whatever interrupts their writer and reader."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from expect import raises_code

from embodrl.config import load_config
from embodrl.config.schema import Config
from embodrl.data.demos import ACTED_BY, POLICY_VERSION, REWARDS, DemoEpisode, Outcomes
from embodrl.data.imitation import load_checked_demos
from embodrl.data.lerobot_writer import LeRobotWriter
from embodrl.errors import StoreError
from embodrl.fields import Fields
from embodrl.learners.replay import check_rewards, reward_settings
from embodrl.store.compaction import compact
from embodrl.store.shards import EPISODES, EpisodeFilter, ShardReader, ShardSize, ShardWriter, TransitionReader
from embodrl.store.store import Store

pytest.importorskip("pyarrow", reason="the extra datasets is not installed")
SIZE = 16


def episode(number: int, success: bool = True) -> DemoEpisode:
    """An episode of two frames whose actions are its number."""
    actions = np.full((2, 3), number, np.float32)
    return DemoEpisode(
        np.full((2, 1, SIZE, SIZE, 3), number, np.uint8),
        np.zeros((2, 0), np.float32),
        actions,
        "reach",
        "task",
        number,
        success,
        Outcomes(actions, np.zeros(2, np.float32), np.array([False, success]), np.full(2, -number, np.float32)),
        {POLICY_VERSION: np.full(2, number, np.int64), ACTED_BY: np.zeros(2, np.int64)},
        f"a-{number}",
    )


@pytest.fixture
def store(tmp_path):
    found = Store(str(tmp_path / "store"))
    found.create()
    return found


def writer(store, spool, capacity=2, name="a", meta=None) -> ShardWriter:
    def make(directory):
        return LeRobotWriter(directory, ["cam"], 10, resume=True)

    return ShardWriter(store, spool, name, make, ShardSize(capacity, 1e9), meta)


def reader(store, tmp_path, window=100, successes_only=True) -> ShardReader:
    return ShardReader(store, tmp_path / "cache", ["cam"], (SIZE, SIZE), window, EpisodeFilter(successes_only))


def numbers(found: ShardReader) -> list[int]:
    return [] if found.demos is None else [int(found.demos.actions[last, 0]) for last in sorted(set(found.demos.last))]


def test_a_kill_while_a_shard_is_deleted_from_the_spool_costs_nothing(store, tmp_path, monkeypatch):
    spool = tmp_path / "spool"
    first = writer(store, spool)
    for number in range(4):
        first.add([episode(number)], {"next": number + 1})

    def killed(path):
        if path.exists():
            (path / "meta" / "info.json").unlink()
            raise InterruptedError

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr("embodrl.store.shards.remove", killed)
        first.upload()
    first.close()
    second = writer(store, spool)
    second.upload()
    second.close()
    assert [path.name for path in sorted(spool.glob("a-*"))] == ["a-000001"]
    found = reader(store, tmp_path)
    assert found.poll() and found.ids == {f"a-{number}" for number in range(4)}


def test_what_was_committed_survives_its_writer_and_is_uploaded_once(store, tmp_path):
    spool = tmp_path / "spool"
    first = writer(store, spool)
    first.add([episode(0), episode(1), episode(2)], {"next": 3})  # more than fit are one shard
    first.add([episode(3)], {"next": 4})
    first.close()  # as a kill: what is committed stays, and nothing was uploaded
    junk = spool / ".a-000001.partial" / "data" / "chunk-000" / "file-001.parquet"
    junk.write_bytes(b"begun when it was killed")
    second = writer(store, spool)
    assert second.progress is not None and second.progress.integer("next") == 4
    second.add([episode(4)], {"next": 5})
    second.upload()
    second.upload()
    second.close()
    third = writer(store, spool)  # nothing is under way: the progress is that of the newest shard
    assert third.progress is not None and third.progress.integer("next") == 5
    third.close()
    found = reader(store, tmp_path)
    assert found.poll() and not found.poll()
    assert found.shards == [f"{EPISODES}/a-000000", f"{EPISODES}/a-000001"]
    assert found.ids == {f"a-{number}" for number in range(5)} and numbers(found) == [0, 1, 2, 3, 4]


def test_a_collector_without_its_spool_continues_from_the_store(store, tmp_path):
    first = writer(store, tmp_path / "spool", capacity=1)
    for number in range(2):
        first.add([episode(number)], {"next": number + 1})
    first.upload()
    first.close()
    second = writer(store, tmp_path / "another")
    assert second.progress is not None and second.progress.integer("next") == 2
    second.add([episode(2), episode(3)], {"next": 4})
    second.upload()
    second.close()
    found = reader(store, tmp_path)
    found.poll()
    assert numbers(found) == [0, 1, 2, 3]


def test_two_collectors_of_one_name_are_refused(store, tmp_path):
    writers = [writer(store, tmp_path / name, capacity=1) for name in ("one", "other")]
    for number, each in enumerate(writers):
        each.add([episode(number)], {})
    writers[0].upload()
    with pytest.raises(StoreError) as raised:
        writers[1].upload()
    assert raised.value.code == "store-name-taken"
    for each in writers:
        each.close()


def test_the_window_moves_on_and_a_restart_is_as_if_there_was_none(store, tmp_path):
    shards = writer(store, tmp_path / "spool", capacity=2)
    found = reader(store, tmp_path, window=3)
    for first in (0, 2, 4):
        shards.add([episode(first), episode(first + 1, success=first != 2)], {})
        shards.upload()
        found.poll()
    assert numbers(found) == [0, 1, 2, 4, 5][-3:]  # 3 failed
    assert found.finished == [f"{EPISODES}/a-000000"]
    store.remove(found.finished[0])
    state = Fields(found.state(), "state")
    again = reader(store, tmp_path, window=3)
    again.restore(state)
    assert numbers(again) == numbers(found) and again.ids == found.ids and not again.poll()
    assert again.state() == found.state()
    shards.close()


def test_an_episode_that_comes_twice_counts_once(store, tmp_path):
    for name in ("a", "b"):
        shards = writer(store, tmp_path / name, name=name)
        shards.add([episode(0), episode(1 if name == "a" else 2)], {})
        shards.upload()
        shards.close()
    found = reader(store, tmp_path)
    found.poll()
    assert numbers(found) == [0, 1, 2] and len(found.ids) == 3


def test_a_shard_says_what_its_rewards_follow_from(store, tmp_path):
    config = Config()
    shards = writer(store, tmp_path / "spool", meta={REWARDS: reward_settings(config)})
    shards.add([episode(0), episode(1)], {"next": 2})
    shards.upload()
    check_rewards(tmp_path / "store" / EPISODES / "a-000000", config)
    others = config.model_copy(update={"env": config.env.model_copy(update={"success_bonus": 7.0})})
    with raises_code("demos-other-rewards"):
        check_rewards(tmp_path / "store" / EPISODES / "a-000000", others)


def test_episodes_that_were_taken_are_known_and_those_not_learned_from_are_read_again(store, tmp_path):
    ours = writer(store, tmp_path / "spool", capacity=1)
    for number in range(3):
        ours.add([episode(number)], {})
        ours.upload()
    cache = tmp_path / "cache"
    found = TransitionReader(store, cache, ["cam"], (SIZE, SIZE), lambda shard: None)
    assert found.poll()
    parts = found.take()
    assert [part.ids for part in parts] == [["a-0"], ["a-1"], ["a-2"]] and not found.take()
    outcomes, versions = parts[1].demos.outcomes, parts[1].demos.versions
    assert outcomes is not None and outcomes.terminated.tolist() == [False, True]
    assert versions is not None and versions.tolist() == [1, 1]
    again = TransitionReader(store, cache, ["cam"], (SIZE, SIZE), lambda shard: None)
    again.restore(Fields(found.unread(parts[1:]), "state", StoreError))
    assert again.poll(1)
    assert again.unread([])["shards"] == [parts[0].shard], "what was read and not taken is read again, too"
    assert [part.ids for part in again.take()] == [["a-1"]] and again.poll()
    assert [part.ids for part in again.take()] == [["a-2"]]


def test_a_merged_shard_with_an_episode_that_was_not_learned_from_is_read_again(store, tmp_path):
    ours = writer(store, tmp_path / "spool", capacity=1)
    for number in range(3):
        ours.add([episode(number)], {})
        ours.upload()
    cache = tmp_path / "cache"
    found = TransitionReader(store, cache, ["cam"], (SIZE, SIZE), lambda shard: None)
    assert found.poll()
    waiting = found.take()[1:]
    compact(store, 100, lambda text: None)
    assert found.poll(), "the merged shard, of which nothing is new"
    again = TransitionReader(store, cache, ["cam"], (SIZE, SIZE), lambda shard: None)
    again.restore(Fields(found.unread(waiting), "state", StoreError))
    assert again.poll()
    assert sorted(one for part in again.take() for one in part.ids) == ["a-1", "a-2"]


def test_a_store_is_read_as_one_dataset_with_each_episode_once(store, tmp_path):
    ours = writer(store, tmp_path / "spool", capacity=1, meta={REWARDS: reward_settings(Config())})
    for number in range(4):
        ours.add([episode(number, success=number != 2)], {})
        ours.upload()
    given = [f"env.cameras=[{{name: cam, height: {SIZE}, width: {SIZE}}}]", f"sft.data_dir={store.url}"]
    config = load_config(["env=toy", "sft.check_robot=false", *given]).config
    config = config.model_copy(update={"model": config.model.model_copy(update={"action_dim": 3})})
    before = load_checked_demos(config)
    old = shutil.copytree(tmp_path / "store" / EPISODES / "a-000000", tmp_path / "old")
    compact(store, 2, lambda text: None)
    whole = tmp_path / "store" / EPISODES
    shutil.copytree(old, whole / "a-000000")  # merged, and not removed yet
    after = load_checked_demos(config)
    for found in (before, after):
        assert sorted(found.seeds) == [0, 1, 2, 3] and found.outcomes is not None
        assert found.actions[:, 0].tolist() == [float(seed) for seed in found.seeds for _ in range(2)]
    check_rewards(Path(store.url), config)
    few = config.model_copy(update={"sft": config.sft.model_copy(update={"max_episodes": 2})})
    assert load_checked_demos(few).num_episodes == 2
