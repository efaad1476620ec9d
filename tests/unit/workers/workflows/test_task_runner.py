"""AsyncTaskRunner: what it promises, with events for every order that matters."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from expect import open_descriptors, raises_code

from embodrl.errors import TaskIdTaken, TaskQueueFull, TaskRunnerError
from embodrl.workers.workflows.task_runner import AsyncTaskRunner, TaskResult

LONG = 60.0  # seconds that pass only where something is broken


async def give(value: Any) -> Any:
    return value


async def fail(text: str) -> None:
    raise ValueError(text)


class Gate:
    """Tasks wait in it until the test opens it; the test sees how many there are, and how many at most."""

    def __init__(self) -> None:
        self.arrivals = threading.Semaphore(0)
        self.inside = self.most = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()

    async def pass_through(self, value: Any = None) -> Any:
        self._loop = asyncio.get_running_loop()
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.arrivals.release()
        try:
            await self._event.wait()
        finally:
            self.inside -= 1
        return value

    def await_arrivals(self, count: int) -> None:
        for _ in range(count):
            assert self.arrivals.acquire(timeout=LONG)

    def open(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._event.set)


@pytest.fixture
def runner() -> Iterator[AsyncTaskRunner]:
    with AsyncTaskRunner(max_in_flight=16, max_queue_size=64) as made:
        yield made


def by_id(results: list[TaskResult]) -> dict[str, TaskResult]:
    return {result.id: result for result in results}


def settle(runner: AsyncTaskRunner) -> None:
    """Let the loop do all that it has been asked so far."""
    done = threading.Event()
    runner._loop.call_soon_threadsafe(lambda: runner._loop.call_soon(done.set))
    assert done.wait(LONG)


def test_results_carry_ids_values_and_durations(runner: AsyncTaskRunner) -> None:
    first, second = runner.submit(give, 1), runner.submit(give, 2, task_id="mine")
    results = by_id(runner.wait(2, LONG))
    assert second == "mine" and first != second and set(results) == {first, second}
    assert results[first].value == 1 and results["mine"].value == 2
    assert all(r.status == "ok" and r.exception is None and r.queued_s >= 0 and r.ran_s >= 0 for r in results.values())


def test_results_come_in_the_order_that_tasks_end(runner: AsyncTaskRunner) -> None:
    gates = [Gate(), Gate(), Gate()]
    for number, gate in enumerate(gates):
        runner.submit(gate.pass_through, number)
        gate.await_arrivals(1)
    for number in (2, 0, 1):
        gates[number].open()
        settle(runner)
        settle(runner)
    assert [result.value for result in runner.wait(3, LONG)] == [2, 0, 1]


def test_what_a_task_raises_is_its_result_and_not_a_rejection(runner: AsyncTaskRunner) -> None:
    failed, empty = runner.submit(fail, "boom"), runner.submit(give, None)
    results = by_id(runner.wait(2, LONG))
    assert results[failed].status == "error" and isinstance(results[failed].exception, ValueError)
    assert str(results[failed].exception) == "boom" and results[failed].value is None
    assert results[empty].status == "ok" and results[empty].value is None


@pytest.mark.parametrize("function", [lambda: 1, lambda needed: None, None])
def test_what_is_no_coroutine_function_is_an_error_of_that_task(runner: AsyncTaskRunner, function: Any) -> None:
    wrong, right = runner.submit(function), runner.submit(give, 1)
    results = by_id(runner.wait(2, LONG))
    assert isinstance(results[wrong].exception, TypeError) and results[right].value == 1


def test_ten_episodes_run_at_the_same_time(runner: AsyncTaskRunner) -> None:
    gate = Gate()
    for number in range(10):
        runner.submit(gate.pass_through, number)
    gate.await_arrivals(10)  # none leaves before all ten are in
    gate.open()
    assert sorted(result.value for result in runner.wait(10, LONG)) == list(range(10))
    assert gate.most == 10


def test_no_more_than_max_in_flight_run() -> None:
    gate = Gate()
    with AsyncTaskRunner(max_in_flight=3, max_queue_size=20) as runner:
        for number in range(12):
            runner.submit(gate.pass_through, number)
        gate.await_arrivals(3)
        settle(runner)
        assert runner.health().running == 3 and runner.health().queued == 9
        gate.open()
        assert len(runner.wait(12, LONG)) == 12
    assert gate.most == 3


def test_nothing_starts_while_paused_and_what_runs_is_delivered(runner: AsyncTaskRunner) -> None:
    gate = Gate()
    runner.submit(gate.pass_through, "running")
    gate.await_arrivals(1)
    runner.pause()
    for number in range(5):
        runner.submit(give, number)
    gate.open()
    assert [result.value for result in runner.wait(1, LONG)] == ["running"]
    settle(runner)
    health = runner.health()
    assert health.paused and health.queued == 5 and not health.running and not health.undelivered
    runner.resume()
    assert [result.value for result in runner.wait(5, LONG)] == [0, 1, 2, 3, 4]


def test_a_wait_that_times_out_returns_what_there_is_and_loses_nothing(runner: AsyncTaskRunner) -> None:
    gate = Gate()
    runner.submit(give, "early")
    runner.submit(gate.pass_through, "late")
    gate.await_arrivals(1)
    settle(runner)
    assert [result.value for result in runner.wait(2, timeout=0)] == ["early"]
    assert runner.wait(1, timeout=0) == []
    gate.open()
    assert [result.value for result in runner.wait(1, LONG)] == ["late"]


def test_an_interrupted_wait_puts_back_what_it_had_taken(runner: AsyncTaskRunner) -> None:
    for number in range(3):
        runner.submit(give, number)
    while runner.health().undelivered < 3:
        settle(runner)

    def interrupt(timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner._arrived, "wait", interrupt)
        runner.wait(4)
    with pytest.raises(TaskIdTaken):
        runner.submit(give, 1, task_id="0")
    assert [result.value for result in runner.wait(3, LONG)] == [0, 1, 2]


def test_a_full_queue_pushes_back_and_continues() -> None:
    gate = Gate()
    with AsyncTaskRunner(max_in_flight=1, max_queue_size=2, max_results=1) as runner:
        runner.submit(gate.pass_through)
        gate.await_arrivals(1)
        runner.submit(give, 1)
        runner.submit(give, 2)
        with raises_code("task-queue-full", TaskQueueFull, "2", "1"):
            runner.submit(give, 3, timeout=0.01)
        blocked = threading.Thread(target=runner.submit, args=(give, 3))
        blocked.start()
        gate.open()
        assert [result.value for result in runner.wait(4, LONG)] == [None, 1, 2, 3]
        blocked.join(LONG)


def test_undelivered_results_are_bounded_without_deadlock() -> None:
    with AsyncTaskRunner(max_in_flight=2, max_queue_size=3, max_results=2) as runner:
        for number in range(5):
            runner.submit(give, number)
        while runner.health().undelivered < 2:
            settle(runner)
        health = runner.health()
        assert (health.queued, health.running, health.undelivered) == (3, 0, 2)
        with pytest.raises(TaskQueueFull):
            runner.submit(give, 5, timeout=0)
        values = [runner.wait(1, LONG)[0].value for _ in range(5)]  # one by one sets the next one going
        assert values == list(range(5))
        feeder = threading.Thread(target=lambda: [runner.submit(give, number) for number in range(100)])
        feeder.start()
        assert [result.value for result in runner.wait(100, LONG)] == list(range(100))  # more than there is room for
        feeder.join(LONG)


def test_cancelled_tasks_do_not_outgrow_the_bounds() -> None:
    with AsyncTaskRunner(max_in_flight=1, max_queue_size=2, max_results=1) as runner:
        runner.pause()
        for _ in range(3):
            assert runner.cancel(runner.submit(give, 0))
        with raises_code("task-queue-full", TaskQueueFull, "3"):
            runner.submit(give, 0, timeout=0)
        assert [result.status for result in runner.wait(3, LONG)] == ["cancelled"] * 3
        runner.resume()
        runner.submit(give, 7)
        assert runner.wait(1, LONG)[0].value == 7


def test_cancel_a_queued_and_a_running_task(runner: AsyncTaskRunner) -> None:
    gate = Gate()
    running = runner.submit(gate.pass_through)
    gate.await_arrivals(1)
    runner.pause()
    queued = runner.submit(give, 1)
    assert runner.cancel(queued) and runner.cancel(running)
    results = runner.wait(2, LONG)
    assert [(result.id, result.status) for result in results] == [(queued, "cancelled"), (running, "cancelled")]
    assert not runner.cancel(running) and not runner.cancel("never heard of")
    assert gate.inside == 0
    runner.resume()
    runner.submit(give, 2, task_id=queued)  # the id is free again
    assert runner.wait(1, LONG)[0].value == 2


def test_a_task_cancelled_before_its_first_step_is_delivered(runner: AsyncTaskRunner) -> None:
    hold, reached = threading.Event(), threading.Event()

    async def block_the_loop() -> None:
        reached.set()
        assert hold.wait(LONG)

    runner.submit(block_the_loop)
    assert reached.wait(LONG)
    task = runner.submit(give, 1)
    runner._loop.call_soon_threadsafe(runner.cancel, task)  # runs in the cycle in which the task is made
    hold.set()
    results = by_id(runner.wait(2, LONG))
    assert results[task].status in ("ok", "cancelled")


def test_duplicate_ids_are_refused_until_delivery(runner: AsyncTaskRunner) -> None:
    runner.submit(give, 1, task_id="a")
    with raises_code("task-id-taken", TaskIdTaken, "'a'"):
        runner.submit(give, 2, task_id="a")
    assert runner.wait(1, LONG)[0].value == 1
    runner.submit(give, 3, task_id="a")
    assert runner.wait(1, LONG)[0].value == 3
    runner.pause()
    assert [runner.submit(give, 4, task_id="0"), runner.submit(give, 5)] == ["0", "1"]  # numbers step aside


def test_several_threads_submit_and_wait(runner: AsyncTaskRunner) -> None:
    values: list[int] = []

    def submit(first: int) -> None:
        for number in range(first, first + 250):
            runner.submit(give, number)

    def wait() -> None:
        values.extend(result.value for result in runner.wait(250, LONG))

    threads = [threading.Thread(target=submit, args=(250 * i,)) for i in range(4)]
    threads += [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert sorted(values) == list(range(1000))


def test_ten_thousand_tasks_leave_nothing_behind() -> None:
    with AsyncTaskRunner(max_in_flight=1000, max_queue_size=10_000) as runner:

        def play() -> None:
            for number in range(10_000):
                runner.submit(give, number)
            assert sum(result.value for result in runner.wait(10_000, LONG)) == 49_995_000

        play()
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(2):
            play()
        gc.collect()
        assert sys.getallocatedblocks() - before < 5000  # one object a task would be 20,000
        assert not (runner._tasks.ids or runner._tasks.running or runner._tasks.queued)


def test_close_with_work_under_way() -> None:
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    gate = Gate()
    runner = AsyncTaskRunner(max_in_flight=2, max_queue_size=8)
    for number in range(4):
        runner.submit(gate.pass_through, number)
    gate.await_arrivals(2)
    runner.close()
    runner.close()
    assert gate.inside == 0 and runner.health().closed and runner.health().fatal_error is None
    results = runner.wait(10)  # what is left, without waiting
    assert sorted(result.id for result in results) == ["0", "1", "2", "3"]
    assert {result.status for result in results} == {"cancelled"}
    for call in (lambda: runner.wait(1), lambda: runner.submit(give, 1), runner.pause, lambda: runner.cancel("0")):
        with raises_code("task-runner", TaskRunnerError):
            call()
    assert set(threading.enumerate()) <= threads and open_descriptors() <= descriptors


def test_close_releases_who_waits_and_who_submits() -> None:
    gate = Gate()
    runner = AsyncTaskRunner(max_in_flight=1, max_queue_size=1, max_results=1)
    runner.submit(gate.pass_through)
    gate.await_arrivals(1)
    runner.submit(give, 1)
    outcomes: list[Any] = []

    def submit() -> None:
        with raises_code("task-runner", TaskRunnerError):
            runner.submit(give, 2)
        outcomes.append("refused")

    threads = [
        threading.Thread(target=lambda: outcomes.append([result.status for result in runner.wait(5)])),
        threading.Thread(target=submit),
    ]
    for thread in threads:
        thread.start()
    runner.close()
    for thread in threads:
        thread.join(LONG)
    left = [outcome for outcome in outcomes if outcome != "refused"]
    assert "refused" in outcomes and left == [["cancelled", "cancelled"]]


def test_close_waits_for_clean_up_and_names_who_refuses() -> None:
    steps: list[str] = []
    entered, leave = threading.Event(), threading.Event()

    async def tidy() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("tidied")

    async def stubborn() -> None:
        entered.set()
        assert leave.wait(LONG)  # blocks the loop

    runner = AsyncTaskRunner(max_in_flight=2, max_queue_size=2)
    runner.submit(tidy)
    runner.submit(stubborn, task_id="stubborn")
    assert entered.wait(LONG)
    with raises_code("task-runner", TaskRunnerError, "stubborn"):
        runner.close(timeout=0.01)
    leave.set()
    runner.close()
    assert steps == ["tidied"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("from a task")])
def test_a_fatal_error_of_the_loop_reaches_the_next_call(error: BaseException) -> None:
    async def end_the_loop() -> None:
        raise error

    runner = AsyncTaskRunner(max_in_flight=2, max_queue_size=2)
    runner.submit(end_the_loop)
    with raises_code("task-runner", TaskRunnerError, type(error).__name__) as caught:
        runner.wait(1, LONG)
    assert caught.value.__cause__ is error and runner.health().fatal_error is error
    with pytest.raises(TaskRunnerError) as caught:
        runner.submit(give, 1)
    assert caught.value.__cause__ is error
    runner.close()
    assert not runner._thread.is_alive()


def test_a_failure_of_the_runner_itself_does_not_leave_its_users_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = AsyncTaskRunner(max_in_flight=2, max_queue_size=2)
    monkeypatch.setattr(AsyncTaskRunner, "_run", lambda self, entry: 1 // 0)
    runner.submit(give, 1)
    with raises_code("task-runner", TaskRunnerError, "ZeroDivisionError") as caught:
        runner.wait(1, LONG)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    runner.close()


def test_a_task_may_submit_but_not_wait(runner: AsyncTaskRunner) -> None:
    async def submits() -> str:
        return runner.submit(give, "child")

    async def waits() -> Any:
        return runner.wait(5)

    runner.submit(submits)
    assert "child" in {result.value for result in runner.wait(2, LONG)}
    runner.submit(waits)
    assert isinstance(runner.wait(1, LONG)[0].exception, TaskRunnerError)


def test_a_task_that_submits_into_a_full_queue_is_refused_at_once() -> None:
    with AsyncTaskRunner(max_in_flight=1, max_queue_size=1) as runner:

        async def submits() -> None:
            for _ in range(5):
                runner.submit(give, 1)

        runner.submit(submits)
        results = runner.wait(2, LONG)
        assert {type(result.exception) for result in results} == {TaskQueueFull, type(None)}


@pytest.mark.parametrize("bounds", [(0, 1), (1, 0), (4, 4, 3)])
def test_impossible_bounds_are_refused(bounds: tuple[int, ...]) -> None:
    with raises_code("task-runner", TaskRunnerError):
        AsyncTaskRunner(*bounds)


def test_arguments_of_a_failed_task_are_not_kept_alive(runner: AsyncTaskRunner) -> None:
    class Big:
        """Stands for an environment."""

    alive: list[Any] = []

    async def drop(big: Big) -> None:
        alive.append(weakref.ref(big))
        del big
        raise ValueError("no")

    runner.submit(drop, Big())
    result = runner.wait(1, LONG)[0]
    settle(runner)
    gc.collect()
    assert result.status == "error" and alive[0]() is None
