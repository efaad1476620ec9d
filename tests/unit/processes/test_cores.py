"""The process works near its GPU; its children are free to bind themselves elsewhere."""

from __future__ import annotations

import os
import threading

import pytest

from embodrl.processes.cores import bound_to, unbind


class Cores:
    """A machine of 8 cores, and what threads and processes are bound to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of = {0: set(range(8))}
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(self.of[pid]))
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: self.of.update({pid: set(cpus)}))


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Cores:
    return Cores(monkeypatch)


def test_bound_for_the_block(cores: Cores) -> None:
    with bound_to((4, 5, 90)):  # 90 is not among those that this process may use
        assert cores.of[0] == {4, 5}
        unbind(17)
        assert cores.of[17] == set(range(8))
    assert cores.of[0] == set(range(8))
    unbind(18)
    assert 18 not in cores.of  # inherits what it should


@pytest.mark.parametrize("cpus", [(), (90, 91)])
def test_nothing_to_bind_to(cores: Cores, cpus: tuple[int, ...]) -> None:
    with bound_to(cpus):
        assert cores.of == {0: set(range(8))}
        unbind(17)
    assert cores.of == {0: set(range(8))}


def test_threads_of_the_block_are_bound_too() -> None:
    """On this machine."""
    mine = os.sched_getaffinity(0)
    seen: list[set[int]] = []
    with bound_to([min(mine)]):
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
    assert seen == [{min(mine)}] and os.sched_getaffinity(0) == mine
