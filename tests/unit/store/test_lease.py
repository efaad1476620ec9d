"""A name in a store has one owner at a time."""

import threading
from contextlib import nullcontext

import pytest
from expect import raises_code
from redis_server import fake_redis

from embodrl.store.lease import STALE_S, Lease
from embodrl.store.store import Store

WAIT_S = 30


class Time:
    """A clock that moves when somebody sleeps; ``during`` is called then."""

    def __init__(self) -> None:
        self.now = 0.0
        self.during = lambda: None

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.during()


class Beats(threading.Event):
    """What an owner's thread waits for: it counts when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self._turn, self._waiting = threading.Semaphore(0), threading.Semaphore(0)

    def wait(self, timeout=None) -> bool:
        self._waiting.release()
        self._turn.acquire()
        return self.is_set()

    def set(self) -> None:
        super().set()
        self._turn.release()

    def beat(self) -> None:
        assert self._waiting.acquire(timeout=WAIT_S)
        self._turn.release()
        assert self._waiting.acquire(timeout=WAIT_S)
        self._waiting.release()


@pytest.fixture(params=["directory", "memory", "redis"])
def store(request, tmp_path):
    with fake_redis() if request.param == "redis" else nullcontext("memory://lease") as url:
        found = Store(str(tmp_path) if request.param == "directory" else f"{url}/{tmp_path.name}")
        found.create()
        yield found


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def beats():
    made = Beats()
    yield made
    made.set()


def lease(store, owner: str, time: Time, beats: Beats | None = None) -> Lease:
    return Lease(store, "desk", owner, time, time.sleep, beats)


def cut_off(store) -> None:
    store._fs.pipe_file(store._path("leases/desk", "STABLE"), b'{"owner": "a')


def test_a_second_owner_is_refused_while_the_first_lives_whatever_it_does(store, time, beats):
    first, said = lease(store, "a", time, beats), []
    first.take(said.append)
    first.keep()  # and copies nothing
    assert not said
    time.during = beats.beat
    with raises_code("store-name-taken"):
        lease(store, "b", time).take(said.append)
    assert len(said) == 1 and time.now == 1
    first.check()
    first.release()
    assert store.note("leases/desk") is None


def test_an_outage_does_not_end_the_count(store, time, beats, monkeypatch):
    first = lease(store, "a", time, beats)
    first.take(print)
    first.keep()

    def fail(*_):
        raise OSError("away")

    with monkeypatch.context() as patch:
        patch.setattr(store._fs, "pipe_file", fail)
        beats.beat()
    before = store.note("leases/desk").integer("beats")
    beats.beat()
    assert store.note("leases/desk").integer("beats") > before
    first.check()


def test_a_name_that_is_just_being_written_is_not_free(store, time):
    lease(store, "a", time).take(print)
    cut_off(store)
    time.during = lambda: store.put_note("leases/desk", {"owner": "a", "beats": int(time.now)})
    with raises_code("store-name-taken"):
        lease(store, "b", time).take(print)


def test_a_name_whose_writer_was_killed_becomes_free(store, time):
    lease(store, "a", time).take(print)
    cut_off(store)
    second = lease(store, "b", time)
    second.take(print)
    assert time.now >= STALE_S
    second.check()


def test_the_same_owner_continues_after_a_kill_at_once(store, time):
    lease(store, "a", time).take(print)
    lease(store, "a", time).take(print)
    assert time.now == 0


def test_a_name_that_nobody_keeps_is_taken_over_and_its_owner_ends(store, time):
    first, second = lease(store, "a", time), lease(store, "b", time)
    first.take(print)
    second.take(print)
    assert time.now >= STALE_S
    with raises_code("store-name-taken"):
        first.check()
    second.check()
    first.release()  # not its own any more
    second.check()


def test_a_released_name_is_free_at_once(store, time):
    first = lease(store, "a", time)
    first.take(print)
    first.release()
    lease(store, "b", time).take(print)
    assert time.now == 0


def test_a_name_that_is_released_while_another_waits_is_taken(store, time):
    first = lease(store, "a", time)
    first.take(print)
    time.during = first.release
    lease(store, "b", time).take(print)
    assert time.now < STALE_S
