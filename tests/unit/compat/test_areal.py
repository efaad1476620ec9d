"""Code written for AReaL's AsyncTaskRunner runs as it is written."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from expect import raises_code

from embodrl.compat.areal import AsyncTaskRunner, TaskQueueFullError
from embodrl.errors import TaskIdTaken, TaskRunnerError

LONG = 60.0


@pytest.fixture
def runner() -> Iterator[AsyncTaskRunner[Any]]:
    made = AsyncTaskRunner[Any](max_queue_size=50, poll_wait_time=0.05, poll_sleep_time=0.01)
    made.initialize()
    yield made
    made.destroy()


async def add(a: int, b: int) -> int:
    await asyncio.sleep(0.0)
    return a + b


async def never(number: int) -> int:
    await asyncio.Event().wait()
    return number


def test_values_come_back_for_all_kinds_of_arguments(runner: AsyncTaskRunner[Any]) -> None:
    assert runner.get_queue_sizes() == (0, 0)
    runner.submit(add, 5, 10)
    assert runner.wait(count=1, timeout=LONG) == [15]
    runner.submit(add, a=5, b=3)
    runner.submit(add, 4, b=7)
    assert set(runner.wait(count=2, timeout=LONG)) == {8, 11}
    runner.submit_batch([(add, (1, 2), {}), (add, (3,), {"b": 4})])
    assert set(runner.wait(2)) == {3, 7}


def test_many_results_accumulate_and_come_in_random_order(runner: AsyncTaskRunner[Any]) -> None:
    for number in range(40):
        runner.submit(add, number, 0)
    found = [runner.wait(count, LONG) for count in (5, 10, 25)]
    assert [len(part) for part in found] == [5, 10, 25]
    assert sorted(value for part in found for value in part) == list(range(40))
    # A permutation of 25 that is sorted by chance: 1 in 10**25.
    assert found[2] != sorted(found[2])


def test_ids_are_the_callers_and_free_once_a_task_has_ended(runner: AsyncTaskRunner[Any]) -> None:
    assert runner.submit(never, 1, task_id=7) == 7
    with raises_code("task-id-taken", TaskIdTaken, "Duplicate task_id: 7"):
        runner.submit(add, 1, 1, task_id=7)
    with pytest.raises(ValueError, match="Duplicate task_id: 7"):
        runner.submit(add, 1, 1, task_id=7)
    assert runner.submit(add, 1, 1, task_id=1) == 1
    (timed,) = runner.wait(1, LONG, with_timing=True)
    assert (timed.data, timed.task_id) == (2, 1) and timed.create_time > 0
    assert runner.submit(add, 2, 2, task_id=1) == 1
    numbered = {runner.submit(never, number) for number in range(20)}
    assert len(numbered) == 20 and 7 not in numbered


def test_nothing_starts_while_paused(runner: AsyncTaskRunner[Any]) -> None:
    started = threading.Event()

    async def start(number: int) -> int:
        started.set()
        return number * 2

    runner.pause()
    for number in range(5):
        runner.submit(start, number)
    assert runner.get_input_queue_size() == 5 and runner.get_output_queue_size() == 0
    with pytest.raises(TimeoutError, match="Timed out waiting for 5 results, only received 0"):
        runner.wait(count=5, timeout=0.01)
    assert not started.is_set()
    runner.resume()
    assert set(runner.wait(count=5, timeout=LONG)) == {0, 2, 4, 6, 8}


def test_results_of_a_wait_that_timed_out_are_kept(runner: AsyncTaskRunner[Any]) -> None:
    for number in range(3):
        runner.submit(add, number, 0)
    found = runner.wait(1, LONG)
    runner.submit(never, 100)
    with pytest.raises(TimeoutError, match="waiting for 9 results, only received"):
        runner.wait(count=9, timeout=0.01)
    assert sorted(found + runner.wait(count=2, timeout=LONG)) == [0, 1, 2]


def test_a_full_queue_refuses_until_a_task_has_ended() -> None:
    runner = AsyncTaskRunner[int](max_queue_size=2)
    runner.initialize()
    gate: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    waits = threading.Event()

    async def wait() -> int:
        event = asyncio.Event()
        gate.append((asyncio.get_running_loop(), event))
        waits.set()
        await event.wait()
        return 9

    runner.submit(wait)
    assert waits.wait(LONG)
    runner.submit(never, 2)
    with pytest.raises(RuntimeError, match="Input queue full"):
        runner.submit(never, 3)
    with raises_code("task-queue-full", TaskQueueFullError, "Input queue full"):
        runner.submit(never, 3)
    loop, event = gate[0]
    loop.call_soon_threadsafe(event.set)
    assert runner.wait(1, LONG) == [9]
    runner.submit(never, 3)
    runner.destroy()


def test_a_task_that_raises_gives_none_and_is_logged(
    runner: AsyncTaskRunner[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> int:
        raise ValueError("broken")

    runner.submit(fail, task_id=3)
    assert runner.wait(count=1, timeout=LONG) == [None]
    assert "task 3 failed: ValueError('broken')" in caplog.text
    runner.submit(add, 40, 2)
    assert runner.wait(count=1, timeout=LONG) == [42]
    runner._check_thread_health()


def test_it_ends_with_unfinished_tasks_and_may_begin_again() -> None:
    runner = AsyncTaskRunner[int](max_queue_size=50, enable_tracing=True)
    with raises_code("task-runner", TaskRunnerError, "initialize"):
        runner.submit(add, 1, 1)
    runner.initialize(logging.getLogger("mine"))
    for number in range(10):
        runner.submit(never, number, task_id=number)
    runner.destroy()
    with pytest.raises(RuntimeError, match="has no thread"):
        runner.wait(1, 0.0)
    runner.initialize()
    runner.submit(add, 1, 1, task_id=0)
    assert runner.wait(1, LONG) == [2]
    runner.destroy()
    runner.destroy()


def test_a_loop_that_has_failed_is_reported(runner: AsyncTaskRunner[Any]) -> None:
    async def leave() -> int:
        raise SystemExit(3)

    runner.submit(leave)
    with raises_code("task-runner", TaskRunnerError, "SystemExit"):
        runner.wait(1, LONG)
    with pytest.raises(RuntimeError, match="loop of the tasks has failed"):
        runner._check_thread_health()
