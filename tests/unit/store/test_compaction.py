"""Shards of a store are merged without an episode being lost or read twice, wherever the process is killed."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
from redis_server import fake_redis
from s3_server import s3_bucket

from embodrl.data.demos import ACTED_BY, EXECUTED, LOG_PROB, POLICY_VERSION, REWARD, TERMINATED, DemoEpisode, Outcomes
from embodrl.data.lerobot_writer import LeRobotWriter
from embodrl.data.load import load_demos
from embodrl.data.parquet import Table
from embodrl.errors import StoreError
from embodrl.fields import Fields
from embodrl.store import compaction
from embodrl.store.shards import EPISODES, EpisodeFilter, ShardReader, ShardSize, ShardWriter
from embodrl.store.store import Store

pytest.importorskip("pyarrow", reason="the extra datasets is not installed")
SIZE = 16
NUMBERS = list(range(6))
MERGED_NAME = f"{EPISODES}/a=000000-000004"


class Killed(BaseException):
    """In place of SIGKILL: nothing handles it."""


def episode(number: int) -> DemoEpisode:
    """An episode of number + 1 frames with pictures of noise."""
    length, rng = number + 1, np.random.default_rng(number)
    actions = rng.normal(size=(length, 3)).astype(np.float32)
    actions[:, 0] = number
    outcomes = Outcomes(
        actions + 1,
        rng.normal(size=length).astype(np.float32),
        np.arange(length) == number,
        rng.normal(size=length).astype(np.float32),
    )
    images = rng.integers(0, 256, (length, 1, SIZE, SIZE, 3), dtype=np.uint8)
    acted = {POLICY_VERSION: np.full(length, 7 * number, np.int64), ACTED_BY: np.full(length, number % 3, np.int64)}
    words = "push" if number % 2 else "pull"
    return DemoEpisode(images, rng.random((length, 2), np.float32), actions, words, "t", number, number != 1, outcomes,
                   acted, f"a-{number}")  # fmt: skip


@pytest.fixture(scope="module")
def spool(tmp_path_factory):
    """Shards of an episode each, as a collector has written them."""
    directory = tmp_path_factory.mktemp("spool")
    store = Store(str(directory / "store"))
    store.create()
    size = ShardSize(1, 1e9)
    shards = ShardWriter(
        store, directory / "spool", "a", lambda path: LeRobotWriter(path, ["cam"], 10, resume=True), size
    )
    for number in NUMBERS:
        shards.add([episode(number)], {"next": number + 1})
        shards.upload()
    shards.close()
    return store


def copy_of(spool: Store, url: str, tmp_path) -> Store:
    store = Store(url)
    store.create()
    for name in spool.names(EPISODES):
        directory = tmp_path / "copies" / name.rpartition("/")[2]
        mark = spool.mark(name) if directory.exists() else spool.get(name, directory)
        facts = {"collector": mark.fields("collector").content, "ids": mark.texts("ids")}
        store.put(directory, name, facts)
    return store


def reader(store, tmp_path, window=100) -> ShardReader:
    return ShardReader(store, tmp_path / "cache", ["cam"], (SIZE, SIZE), window, EpisodeFilter(successes_only=True))


def numbers(found: ShardReader) -> list[int]:
    return [] if found.demos is None else [int(found.demos.actions[last, 0]) for last in sorted(set(found.demos.last))]


def columns(directory) -> dict:
    table = Table(next((directory / "data").glob("*/*.parquet")))
    floats = {name: table.vectors(name, 3 if name == EXECUTED else 1) for name in (EXECUTED, REWARD, LOG_PROB)}
    return floats | {TERMINATED: table.vectors(TERMINATED, 1), POLICY_VERSION: table.integers(POLICY_VERSION)}


@pytest.fixture(params=["directory", "redis", "s3"])
def url(request, tmp_path, monkeypatch):
    if request.param == "s3":
        with s3_bucket(tmp_path, monkeypatch):
            yield "s3://bucket/store"
        return
    with fake_redis() if request.param == "redis" else nullcontext(tmp_path) as found:
        yield f"{found}/store"


def test_every_column_and_pixel_is_kept(spool, url, tmp_path):
    store = copy_of(spool, url, tmp_path)
    told: list[str] = []
    compaction.compact(store, 100, told.append)
    assert store.names(EPISODES) == [f"{EPISODES}/a-000005", MERGED_NAME] and len(told) == 1
    mark = store.get(MERGED_NAME, tmp_path / "merged")
    assert mark.texts("ids") == [f"a-{number}" for number in NUMBERS[:-1]]
    assert mark.fields("collector").integer("next") == 5
    expected = [episode(number) for number in NUMBERS[:-1]]
    demos = load_demos(tmp_path / "merged")
    for name in ("images", "state", "actions"):
        assert np.array_equal(getattr(demos, name), np.concatenate([getattr(one, name) for one in expected]))
    for name, values in columns(tmp_path / "merged").items():
        assert np.array_equal(values.ravel(), np.concatenate([one.columns()[name] for one in expected]).ravel()), name
    assert demos.acted_by is not None and demos.acted_by.tolist() == [n % 3 for n in NUMBERS[:-1] for _ in range(n + 1)]
    assert list(demos.success) == [number != 1 for number in NUMBERS[:-1]] and list(demos.seeds) == NUMBERS[:-1]
    assert demos.said(np.unique(demos.last)) == ["push" if number % 2 else "pull" for number in NUMBERS[:-1]]
    features = [json.loads((tmp_path / at / "meta/info.json").read_text()) for at in ("merged", "copies/a-000000")]
    assert features[0]["features"] == features[1]["features"]
    compaction.compact(store, 100, told.append)
    assert told[1:] == ["there is nothing to merge"]


def test_merged_shards_have_at_most_as_many_episodes_and_are_merged_again(spool, tmp_path):
    store = copy_of(spool, str(tmp_path / "store"), tmp_path)
    compaction.compact(store, 2, lambda line: None)
    merged = [f"{EPISODES}/a=000000-000001", f"{EPISODES}/a=000002-000003"]
    assert store.names(EPISODES) == [f"{EPISODES}/a-000004", f"{EPISODES}/a-000005", *merged]
    compaction.compact(store, 100, lambda line: None)
    assert store.names(EPISODES) == [f"{EPISODES}/a-000005", MERGED_NAME]
    # A collector that was killed after its copy, and before it had removed its own, writes it once more.
    store.put(tmp_path / "copies" / "a-000002", f"{EPISODES}/a-000002", {"collector": {}, "ids": ["a-2"]})
    compaction.compact(store, 100, lambda line: None)
    assert store.names(EPISODES) == [f"{EPISODES}/a-000005", MERGED_NAME]
    fresh = reader(store, tmp_path)
    fresh.poll()
    assert numbers(fresh) == [0, 2, 3, 4, 5]


class Operations:
    """Calls of a store's file system that change it, of which one is the process's last."""

    def __init__(self, store: Store, patch, last: int, before=lambda: None) -> None:
        self.count, self._last, self._before = 0, last, before
        for name in ("makedirs", "put_file", "pipe_file", "rm"):
            patch.setattr(store._fs, name, self._counted(getattr(store._fs, name)))

    def _counted(self, call):
        def replacement(*args, **kwargs):
            self._before()
            self.count += 1
            if self.count == self._last:
                raise Killed
            return call(*args, **kwargs)

        return replacement


def remember(monkeypatch) -> None:
    """Write what is merged only once: it is the same each time."""
    import shutil

    write, known = compaction._write, {}

    def replacement(store, names, target, copies):
        key = tuple(names)
        if key not in known:
            known[key] = (write(store, names, target, copies), target.parent.parent / f"kept-{id(known)}-{len(known)}")
            shutil.copytree(target, known[key][1])
        else:
            shutil.copytree(known[key][1], target)
        return known[key][0]

    monkeypatch.setattr(compaction, "_write", replacement)


def kill_at(number: int, spool, tmp_path, monkeypatch) -> bool:
    """Kill a compaction at an operation while a reader follows; return whether there was such an operation."""
    place = tmp_path / str(number)
    store = copy_of(spool, str(place / "store"), tmp_path)
    other = Store(store.url)
    follower, polled = reader(other, place), [0]

    def follow():
        polled[0] += 1
        if polled[0] % 4 == number % 4:
            follower.poll()

    was_killed = False
    with monkeypatch.context() as patch:
        Operations(store, patch, number, follow)
        try:
            compaction.compact(store, 100, lambda line: None)
        except Killed:
            was_killed = True
    fresh = reader(other, place)
    fresh.poll()
    saved = Fields(fresh.state(), "state")
    compaction.compact(Store(store.url), 100, lambda line: None)
    assert Store(store.url).names(EPISODES) == [f"{EPISODES}/a-000005", MERGED_NAME]
    again = reader(other, place)
    again.restore(saved)
    for each in (follower, fresh, again):
        each.poll()
        assert sorted(numbers(each)) == [0, 2, 3, 4, 5] and each.ids == {f"a-{number}" for number in NUMBERS}
    assert numbers(again) == numbers(fresh)
    assert not set(fresh.finished) & set(store.names(EPISODES)), "what a restart needs"
    return was_killed


@pytest.mark.parametrize(
    "number", [pytest.param(1, marks=pytest.mark.long), 5, pytest.param(14, marks=pytest.mark.long)]
)
def test_a_kill_loses_nothing(number, spool, tmp_path, monkeypatch):
    remember(monkeypatch)
    kill_at(number, spool, tmp_path, monkeypatch)


@pytest.mark.long
def test_a_kill_at_any_operation_loses_nothing(spool, tmp_path, monkeypatch):
    remember(monkeypatch)
    number = 1
    while kill_at(number, spool, tmp_path, monkeypatch):
        number += 1
    assert number > 15  # copies of files, the mark, and the removals of five shards


def test_a_shard_that_goes_while_it_is_read_is_read_where_it_went(spool, tmp_path, monkeypatch):
    store = copy_of(spool, str(tmp_path / "store"), tmp_path)
    found, get = reader(store, tmp_path), store._fs.get_file
    merged = []

    def get_late(source, target):
        if not merged:
            merged.append(1)
            compaction.compact(Store(store.url), 100, lambda line: None)
        get(source, target)

    monkeypatch.setattr(store._fs, "get_file", get_late)
    found.poll()
    found.poll()
    assert sorted(numbers(found)) == [0, 2, 3, 4, 5] and len(found.ids) == len(NUMBERS)


def test_a_window_keeps_its_order_over_a_merge_and_a_restart(spool, tmp_path):
    store = copy_of(spool, str(tmp_path / "store"), tmp_path)
    found = reader(store, tmp_path, window=3)
    found.poll()
    before = numbers(found)
    saved = Fields(found.state(), "state")
    compaction.compact(store, 100, lambda line: None)
    again = reader(store, tmp_path, window=3)
    again.restore(saved)
    assert numbers(again) == before == [3, 4, 5]
    for each in (found, again):
        each.poll()
        assert numbers(each) == before and MERGED_NAME not in each.finished
    fresh = reader(store, tmp_path, window=1)
    fresh.poll()
    assert numbers(fresh) == [5]  # the merged shard is older than the one beside it


def test_a_damaged_shard_ends_the_compaction_and_stays(spool, tmp_path):
    store = copy_of(spool, str(tmp_path / "store"), tmp_path)
    next((tmp_path / "store/episodes/a-000002/data").glob("*/*")).write_bytes(b"damaged")
    with pytest.raises(StoreError) as raised:
        compaction.compact(store, 100, lambda line: None)
    assert raised.value.code == "store-damaged" and len(store.names(EPISODES)) == len(NUMBERS)
