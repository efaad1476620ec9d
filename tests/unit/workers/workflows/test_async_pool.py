"""The environments of a pool as asynchronous ones: calls that are given up, and calls too many."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from expect import raises_code

from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EnvError
from embodrl.workers.workflows.async_pool import AsyncPool

LONG = 60.0  # seconds that pass only where something is broken
FORWARD = {"actions": np.full((2, 7), 0.3, np.float32)}
OTHER_WAY = {"actions": np.full((2, 7), -0.3, np.float32)}


@pytest.fixture
def pool() -> Iterator[EnvPool]:
    kwargs = {"image_size": 8, "auto_reset": False, "tasks": ["reach-red"], "include_state": True}
    with EnvPool.create("toy", kwargs, total_num_envs=3, num_processes=1) as made:
        yield made


class Brake:
    """Holds the simulator's thread in ``get_row_state`` until the test lets it go."""

    def __init__(self, process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.release, call = threading.Event(), threading.Event(), process.pool.call

        def held(method: str, arguments: Any) -> Any:
            self.reached.set()
            assert self.release.wait(LONG)
            return call(method, arguments)

        monkeypatch.setattr(process.pool, "call", held)


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, LONG)


async def queued(process: Any, count: int) -> None:
    while len(process._waiting) < count:
        await asyncio.sleep(0)


async def give_up(call: asyncio.Task[Any]) -> None:
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


def test_a_chunk_that_is_given_up_is_not_played_in_the_next_episode(
    pool: EnvPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        environments = AsyncPool(pool)
        (process,) = environments._processes
        steps, step = list[list[int]](), process.pool.step

        def recorded(actions: Any, active: Any) -> Any:
            steps.append(np.flatnonzero(active).tolist())
            return step(actions, active)

        monkeypatch.setattr(process.pool, "step", recorded)
        busy, mine, beside = environments.environments()
        await asyncio.gather(*(env.initialize("reach-red", 3) for env in (busy, mine, beside)))
        brake = Brake(process, monkeypatch)
        held = asyncio.create_task(busy.get_state())
        await until(brake.reached)
        abandoned = asyncio.create_task(mine.execute("act", FORWARD))
        await queued(process, 1)
        await give_up(abandoned)
        with raises_code("episode-not-started", EnvError):
            await mine.execute("act", FORWARD)
        again = asyncio.create_task(mine.initialize("reach-red", 3))
        await queued(process, 2)
        brake.release.set()
        await asyncio.gather(held, again)
        left, right = await asyncio.gather(mine.execute("act", OTHER_WAY), beside.execute("act", OTHER_WAY))
        assert steps == [[1, 2]] and left.episode_length == right.episode_length == 2
        np.testing.assert_array_equal(left.observation.state, right.observation.state)
        environments.close()

    asyncio.run(play())


def test_a_queue_of_abandoned_requests_is_no_work(pool: EnvPool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        environments = AsyncPool(pool)
        (process,) = environments._processes
        busy, mine, _ = environments.environments()
        await asyncio.gather(busy.initialize("reach-red", 3), mine.initialize("reach-red", 3))
        brake = Brake(process, monkeypatch)
        held = asyncio.create_task(busy.get_state())
        await until(brake.reached)
        abandoned = asyncio.create_task(mine.execute("act", FORWARD))
        await queued(process, 1)
        await give_up(abandoned)
        requests, pump = process.requests, process._pump
        assert pump is not None
        brake.release.set()
        await held
        await pump
        assert process.requests == requests and not process._waiting
        environments.close()

    asyncio.run(play())


def test_a_second_call_of_an_environment_that_has_not_answered_is_refused(
    pool: EnvPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        environments = AsyncPool(pool)
        env = environments.environments()[0]
        await env.initialize("reach-red", 3)
        brake = Brake(environments._processes[0], monkeypatch)
        first = asyncio.create_task(env.get_state())
        await until(brake.reached)
        with raises_code("env-order", EnvError):
            await env.execute("act", FORWARD)
        brake.release.set()
        assert await first
        assert (await env.execute("act", FORWARD)).episode_length == 2
        environments.close()

    asyncio.run(play())
