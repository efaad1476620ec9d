"""A name in a store has one owner at a time."""

import pytest
from expect import raises_code

from embodrl.storage.lease import BEAT_S, STALE_S, Lease
from embodrl.storage.store import Store


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


@pytest.fixture(params=["directory", "memory://lease"])
def store(request, tmp_path):
    found = Store(str(tmp_path) if request.param == "directory" else f"{request.param}/{tmp_path.name}")
    found.create()
    return found


@pytest.fixture
def time() -> Time:
    return Time()


def lease(store, owner: str, time: Time) -> Lease:
    return Lease(store, "desk", owner, time, time.sleep)


def test_a_second_owner_is_refused_while_the_first_lives(store, time):
    first, said = lease(store, "a", time), []
    first.take(said.append)
    assert not said
    time.during = first.keep
    with raises_code("store-name-taken"):
        lease(store, "b", time).take(said.append)
    assert len(said) == 1 and time.now <= 2 * BEAT_S


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
        first.keep()
    second.keep()
    first.release()  # not its own any more
    second.keep()


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
