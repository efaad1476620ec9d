"""The collector of a store: numbered attempts of which each is finished once, whatever interrupts it."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from expect import raises_code

from embodrl.config import load_config
from embodrl.config.schema import CollectConfig, Config, EnvConfig
from embodrl.data.demos import POLICY_VERSION
from embodrl.data.replay import HUMAN, POLICY
from embodrl.envs.pool.local import LocalPool
from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.errors import StoreError
from embodrl.fields import Fields
from embodrl.store import collect as store_collect
from embodrl.store import lease
from embodrl.store.collect import PolicyCollector, Uploads, spool_id
from embodrl.types import PolicyOutput

CHUNK, ENVS = 3, 4
KEPT = SimpleNamespace(check=lambda: None)


class Toy(ToyVectorEnv):
    """Loses the episode of its second environment where it is asked to."""

    lose = False

    def chunk_step(self, actions, active):
        step = super().chunk_step(actions, active)
        if self.lose:
            self.lose = False
            step.reward[1] = np.nan
        return step


class Pool(LocalPool):
    """Keeps the episodes that begin."""

    def __init__(self) -> None:
        super().__init__(Toy, {"num_envs": ENVS, "max_episode_steps": 5, "max_chunk": 1, "auto_reset": False})
        self.begun: list[tuple[int, int]] = []
        self.start()

    def reset(self, seeds, task_ids, indices=None, *, copy=False):
        self.begun += zip(seeds.tolist(), task_ids.tolist(), strict=True)
        return super().reset(seeds, task_ids, indices, copy=copy)


class Engine:
    """Actions count up within a chunk; a log-prob is minus the place in it; every chunk has newer weights."""

    def __init__(self) -> None:
        self.version, self.generators = 0, []

    def make_generators(self, seed):
        return []

    def act(self, observation, compute_values=True):
        self.version += 1
        count = observation.batch_size
        places = np.arange(CHUNK, dtype=np.float32)[None, :, None] / 10 + np.zeros((count, CHUNK, 7), np.float32)
        return PolicyOutput(places, torch.from_numpy(-places), None, {}, self.version)


class Shards:
    """Keeps what it is given; raises after ``most`` calls, as a full disk would."""

    def __init__(self, most=10**9, progress=None) -> None:
        self.progress = None if progress is None else Fields(progress, "progress")
        self.episodes, self.last, self.most = [], progress, most

    def add(self, episodes, progress):
        if not self.most:
            raise OSError
        self.most -= 1
        self.episodes += episodes
        self.last = dict(progress)


def collect(shards, num_episodes, pool=None, intervention=None, notes=None):
    pool = pool or Pool()
    config = Config(collect=CollectConfig(seed=7))
    collector = PolicyCollector(config, pool, Engine(), shards, intervention)
    collector.run(num_episodes, lambda: False, lambda done, note: None if notes is None else notes.append(note))
    return collector, pool


def test_frames_have_what_chose_them():
    shards = Shards()
    collect(shards, 8)
    first = shards.episodes[0]
    assert first.id == "collector-0-00000000" and len(first.actions) == 5
    np.testing.assert_allclose(first.actions[:, 0], [0.0, 0.1, 0.2, 0.0, 0.1], atol=1e-6)
    np.testing.assert_allclose(first.outcomes.log_probs, [0.0, -0.7, -1.4, 0.0, -0.7], atol=1e-6)
    assert first.acted[POLICY_VERSION].tolist() == [1, 1, 1, 2, 2]
    assert first.outcomes is not None and (first.outcomes.executed == first.actions).all()
    assert first.images.shape == (5, 1, 32, 32, 3) and first.instruction and first.task == "reach-red"


@pytest.mark.parametrize("kills", [(1, 2), (3, 1, 1)])
def test_each_number_is_finished_once_whatever_interrupts(kills):
    episodes, progress, begun = [], None, []
    for most in kills:
        shards = Shards(most, progress)
        pool = Pool()
        with pytest.raises(OSError):
            collect(shards, 1000, pool)
        episodes, progress, begun = episodes + shards.episodes, shards.last, begun + pool.begun
    shards = Shards(progress=progress)
    _, pool = collect(shards, 40)
    episodes, begun = episodes + shards.episodes, begun + pool.begun
    ids = sorted(int(one.id.rpartition("-")[2]) for one in episodes)
    assert ids == list(range(len(ids))) and len(ids) == 40
    assert len({one.seed for one in episodes}) == len(ids)
    seeds = {one.seed: ("reach-red", "reach-green").index(one.task) for one in episodes}
    assert all(seeds.get(seed, task) == task for seed, task in begun)


def test_a_collector_continues_with_its_own_settings_only():
    shards = Shards()
    collect(shards, 4)
    collect(Shards(progress=shards.last), 8)
    old = {name: value for name, value in shards.last.items() if name != "identity"}
    collect(Shards(progress=old), 8)  # of an earlier version
    for changed in ({"collect": CollectConfig(seed=8)}, {"env": EnvConfig(success_bonus=7.0)}):
        config = Config(**{"collect": CollectConfig(seed=7), **changed})
        with raises_code("collect-other-settings"):
            PolicyCollector(config, Pool(), Engine(), Shards(progress=shards.last))


def test_an_episode_that_a_fault_has_ended_is_run_again():
    shards, pool = Shards(), Pool()
    pool.envs[0].lose = True
    collect(shards, 12, pool)
    ids = sorted(one.id for one in shards.episodes)
    assert len(set(ids)) == len(ids) >= 12
    assert "collector-0-00000001" in ids and pool.begun.count(pool.begun[1]) == 2


@pytest.mark.parametrize("wanted", [6, 7])
def test_a_collection_ends_with_what_was_asked_for_and_a_longer_one_runs_the_rest(wanted):
    first, longer = Shards(), Shards()
    collect(first, wanted)
    longer = Shards(progress=first.last)
    collect(longer, 10)
    found = [int(one.id.rpartition("-")[2]) for one in first.episodes + longer.episodes]
    assert len(first.episodes) == wanted and sorted(found) == list(range(10))


def test_a_collector_that_has_lost_its_name_copies_nothing_and_ends():
    def check():
        raise StoreError("another process is this one", code="store-name-taken")

    uploads = Uploads(SimpleNamespace(), SimpleNamespace(), SimpleNamespace(check=check), interval_s=0.0)
    with raises_code("store-name-taken"):
        while True:
            assert not uploads.is_over()
    uploads.close()


def test_the_share_of_corrected_episodes_is_said():
    def correct(observation, actions):
        return actions, np.array([HUMAN] + [POLICY] * (ENVS - 1), np.int64)

    intervention, notes, shards = SimpleNamespace(begin=lambda rows: None, correct=correct), [], Shards()
    collect(shards, 8, intervention=intervention, notes=notes)
    assert "25% of episodes corrected" in notes[-1] and shards.last["corrected"] == 2
    collect(Shards(progress=shards.last), 12, notes=notes)
    assert "corrected" not in notes[-1]


def test_a_spool_keeps_its_id(tmp_path):
    assert spool_id(tmp_path / "a") == spool_id(tmp_path / "a") != spool_id(tmp_path / "b")


def test_a_spool_is_of_one_store(tmp_path, monkeypatch):
    def ended(*_, **__):
        raise Ended

    def run(store, name="desk"):
        spool = f"store.spool_dir={tmp_path / 'spool'}"
        store_collect.collect(load_config(["env=toy", f"store.url={store}", spool, f"store.collector={name}"]))

    monkeypatch.setattr(store_collect, "prepare_acting", lambda *_: None)
    monkeypatch.setattr(store_collect, "make_single_pool", ended)
    monkeypatch.chdir(tmp_path)
    for again in (tmp_path / "first", "first"):
        with pytest.raises(Ended):
            run(again)
    with raises_code("store-other-spool"):
        run(tmp_path / "second")
    with pytest.raises(Ended):
        run(tmp_path / "second", "another")
    (tmp_path / "spool" / "desk" / "store.url").unlink()
    with pytest.raises(Ended):
        run(tmp_path / "second")


def test_a_store_that_does_not_answer_holds_nobody_up():
    begun, answer = threading.Event(), threading.Event()

    def upload():
        begun.set()
        assert answer.wait(30)

    marks = iter([None, "the trainer has finished"])
    store = SimpleNamespace(mark=lambda name: next(marks))
    uploads = Uploads(store, SimpleNamespace(upload=upload), KEPT, interval_s=0.0)
    assert not uploads.is_over() and begun.wait(30)
    assert not any(uploads.is_over() for _ in range(3))  # asked while it waits, it begins nothing else
    answer.set()
    while not uploads.is_over():  # the first look finds no mark, and the second one does
        time.sleep(0.001)
    uploads.close()
    assert next(marks, None) is None


def test_what_the_store_refuses_ends_the_collector():
    def upload():
        raise StoreError("another one of that name", code="store-name-taken")

    uploads = Uploads(SimpleNamespace(mark=lambda name: None), SimpleNamespace(upload=upload), KEPT, interval_s=0.0)
    with raises_code("store-name-taken"):
        while True:
            assert not uploads.is_over()


class Ended(Exception):
    """Ends a collector where its policy would be loaded."""


def test_a_second_collector_of_a_name_is_refused_until_the_first_ends(tmp_path, monkeypatch):
    pool = SimpleNamespace(start=lambda: None, close=lambda: None, spec=SimpleNamespace(control_hz=10.0))
    monkeypatch.setattr(store_collect, "make_single_pool", lambda *_, **__: pool)
    monkeypatch.setattr(store_collect, "prepare_acting", lambda *_: None)
    monkeypatch.setattr(store_collect, "frame_rate", lambda *_: 10.0)
    for name in ("BEAT_S", "_LOOK_S"):
        monkeypatch.setattr(lease, name, 0.001)
    waited = []

    def run(spool, during):
        def engine(*_, **__):
            during()
            raise Ended

        monkeypatch.setattr(store_collect, "make_acting", engine)
        settings = [f"store.url={tmp_path / 'store'}", f"store.spool_dir={tmp_path / spool}"]
        with pytest.raises(Ended):
            store_collect.collect(load_config(["env=toy", *settings]), waited.append)

    def second():
        with raises_code("store-name-taken"):
            run("b", lambda: None)

    run("a", second)
    assert len(waited) == 1
    run("b", lambda: None)  # at once
    assert len(waited) == 1
