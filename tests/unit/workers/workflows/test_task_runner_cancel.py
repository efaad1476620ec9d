"""AsyncTaskRunner: cancelling at awkward moments, and the loop of uvloop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from embodrl.workers.workflows import task_runner
from embodrl.workers.workflows.task_runner import AsyncTaskRunner

LONG = 60.0  # seconds that pass only where something is broken


async def give(value: Any) -> Any:
    return value


def test_a_task_that_is_cancelled_while_it_is_made_has_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    with AsyncTaskRunner(max_in_flight=1, max_queue_size=4) as runner:
        runner.submit(give, 0)
        assert [result.value for result in runner.wait(1, LONG)] == [0]
        create, answers = runner._loop.create_task, list[bool]()

        def cancel_first(coroutine: Any) -> Any:
            monkeypatch.setattr(runner._loop, "create_task", create)
            other = threading.Thread(target=lambda: answers.append(runner.cancel("victim")))
            other.start()
            other.join(LONG)
            return create(coroutine)

        monkeypatch.setattr(runner._loop, "create_task", cancel_first)
        runner.submit(give, 1, task_id="victim")
        results = runner.wait(1, LONG)
        assert answers == [True] and [(result.id, result.status) for result in results] == [("victim", "cancelled")]
        assert results[0].ran_s == 0
        runner.submit(give, 2)  # its slot, the only one, is free
        assert [result.value for result in runner.wait(1, LONG)] == [2]


def test_cancelling_a_queued_task_makes_room_for_who_submits(monkeypatch: pytest.MonkeyPatch) -> None:
    with AsyncTaskRunner(max_in_flight=1, max_queue_size=1) as runner:
        runner.pause()
        runner.submit(give, 1, task_id="a")
        waits, wait = threading.Event(), runner._room.wait

        def watched(timeout: float | None = None) -> bool:
            waits.set()  # under the lock, which only `wait` gives up
            return wait(timeout)

        monkeypatch.setattr(runner._room, "wait", watched)
        submitted: list[str] = []
        submitter = threading.Thread(target=lambda: submitted.append(runner.submit(give, 2, task_id="b")), daemon=True)
        submitter.start()
        assert waits.wait(LONG) and runner.cancel("a")
        submitter.join(LONG / 6)
        assert submitted == ["b"]
        runner.resume()
        assert [(result.id, result.status) for result in runner.wait(2, LONG)] == [("a", "cancelled"), ("b", "ok")]


def test_it_runs_on_the_loop_of_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    uvloop = pytest.importorskip("uvloop")
    monkeypatch.setattr(task_runner, "new_event_loop", uvloop.new_event_loop)
    began = threading.Event()

    async def endless() -> None:
        began.set()
        await asyncio.Event().wait()

    async def loop_of_mine() -> Any:
        await asyncio.sleep(0)
        return asyncio.get_running_loop()

    with AsyncTaskRunner(max_in_flight=4, max_queue_size=32) as runner:
        runner.submit(endless, task_id="endless")
        assert began.wait(LONG)
        numbers = [runner.submit(give, number) for number in range(20)]
        assert {result.id: result.value for result in runner.wait(20, LONG)} == dict(
            zip(numbers, range(20), strict=True)
        )
        runner.submit(loop_of_mine)
        assert isinstance(runner.wait(1, LONG)[0].value, uvloop.Loop)
        assert runner.cancel("endless") and runner.wait(1, LONG)[0].status == "cancelled"
        runner.submit(endless, task_id="left")
    assert [(result.id, result.status) for result in runner.wait(1, LONG)] == [("left", "cancelled")]
