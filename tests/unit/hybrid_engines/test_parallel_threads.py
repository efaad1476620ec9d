"""Threads that let others go first."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from embodrl.hybrid_engines.training.parallel import on_threads


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
@pytest.mark.parametrize(("num_tasks", "num_threads"), [(4, 2), (1, 2), (4, 1)])
def test_threads_may_go_after_others_and_this_one_stays_as_it_is(num_tasks: int, num_threads: int) -> None:
    mine = niceness()
    assert on_threads([niceness] * num_tasks, num_threads, 3) == [min(19, mine + 3)] * num_tasks
    assert on_threads([niceness] * num_tasks, num_threads) == [mine] * num_tasks
    assert niceness() == mine
