"""AReaL's spelling of a task runner (``areal.core.async_task_runner``)."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, overload

from embodrl.errors import TaskIdTaken, TaskQueueFull, TaskRunnerError
from embodrl.workers.workflows import task_runner

T = TypeVar("T")
TaskQueueFullError = TaskQueueFull
_Call = tuple[Callable[..., Awaitable[T]], Sequence[Any], Mapping[str, Any]]


@dataclass
class TimedResult(Generic[T]):
    """Result of a task.

    Attributes:
        create_time: its start, of ``time.monotonic_ns``.
        data: what it returned; None if it raised.
        task_id: its id.
    """

    create_time: int
    data: T
    task_id: Hashable


class AsyncTaskRunner(Generic[T]):
    """``embodrl.AsyncTaskRunner`` with the names and errors of AReaL's.

    Tasks start at once; a task that raises is logged, and its result is None.

    Args:
        max_queue_size: tasks queued and running together; twice as many results wait for ``wait``.
        poll_wait_time, poll_sleep_time: seconds by which AReaL may notice an event late; here none is polled for.
        enable_tracing: log every start and end.
    """

    def __init__(
        self,
        max_queue_size: int,
        poll_wait_time: float = 0.05,
        poll_sleep_time: float = 0.5,
        enable_tracing: bool = False,
    ) -> None:
        self.max_queue_size = max_queue_size
        self.poll_wait_time = poll_wait_time
        self.poll_sleep_time = poll_sleep_time
        self.enable_tracing = enable_tracing
        self.logger = logging.getLogger(__name__)
        self._lock = threading.Lock()
        self._ids: set[Hashable] = set()
        self._numbers = itertools.count()
        self._late: deque[TimedResult[T]] = deque()  # taken by a ``wait`` that timed out
        self._runner: task_runner.AsyncTaskRunner | None = None

    def initialize(self, logger: logging.Logger | None = None) -> None:
        """Start the thread of the tasks.

        Raises:
            TaskRunnerError: ``max_queue_size`` is below 1.
        """
        self.logger = logger or self.logger
        self._runner = task_runner.AsyncTaskRunner(self.max_queue_size, self.max_queue_size)

    def destroy(self, timeout: float = 30.0) -> None:
        """Cancel all tasks, drop their results, and wait for the thread; may be initialized again.

        Raises:
            TaskRunnerError: a task has not ended after ``timeout`` seconds.
        """
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close(timeout)
        self._ids.clear()
        self._late.clear()

    def submit(
        self, async_fn: Callable[..., Awaitable[T]], *args: Any, task_id: Hashable = None, **kwargs: Any
    ) -> Hashable:
        """Queue ``async_fn(*args, **kwargs)``; return its id, the next number by default.

        Raises:
            TaskQueueFullError: ``max_queue_size`` tasks have not ended.
            TaskIdTaken: a task with the id has not ended.
            TaskRunnerError: not initialized, or destroyed.
        """
        runner = self._running()
        with self._lock:
            if task_id is None:
                task_id = next(number for number in self._numbers if number not in self._ids)
            elif task_id in self._ids:
                raise TaskIdTaken(f"Duplicate task_id: {task_id}", "wait for it, or choose another id")
            if len(self._ids) >= self.max_queue_size:
                raise TaskQueueFullError(
                    f"Input queue full: {len(self._ids)} tasks have not ended", "wait(), or raise max_queue_size"
                )
            self._ids.add(task_id)
        if self.enable_tracing:
            self.logger.info("task %s is submitted", task_id)
        runner.submit(self._timed, async_fn, args, kwargs, task_id)
        return task_id

    def submit_batch(self, tasks: Sequence[_Call[T]]) -> None:
        """Queue function, arguments and keyword arguments of several tasks. Raises as ``submit``."""
        for async_fn, args, kwargs in tasks:
            self.submit(async_fn, *args, **kwargs)

    @overload
    def wait(self, count: int, timeout: float | None = None, with_timing: Literal[False] = False) -> list[T]: ...
    @overload
    def wait(self, count: int, timeout: float | None = None, *, with_timing: Literal[True]) -> list[TimedResult[T]]: ...
    def wait(
        self, count: int, timeout: float | None = None, with_timing: bool = False
    ) -> list[T] | list[TimedResult[T]]:
        """Return ``count`` results in random order, as in AReaL; None for a task that raised.

        Raises:
            TimeoutError: fewer came within ``timeout`` seconds; the next ``wait`` returns them.
            TaskRunnerError: not initialized, or destroyed.
        """
        runner = self._running()
        found: list[TimedResult[T]] = []
        while self._late and len(found) < count:
            found.append(self._late.popleft())
        if len(found) < count:
            found += [result.value for result in runner.wait(count - len(found), timeout) if result.status == "ok"]
        if len(found) < count:
            self._late.extendleft(reversed(found))
            _ = self._running()
            raise TimeoutError(f"Timed out waiting for {count} results, only received {len(found)}.")
        random.shuffle(found)
        return found if with_timing else [result.data for result in found]

    def pause(self) -> None:
        """Start no more tasks; running ones continue."""
        self._running().pause()

    def resume(self) -> None:
        """Start tasks again."""
        self._running().resume()

    def get_queue_sizes(self) -> tuple[int, int]:
        """Return the numbers of tasks that have not started, and of results to wait for."""
        health = self._running().health()
        return health.queued, health.undelivered + len(self._late)

    def get_input_queue_size(self) -> int:
        """Return the number of tasks that have not started."""
        return self.get_queue_sizes()[0]

    def get_output_queue_size(self) -> int:
        """Return the number of results to wait for."""
        return self.get_queue_sizes()[1]

    def _check_thread_health(self) -> None:  # pyright: ignore[reportUnusedFunction]  (AReaL's own tests call it)
        if (error := self._running().health().fatal_error) is not None:
            raise TaskRunnerError("the event loop of the tasks has failed", "make a new runner") from error

    def _running(self) -> task_runner.AsyncTaskRunner:
        if self._runner is None:
            raise TaskRunnerError("the task runner has no thread", "call initialize() first, and destroy() last")
        return self._runner

    async def _timed(
        self, async_fn: Callable[..., Awaitable[T]], args: Sequence[Any], kwargs: Mapping[str, Any], task_id: Hashable
    ) -> TimedResult[T | None]:
        started = time.monotonic_ns()
        data = None
        try:
            data = await async_fn(*args, **kwargs)
        except (SystemExit, KeyboardInterrupt):
            raise  # ends the loop
        except BaseException as error:
            if self._runner is not None:  # else ``destroy`` has cancelled it
                self.logger.error("task %s failed: %r", task_id, error, exc_info=error)
        finally:
            with self._lock:
                self._ids.discard(task_id)
        if self.enable_tracing:
            self.logger.info("task %s has ended", task_id)
        return TimedResult(started, data, task_id)
