"""Groups of workers, and handles of their calls."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from embodrl.deployment import ProcessPlace
from embodrl.errors import EmbodrlError, WorkerDied, WorkerError, WorkerRaised, WorkerTimeout
from embodrl.processes.ending import closing_grace_s
from embodrl.scheduler.channel import Channel
from embodrl.scheduler.launchers.base import CallOutcome, Job, Launcher, Running, settle
from embodrl.scheduler.worker import Arguments, Collect, Worker, marked_method
from embodrl.specs import LAUNCHERS

START_TIMEOUT_S = 180.0
_LOOK_S = 0.2
_NOTICE_S = 5.0
"""Seconds within which the death of a process is noticed."""


class Handle:
    """A call in progress.

    Args:
        futures: futures of the called ranks, by rank.
        collect: combines their results into the result of the call.
        explain: returns diagnostics of a rank that does not answer.
    """

    def __init__(
        self, method: str, futures: dict[int, Future[CallOutcome]], collect: Collect, explain: Callable[[int], str]
    ) -> None:
        self.method = method
        self.futures = futures
        self._collect = collect
        self._explain = explain

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the result.

        Raises:
            WorkerRaised: the method raised in some rank.
            WorkerDied: a process of the group has died.
            WorkerTimeout: a rank did not answer in time; the message shows its stack.
        """
        wait_all([self], timeout_s)
        return self._collect([self.futures[rank].result().value for rank in sorted(self.futures)])

    @property
    def done(self) -> bool:
        return all(future.done() for future in self.futures.values())

    @property
    def error(self) -> BaseException | None:
        """The first known error, without waiting."""
        errors = (future.exception() for future in self.futures.values() if future.done())
        return next((error for error in errors if error is not None), None)

    @property
    def durations(self) -> dict[int, float]:
        """Seconds in the worker, by rank, of the ranks that have answered."""
        return {r: f.result().seconds for r, f in self.futures.items() if f.done() and f.exception() is None}

    @property
    def duration_s(self) -> float:
        return max(self.durations.values(), default=0.0)

    def metrics(self, name: str | None = None) -> dict[str, float]:
        """Return ``time/NAME_s``, the seconds of the slowest rank; NAME defaults to the method's name."""
        return {f"time/{name or self.method}_s": self.duration_s}

    def timeout_error(self, timeout_s: float) -> WorkerTimeout:
        """Return an error that names the ranks without an answer, with the stack of the first."""
        late = [rank for rank, future in sorted(self.futures.items()) if not future.done()]
        ranks = ", ".join(map(str, late))
        return WorkerTimeout(
            f"{self.method}: no answer from rank {ranks} within {timeout_s:g} s",
            "its stack is below; close the group to end the worker",
            late[0],
            log_tail=self._explain(late[0]),
        )


def first_cause(error: BaseException, handles: Sequence[Handle]) -> BaseException:
    """Return the death of a process if another worker reported it as a connection error."""
    futures = [future for handle in handles for future in handle.futures.values()]
    if isinstance(error, WorkerRaised) and len(futures) > 1:
        wait(futures, _NOTICE_S)  # the report may arrive before the death is noticed
    errors = [future.exception() for future in futures if future.done()]
    return next((found for found in errors if isinstance(found, WorkerDied)), error)


def wait_all(handles: Sequence[Handle], timeout_s: float | None = None) -> None:
    """Wait for several calls; raise the first error at once, since the other calls may wait for the failed one."""
    futures = [future for handle in handles for future in handle.futures.values()]
    wait(futures, timeout_s, FIRST_EXCEPTION)
    for handle in handles:
        if handle.error is not None:
            raise first_cause(handle.error, handles)
    for handle in handles:
        if not handle.done:
            raise handle.timeout_error(timeout_s or 0.0)


