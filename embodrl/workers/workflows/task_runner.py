"""AsyncTaskRunner: many concurrent coroutines on an event loop in its own thread.

One lock guards all state. The loop's thread takes it at most twice per cycle, once for all starting tasks and once for
all finished ones, so a task costs about as much as in plain asyncio. The extra `fast` (uvloop) lowers that.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, Self

from embodrl.errors import TaskIdTaken, TaskQueueFull, TaskRunnerError

try:
    from uvloop import new_event_loop  # pyright: ignore[reportMissingImports]
except ImportError:  # the extra `fast`: the standard library's loop does the same, only slower
    from asyncio import new_event_loop

CLOSE_TIMEOUT_S = 60.0
_SHOWN = 5

P = ParamSpec("P")
CoroutineFunction = Callable[..., Coroutine[object, object, object]]


class TaskResult(NamedTuple):
    """Outcome of a task.

    Attributes:
        id: task id.
        status: ``ok``, ``error`` (it raised) or ``cancelled``.
        value: return value, if ``ok``.
        exception: raised exception, if ``error``.
        queued_s: seconds from ``submit`` to its start, or to its end if it never started.
        ran_s: seconds from its start to its end.
    """

    id: str
    status: Literal["ok", "error", "cancelled"]
    value: Any  # return value of the user's function
    exception: BaseException | None
    queued_s: float
    ran_s: float


@dataclass(frozen=True)
class TaskRunnerHealth:
    """Momentary state of a runner.

    Attributes:
        queued: tasks not started.
        running: tasks on the loop.
        undelivered: results not collected by ``wait`` yet.
        paused: no task starts.
        closed: ``close`` was called.
        fatal_error: error that ended the loop, or None.
    """

    queued: int
    running: int
    undelivered: int
    paused: bool
    closed: bool
    fatal_error: BaseException | None


class _Entry:
    __slots__ = ("args", "function", "id", "started", "submitted", "task")

    def __init__(self, task_id: str, function: CoroutineFunction, args: tuple[object, ...]) -> None:
        self.id = task_id
        self.function = function
        self.args = args
        self.submitted = time.perf_counter()
        self.started = 0.0
        self.task: asyncio.Task[object] | None = None


@dataclass
class _Tasks:
    """Tasks of a runner by id: queued, running, and the results not collected yet.

    Attributes:
        ids: of all three.
        ended: results that only the loop's thread knows yet.
    """

    queued: OrderedDict[str, _Entry] = field(default_factory=OrderedDict[str, _Entry])
    running: dict[str, _Entry] = field(default_factory=dict[str, _Entry])
    results: deque[TaskResult] = field(default_factory=deque[TaskResult])
    ids: set[str] = field(default_factory=set[str])
    ended: list[TaskResult] = field(default_factory=list[TaskResult])
    numbers: Iterator[int] = field(default_factory=itertools.count)


def _or_fail(
    callback: Callable[Concatenate[AsyncTaskRunner, P], None],
) -> Callable[Concatenate[AsyncTaskRunner, P], None]:
    """End the runner if its own callback raises: a loop only logs that, and users would wait forever."""

    @functools.wraps(callback)
    def guarded(runner: AsyncTaskRunner, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(runner, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  (re-raised by the user's next call)
            runner._fail(error)

    return guarded


class AsyncTaskRunner:
    """Runs a bounded number of concurrent coroutines, and delivers their results in completion order.

    Every method is thread-safe; tasks may call methods that need not wait. While ``max_results`` results are
    undelivered, tasks wait in the queue, and ``submit`` waits while the queue is full. So nothing grows without bound,
    and a caller that collects results resumes everything.

    Args:
        max_in_flight: concurrent tasks on the loop.
        max_queue_size: tasks waiting for their start.
        max_results: running tasks and undelivered results together; None for ``max_in_flight + max_queue_size``. The
            result of a task cancelled in the queue counts as queued until it is delivered.
        name: thread name.

    Raises:
        TaskRunnerError: a bound is below 1, or ``max_results`` is below ``max_in_flight``.
    """

    def __init__(
        self, max_in_flight: int, max_queue_size: int, max_results: int | None = None, name: str = "tasks"
    ) -> None:
        self.max_in_flight = max_in_flight
        self.max_queue_size = max_queue_size
        self.max_results = max_in_flight + max_queue_size if max_results is None else max_results
        if min(max_in_flight, max_queue_size) < 1 or self.max_results < max_in_flight:
            raise TaskRunnerError(
                f"bounds of {max_in_flight} in flight, {max_queue_size} queued and {self.max_results} results",
                "use bounds of at least 1, and max_results of at least max_in_flight",
            )
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._arrived = threading.Condition(self._lock)
        self._tasks = _Tasks()
        self._paused = self._closed = self._awake = self._over = False
        self._fatal: BaseException | None = None
        self._loop = new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    # -- for callers ---------------------------------------------------------------------------------------------------

    def submit(
        self, function: CoroutineFunction, *args: object, task_id: str | None = None, timeout: float | None = None
    ) -> str:
        """Queue ``function(*args)``, a coroutine; return its id.

        Args:
            function: coroutine function. Errors it raises, or not being one, show in its result.
            args: arguments of the function.
            task_id: must be unique among tasks with undelivered results; None takes the next number.
            timeout: seconds to wait while the queue is full; None waits without limit.

        Raises:
            TaskIdTaken: the id is in use.
            TaskQueueFull: no room in time; nothing was queued. A task that submits does not wait.
            TaskRunnerError: closed, or the loop has failed.
        """
        with self._lock:
            self._check()
            if not self._has_room():
                self._await_room(timeout)
            if task_id is None:
                task_id = str(next(self._tasks.numbers))
                while task_id in self._tasks.ids:
                    task_id = str(next(self._tasks.numbers))
            elif task_id in self._tasks.ids:
                raise TaskIdTaken(f"there is a task '{task_id}' already", "wait for its result, or choose another id")
            self._tasks.ids.add(task_id)
            self._tasks.queued[task_id] = _Entry(task_id, function, args)
            if not self._awake:
                self._wake()
        return task_id

    def wait(self, count: int = 1, timeout: float | None = None) -> list[TaskResult]:
        """Return the next ``count`` results, in completion order.

        After ``timeout`` seconds it returns the results so far, perhaps none; the others come with the next ``wait``.
        Results are collected as they arrive, so ``count`` may exceed ``max_results``. After ``close`` it returns the
        remaining results without waiting.

        Raises:
            TaskRunnerError: closed without remaining results, the loop has failed, or a task would wait for itself.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        taken: list[TaskResult] = []
        with self._lock:
            try:
                while True:
                    self._check_loop()
                    self._take(count, taken)
                    remaining = None if deadline is None else deadline - time.monotonic()
                    if len(taken) >= count or (remaining is not None and remaining <= 0):
                        return taken
                    if self._over:
                        if not taken:
                            self._check()
                        return taken
                    if threading.current_thread() is self._thread:
                        raise TaskRunnerError("a task waits for results of its own runner", "wait in another thread")
                    self._arrived.wait(remaining)
            except BaseException:  # e.g. raised by a signal handler
                self._tasks.results.extendleft(reversed(taken))
                self._tasks.ids.update(result.id for result in taken)
                raise

    def pause(self) -> None:
        """Start no more tasks; running tasks continue, and their results are delivered."""
        with self._lock:
            self._check()
            self._paused = True

    def resume(self) -> None:
        """Start tasks again."""
        with self._lock:
            self._check()
            self._paused = False
            self._wake()

    def cancel(self, task_id: str) -> bool:
        """Cancel a queued or running task; return False if there is none (any more).

        Its result is delivered as usual: ``cancelled``, unless the task finishes before or despite the cancellation.
        """
        with self._lock:
            self._check()
            entry = self._tasks.queued.pop(task_id, None)
            if entry is not None:
                self._tasks.results.append(_result(entry, "cancelled", None, None))
                self._arrived.notify_all()
                self._room.notify_all()
                return True
            entry = self._tasks.running.get(task_id)
            if entry is not None:
                # In loop order: after the task was created, though perhaps before its first step.
                self._loop.call_soon_threadsafe(self._cancel_running, entry)
            return entry is not None

    def health(self) -> TaskRunnerHealth:
        """Return the current state; never raises."""
        with self._lock:
            sizes = len(self._tasks.queued), len(self._tasks.running), len(self._tasks.results)
            return TaskRunnerHealth(*sizes, self._paused, self._closed, self._fatal)

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Cancel all tasks, wait for their end, and join the thread. Idempotent.

        Raises:
            TaskRunnerError: a task does not end, and its daemon thread is abandoned; or a task calls this method.
        """
        if threading.current_thread() is self._thread:
            raise TaskRunnerError("a task can't close its own runner", "call close() in another thread")
        with self._lock:
            if not self._closed:
                self._closed = True
                for entry in self._tasks.queued.values():
                    self._tasks.results.append(_result(entry, "cancelled", None, None))
                self._tasks.queued.clear()
                self._room.notify_all()
                if self._fatal is None:
                    self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout)
        if self._thread.is_alive():
            with self._lock:
                names = list(self._tasks.running)
            raise TaskRunnerError(
                f"{len(names)} tasks have not ended {timeout:g} s after they were cancelled: "
                f"{', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}",
                "re-raise CancelledError in tasks, and avoid blocking calls",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- under the lock ------------------------------------------------------------------------------------------------

    def _check_loop(self) -> None:
        if self._fatal is not None:
            raise TaskRunnerError(
                f"the event loop of the tasks has failed: {type(self._fatal).__name__}: {self._fatal}",
                "fix the cause; make a new runner",
            ) from self._fatal

    def _check(self) -> None:
        self._check_loop()
        if self._closed:
            raise TaskRunnerError("the task runner is closed", "make a new one")

    def _has_room(self) -> bool:
        held = len(self._tasks.queued) + len(self._tasks.running) + len(self._tasks.results)
        return len(self._tasks.queued) < self.max_queue_size and held < self.max_queue_size + self.max_results

    def _await_room(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._has_room():
            remaining = None if deadline is None else deadline - time.monotonic()
            own = threading.current_thread() is self._thread
            if own or (remaining is not None and remaining <= 0):
                tasks = self._tasks
                raise TaskQueueFull(
                    f"{len(tasks.queued)} tasks are queued, {len(tasks.running)} run and {len(tasks.results)} results "
                    f"are undelivered ({'a task cannot wait for room' if own else f'for {timeout:g} s'})",
                    "wait() for results, resume() if paused, or raise max_queue_size",
                )
            self._room.wait(remaining)
            self._check()

    def _take(self, count: int, taken: list[TaskResult]) -> None:
        before = len(taken)
        while self._tasks.results and len(taken) < count:
            result = self._tasks.results.popleft()
            self._tasks.ids.discard(result.id)
            taken.append(result)
        if len(taken) > before:
            self._room.notify_all()
            if self._tasks.queued:
                self._wake()

    def _wake(self) -> None:
        """Make the loop process the queue, once for all calls until it does."""
        if not self._awake and not self._paused and not self._closed:
            self._awake = True
            self._loop.call_soon_threadsafe(self._start_tasks)

    # -- in the loop's thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                try:
                    runner.run(self._main())
                except BaseException as error:  # noqa: BLE001  (any error is re-raised by the user's next call)
                    self._fail(error)  # before the loop closes: a closed loop accepts no calls
        finally:
            with self._lock:
                self._over = True
                self._tasks.running.clear()
                self._arrived.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._fatal = self._fatal or error
            self._arrived.notify_all()
            self._room.notify_all()
        self._stop.set()

    async def _main(self) -> None:
        await self._stop.wait()
        tasks = [entry.task for entry in self._tasks.running.values() if entry.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._deliver()

    @_or_fail
    def _start_tasks(self) -> None:
        with self._lock:
            self._awake = False
            if self._paused or self._closed:
                return
            room = min(self.max_in_flight, self.max_results - len(self._tasks.results)) - len(self._tasks.running)
            entries = [self._tasks.queued.popitem(last=False)[1] for _ in range(min(room, len(self._tasks.queued)))]
            self._tasks.running.update((entry.id, entry) for entry in entries)
            if entries:
                self._room.notify_all()
        for entry in entries:
            entry.task = self._loop.create_task(self._run(entry))
            entry.task.add_done_callback(functools.partial(self._never_began, entry))

    async def _run(self, entry: _Entry) -> None:
        entry.started = time.perf_counter()
        try:
            result = _result(entry, "ok", await entry.function(*entry.args), None)
        except (SystemExit, KeyboardInterrupt):
            raise  # ends the loop
        except asyncio.CancelledError:
            result = _result(entry, "cancelled", None, None)
        except BaseException as error:  # noqa: BLE001  (the user's function may raise anything: its result)
            own = error.__traceback__  # this frame would keep the arguments alive
            result = _result(entry, "error", None, error.with_traceback(own and own.tb_next))
        self._end(result)

    def _never_began(self, entry: _Entry, _: asyncio.Task[object]) -> None:
        """Return the result of a task cancelled before its first step: its coroutine never ran."""
        if not entry.started:
            self._end(_result(entry, "cancelled", None, None))

    def _end(self, result: TaskResult) -> None:
        """Deliver at the end of this loop cycle, together with everything else that ends in it."""
        if not self._tasks.ended:
            self._loop.call_soon(self._deliver)
        self._tasks.ended.append(result)

    def _cancel_running(self, entry: _Entry) -> None:
        if entry.task is not None:
            entry.task.cancel()

    @_or_fail
    def _deliver(self) -> None:
        ended = self._tasks.ended
        self._tasks.ended = []
        if not ended:
            return
        with self._lock:
            for result in ended:
                self._tasks.running.pop(result.id, None)
            self._tasks.results.extend(ended)
            self._arrived.notify_all()
            if self._tasks.queued:
                self._wake()


def _result(
    entry: _Entry, status: Literal["ok", "error", "cancelled"], value: object, exception: BaseException | None
) -> TaskResult:
    now = time.perf_counter()
    started = entry.started or now
    return TaskResult(entry.id, status, value, exception, started - entry.submitted, now - started)
