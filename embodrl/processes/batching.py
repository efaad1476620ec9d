"""Requests of coroutines, answered in batches by one thread."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Content = TypeVar("Content")
Answer = TypeVar("Answer")


class Request(Generic[Content, Answer]):
    """A request and the future of its answer."""

    def __init__(self, content: Content) -> None:
        self.content = content
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def settle(self, answer: Answer | Exception) -> None:
        """Answer the request, unless it was cancelled."""
        if self.answer.done():
            return
        if isinstance(answer, Exception):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


class BatchPump(ABC, Generic[Content, Answer]):
    """Batches the requests that arrive while its thread is busy. The methods belong to one event loop.

    Attributes:
        batches: number of computed batches.
        requests: number of requests in them.
        busy_s: busy time of the thread, in seconds.
    """

    def __init__(self, name: str) -> None:
        self.batches = self.requests = 0
        self.busy_s = 0.0
        self._waiting: list[Request[Content, Answer]] = []
        self._pump: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    @abstractmethod
    def choose(self, waiting: list[Request[Content, Answer]]) -> list[Request[Content, Answer]]:
        """Return the requests of the next batch, chosen from the waiting ones, oldest first; none of them is cancelled.

        May settle requests itself, which then must not be in the batch.
        """

    async def gather(self, waiting: Sequence[Request[Content, Answer]]) -> None:
        """Wait for further requests to join the next batch; by default for none."""

    @abstractmethod
    def compute(self, batch: list[Content]) -> Sequence[Answer]:
        """Return one answer per request. Runs in the thread; an error fails the whole batch."""

    def computed(self, batch: Sequence[Content], answers: Sequence[Answer | Exception]) -> None:
        """Record a batch before its requests, including cancelled ones, are answered."""

    async def submit(self, request: Request[Content, Answer]) -> Answer:
        self._waiting.append(request)
        if self._pump is None:
            self._pump = asyncio.create_task(self._serve())
        return await request.answer

    async def _serve(self) -> None:
        """Answer until no request waits. The task starts in the next cycle of the loop, so all requests of this cycle
        join.
        """
        batch: list[Request[Content, Answer]] = []
        try:
            while self._waiting:
                await self.gather(self._waiting)
                # A request may have been cancelled during gathering, and must not take a place in the batch.
                alive = [request for request in self._waiting if not request.answer.done()]
                batch = self.choose(alive) if alive else []
                taken = set(map(id, batch))
                self._waiting = [r for r in alive if id(r) not in taken and not r.answer.done()]
                if batch:
                    await self._answer(batch)
                    await asyncio.sleep(0)  # answered coroutines may submit again before the next batch
        except Exception as error:  # noqa: BLE001 - a request without an answer would wait forever
            for request in (*batch, *self._waiting):
                request.settle(error)
            self._waiting = []
        finally:
            self._pump = None

    async def _answer(self, batch: list[Request[Content, Answer]]) -> None:
        contents = [request.content for request in batch]
        self.batches += 1
        self.requests += len(batch)
        clock = time.perf_counter()
        answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._computed, contents)
        self.busy_s += time.perf_counter() - clock
        self.computed(contents, answers)
        for request, answer in zip(batch, answers, strict=True):
            request.settle(answer)

    def _computed(self, contents: list[Content]) -> Sequence[Answer | Exception]:
        """Return the answers, or the error for each request, which is raised in every waiting coroutine."""
        try:
            return self.compute(contents)
        except BaseException as error:  # noqa: BLE001 - no future can hold StopIteration or a BaseException
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                return [error] * len(contents)
            wrapped = RuntimeError(f"raised {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            return [wrapped] * len(contents)

    def mean_batch(self) -> float:
        """Return the mean number of requests per batch; 0 before the first batch."""
        return self.requests / self.batches if self.batches else 0.0

    def close(self) -> None:
        """Wait for the batch in progress and end the thread. The coroutines must have ended or been cancelled."""
        self._thread.shutdown()