class WorkerGroup:
    """Workers of one class, which share out calls of methods marked with ``dispatch``.

    Args:
        independent: no worker waits for another, so the death of one only fails its own calls.
    """

    def __init__(
        self, worker_class: type[Worker], name: str | None = None, independent: bool = False, **kwargs: object
    ) -> None:
        self.worker_class = worker_class
        self.name = name or worker_class.__name__
        self._kwargs = kwargs
        self.independent = independent
        self._workers: list[Running] = []
        self._jobs: list[Job] = []
        self._launcher: Launcher | None = None
        self._owns_launcher = False
        self._failed: WorkerError | None = None
        self._pending: list[Future[CallOutcome]] = []

    # -- life ---------------------------------------------------------------------------------------------------------

    def launch(
        self,
        places: Sequence[ProcessPlace] | int = 1,
        launcher: str | Launcher = "process",
        channels: Mapping[str, Channel] | None = None,
        log_dir: Path | None = None,
        timeout_s: float = START_TIMEOUT_S,
        variables: Mapping[str, str] | None = None,
    ) -> Self:
        """Start the workers and wait for their constructors.

        Args:
            places: places of ``Placement.of``; a number means that many processes without devices.
            launcher: ``inline``, ``process``, ``ray``, or a launcher shared by several groups.
            channels: channels by name, made by that launcher.
            log_dir: directory of the workers' output; None keeps it for error messages only.
            timeout_s: time limit of the start, in seconds.
            variables: further environment variables of the processes.

        Raises:
            WorkerError: a worker failed; none is left running.
            EmbodrlError: the workers can't be started.
        """
        if self._workers:
            raise EmbodrlError(f"group '{self.name}' is already running", "close it first", code="group-order")
        if isinstance(places, int):
            places = [ProcessPlace(self.name, rank) for rank in range(places)]
        if not places:
            raise EmbodrlError(f"group '{self.name}' has no place", "give at least one", code="group-order")
        self._owns_launcher = isinstance(launcher, str)
        self._launcher = LAUNCHERS.get(launcher)() if isinstance(launcher, str) else launcher
        assert self._launcher is not None
        self._failed = None
        self._pending = []
        # A new name for each launch: torch would mistake the file of an ended group for its own.
        rendezvous = self._launcher.rendezvous(f"{self.name}-{secrets.token_hex(4)}")
        self._jobs = [
            Job(
                self.worker_class,
                self._kwargs,
                self.name,
                len(places),
                place,
                rendezvous,
                channels or {},
                log_dir,
                self.independent,
                variables or {},
            )
            for place in places
        ]
        try:
            self._launcher.prepare(places)
            for job in self._jobs:
                self._workers.append(self._launcher.start(job, self._on_death))
            self._await_start(range(len(self._workers)), timeout_s)
        except BaseException:  # not even a signal may leave workers behind; re-raised
            self.kill()
            raise
        return self

    def _await_start(self, ranks: Sequence[int], timeout_s: float) -> None:
        futures = {rank: self._workers[rank].started() for rank in ranks}
        Handle(f"{self.name}: start", futures, list, self._explain).result(timeout_s)

    def restart(self, rank: int, timeout_s: float = START_TIMEOUT_S, should_stop: Callable[[], bool] = bool) -> None:
        """Restart one worker with its original arguments; its state and pending calls are lost.

        Raises:
            WorkerError: the worker failed again.
            InterruptedError: ``should_stop`` returned True; the worker is ended.
        """
        assert self._launcher is not None
        self._workers[rank].kill()
        self._failed = None
        self._workers[rank] = self._launcher.start(self._jobs[rank], self._on_death)
        started = self._workers[rank].started()
        deadline = time.monotonic() + timeout_s
        while wait([started], _LOOK_S).not_done and time.monotonic() < deadline:
            if should_stop():
                self._workers[rank].kill()
                raise InterruptedError
        # Raises the constructor's error, or a timeout.
        self._await_start([rank], 0.0)

    def give_up(self, rank: int, reason: str) -> None:
        """End an unresponsive worker; its calls fail like those of a hung one, with its stack."""
        self._workers[rank].give_up(reason)

    def close(self, grace_s: float = math.inf) -> None:
        """End the workers, killing the ones still alive after ``closing_grace_s``."""
        grace_s = min(grace_s, closing_grace_s())
        if self._workers:
            with ThreadPoolExecutor(len(self._workers)) as threads:  # a hung worker uses the whole grace period
                list(threads.map(lambda worker: worker.close(grace_s), self._workers))
        self._leave()

    def kill(self) -> None:
        """Kill the workers at once."""
        for worker in self._workers:
            worker.kill()
        self._leave()

    def _leave(self) -> None:
        self._workers = []
        if self._owns_launcher and self._launcher is not None:
            self._launcher.close()
        self._launcher = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error workers may wait for each other, so a graceful end would use the whole grace period.
        self.close() if error is None else self.kill()

    # -- calls --------------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return len(self._workers)

    def call(self, method: str, *args: object, **kwargs: object) -> Handle:
        """Start a call on the ranks that the method's dispatch selects.

        Raises:
            WorkerDied: a worker of the group has already died.
            MessageError: an argument can't be sent.
            EmbodrlError: no such method, the group is not running, or the arguments can't be split.
        """
        marked = marked_method(self.worker_class, method)
        if not self._workers:
            raise EmbodrlError(f"group '{self.name}' is not running", "launch it first", code="group-order")
        if self._failed is not None:
            raise self._failed
        shares = list(marked.dispatch(self.world_size, args, kwargs))
        if len(shares) != self.world_size:
            raise EmbodrlError(
                f"the dispatch of {method} gave {len(shares)} shares for {self.world_size} workers",
                "return one entry per rank, None for ranks that are not called",
                code="dispatch-rows",
            )
        return self._begin(method, shares, marked.collect)

    def call_on(self, rank: int, method: str, *args: object, **kwargs: object) -> Handle:
        """Start a call on one rank, whatever the method's dispatch; the result is this rank's.

        Raises:
            EmbodrlError: see ``call``; with ``independent``, the handle carries a known death instead.
        """
        marked_method(self.worker_class, method)
        if not self._workers:
            raise EmbodrlError(f"group '{self.name}' is not running", "launch it first", code="group-order")
        if self._failed is not None:
            raise self._failed
        shares: list[Arguments | None] = [None] * self.world_size
        shares[rank] = (args, kwargs)
        return self._begin(method, shares, lambda results: results[0])

    def _begin(self, method: str, shares: list[Arguments | None], collect: Collect) -> Handle:
        futures: dict[int, Future[CallOutcome]] = {}
        for rank, share in enumerate(shares):
            if share is not None:
                futures[rank] = self._workers[rank].call(method, *share)
        self._pending = [future for future in self._pending if not future.done()] + list(futures.values())
        if self._failed is not None:  # it died meanwhile, before these calls were registered
            self._fail_pending(self._failed)
        return Handle(method, futures, collect, self._explain)

    def __getattr__(self, name: str) -> Callable[..., Handle]:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            marked_method(self.worker_class, name)
        except EmbodrlError as error:
            raise AttributeError(str(error)) from error
        return lambda *args, **kwargs: self.call(name, *args, **kwargs)

    def check(self) -> None:
        """Raise WorkerDied, with its rank and last output, if a worker has died."""
        if self._failed is not None:
            raise self._failed

    def _explain(self, rank: int) -> str:
        return self._workers[rank].explain_delay() if rank < len(self._workers) else ""

    def _on_death(self, error: WorkerError) -> None:
        """Fail every call of the group: the other workers may wait for the dead one."""
        if self.independent:
            return  # its own calls have already failed
        # The first death is the cause; others may follow from lost connections.
        self._failed = self._failed or error
        self._fail_pending(error)

    def _fail_pending(self, error: WorkerError) -> None:
        for future in self._pending:
            settle(future, error)
