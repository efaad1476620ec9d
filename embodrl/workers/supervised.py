"""Processes that answer a driver's requests, and are restarted when they die."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any, NoReturn

from embodrl.config.schema import Config
from embodrl.envs.pool.faults import FaultCounts
from embodrl.errors import ChannelTimeout, WorkerDied, WorkerError
from embodrl.processes.liveness import stop_requested
from embodrl.processes.restarts import RestartBudget
from embodrl.scheduler.channel import Channel
from embodrl.scheduler.group import Handle, WorkerGroup
from embodrl.workers.acting_process import Answer
from embodrl.workers.collector import LOST, RolloutState, Snapshot

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 3600.0
_POLL_S = 0.1
_PATIENCE = 0.4
"""Time a process may take to answer after a stop signal, as a fraction of ``runner.stop_timeout_s``."""


def channels_of(channels: Mapping[str, Channel], kind: str) -> dict[str, Channel]:
    """Return the channels of one kind by name, in rank order."""
    return {name: channel for name, channel in channels.items() if name.startswith(f"{kind}_")}


class KnownStates:
    """What is known of the rollout processes, for replacements and checkpoints.

    Attributes:
        snapshots: where each process was; None until it has answered.
        faults: faults of all processes since the start of the run.
    """

    def __init__(self, size: int) -> None:
        self.snapshots: list[Snapshot | None] = [None for _ in range(size)]
        self.faults = FaultCounts()
        self._reported: list[dict[str, int]] = [{} for _ in range(size)]

    def note(self, rank: int, answer: Answer) -> None:
        """Record the faults and the snapshot in an answer."""
        known = self._reported[rank]
        # Processes report totals; only the increase is added.
        for name, number in answer["faults"].items():
            self.faults.count(name, number - known.get(name, 0))
        self._reported[rank] = answer["faults"]
        self.snapshots[rank] = answer.get("carried", self.snapshots[rank])

    def note_restart(self, rank: int) -> None:
        """Count a restart; the replacement counts its faults from 0."""
        self._reported[rank] = {}
        self.faults.count("rollout_restarts")

    def remember(self, random: Sequence[list[str] | None]) -> None:
        """Store random states for replacements; None keeps a lost process where its update began."""
        for rank, (numbers, known) in enumerate(zip(random, self.snapshots, strict=True)):
            where = known["before"] if numbers is None and known is not None else numbers
            if where is not None:
                self.snapshots[rank] = _no_update(where)

    def end_update(self) -> None:
        """Forget the updates in progress: with new weights, a replacement could not repeat them."""
        self.snapshots = [None if known is None else _no_update(known["random"]) for known in self.snapshots]

    def state_of_lost(self, rank: int) -> RolloutState:
        """Return the known state of a process that died while the run was stopping: random numbers, no simulators."""
        known = self.snapshots[rank]
        return RolloutState({LOST: True} | ({} if known is None else {"random": known["random"]}))


class ProcessRestarts:
    """Restarts of rollout processes within a budget.

    Attributes:
        lock: held during a restart. Several threads of an asynchronous run may see the same death; the first restarts
            the process, the others wait.
        incarnations: restarts of each process.
        new: ranks restarted, and without their predecessors' state.
    """

    def __init__(self, group: WorkerGroup, budget: RestartBudget) -> None:
        self.lock = threading.Lock()
        self.incarnations = [0 for _ in range(group.world_size)]
        self.new: set[int] = set()
        self._group = group
        self._budget = budget
        self._lost: set[int] = set()  # died while the run was stopping

    def restart(self, error: WorkerError, on_restart: Callable[[int], None]) -> None:
        """Restart a process; ``on_restart`` is called with its rank before each attempt.

        Raises:
            WorkerDied: the budget is exhausted.
            InterruptedError: the run is about to end.
        """
        rank = error.rank
        while True:
            if stop_requested.is_set():
                self._leave_lost(error)
            self._count(error)
            on_restart(rank)
            try:
                self._group.restart(rank, START_TIMEOUT_S, stop_requested.is_set)
                self.new.add(rank)
                return
            except WorkerError as again:
                error = again
            except InterruptedError:
                # A stop was requested meanwhile, so the next turn does not restart the process.
                continue

    def _leave_lost(self, error: WorkerError) -> NoReturn:
        if error.rank not in self._lost:
            self._lost.add(error.rank)
            logger.warning("not restarted, as the run is about to end: %s", error.message)
        raise InterruptedError from error

    def _count(self, error: WorkerError) -> None:
        if not self._budget.take():
            raise WorkerDied(
                f"stopped after {self._budget.limit} restarts of rollout processes: {error.message}",
                error.hint,
                error.rank,
                log_tail=error.log_tail,
            ) from error
        self.incarnations[error.rank] += 1
        logger.warning("restart %s of a rollout process: %s", self._budget.used, error.message)
        error.__traceback__ = None  # its call refers to it: a cycle, with all that the frames of this iteration hold


class _Patience:
    """Kills processes that have not answered long after a stop request."""

    def __init__(self, group: WorkerGroup, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._stop_requested_at: float | None = None

    def end_late(self, handles: Mapping[int, Handle]) -> None:
        if not stop_requested.is_set():
            return
        self._stop_requested_at = self._stop_requested_at or time.monotonic()
        if time.monotonic() - self._stop_requested_at < self._timeout_s:
            return
        for rank in [rank for rank, handle in handles.items() if not handle.done]:
            self._group.give_up(rank, f"has not answered for {self._timeout_s:g} s after a signal")


class SupervisedProcesses:
    """Processes that answer requests, on this machine or others, each with a share of the environments.

    A process that dies is restarted and repeats its last request; the others continue. If the run is about to end
    (``stop_requested``), it stays dead.

    Args:
        group: processes of a class derived from ``SimulatingProcess``.
        channels: channels that the processes were started with.
        should_stop: polled regularly; True interrupts the current request.
    """

    def __init__(
        self, config: Config, group: WorkerGroup, channels: Mapping[str, Channel], should_stop: Callable[[], bool]
    ) -> None:
        self.config = config
        self.group = group
        self.should_stop = should_stop
        self.known = KnownStates(group.world_size)
        self.faults = self.known.faults
        budget = RestartBudget(config.rollout.max_restarts, config.cluster.restart_window_s)
        self._restarts = ProcessRestarts(group, budget)
        self._patience = _Patience(group, _PATIENCE * config.runner.stop_timeout_s)
        self._stop = list(channels_of(channels, "stop").values())
        self._calls = itertools.count()
        self.about: dict[str, Any] = self.group.call_on(0, "about").result()
        self.tasks = list(self.about["tasks"])

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.group.world_size

    def _rejoin(self) -> None:
        """Prepare restarted processes for requests; called with the lock of the restarts."""

    def revive(self, error: WorkerDied, incarnation: int) -> None:
        """Restart a process with the current weights, unless ``incarnation`` has been restarted already.

        Raises:
            WorkerDied: ``rollout.max_restarts`` is exhausted.
            InterruptedError: the run is about to end.
        """
        with self._restarts.lock:
            if self._restarts.incarnations[error.rank] == incarnation:
                self._revive(error)
                self._rejoin()

    def _revive(self, error: WorkerError) -> None:
        self._restarts.restart(error, self._note_restart)

    def _note_restart(self, rank: int) -> None:
        self.known.note_restart(rank)

    # -- requests ------------------------------------------------------------------------------------------------------

    def call(
        self,
        method: str,
        arguments: Sequence[tuple[object, ...]],
        ranks: Sequence[int] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[Any]:
        """Return the processes' answers to an interruptible request; a process that dies is restarted and asked again.

        Args:
            method: method of RolloutProcess.
            arguments: arguments after the call number, by process.
            ranks: the processes; None for all.
            should_stop: polled now and then; None uses the run's.

        Raises:
            InterruptedError: ``should_stop`` returned True, or a process died while the run is stopping.
            WorkerError: a method raised, or processes keep dying.
        """
        ranks = range(self.size) if ranks is None else ranks
        should_stop = should_stop or self.should_stop
        # Signals carry the call number, so that a late one does not stop the next request.
        call = next(self._calls)
        # Noted before the calls begin, so that a process restarted by another thread is not restarted twice.
        incarnations = list(self._restarts.incarnations)
        given = dict(zip(ranks, arguments, strict=True))
        handles = {rank: self.group.call_on(rank, method, call, *own) for rank, own in given.items()}
        answers: dict[int, Answer | None] = {}
        stopped = False
        try:
            while pending := [rank for rank in handles if rank not in answers]:
                if not stopped and should_stop():
                    stopped = True
                    self._signal(call, pending)
                self._patience.end_late(handles)
                futures = [future for rank in pending for future in handles[rank].futures.values() if not future.done()]
                wait(futures, _POLL_S, FIRST_COMPLETED)
                # Answers of living processes first: they must be recorded before a restart, which synchronises all
                # processes.
                gone = {rank: isinstance(handles[rank].error, WorkerDied) for rank in pending}
                for rank, dead in sorted(gone.items(), key=lambda item: item[1]):
                    # A replacement receives its weights once all processes are free to synchronise.
                    if not handles[rank].done or (dead and not all(handles[other].done for other in pending)):
                        continue
                    try:
                        answers[rank] = answer = handles[rank].result()
                        if answer is not None:  # immediately: it may die before the others have answered
                            self.known.note(rank, answer)
                    except WorkerDied as error:
                        self.revive(error, incarnations[rank])
                        incarnations[rank] = self._restarts.incarnations[rank]
                        # The request ends with InterruptedError anyway, so the replacement has nothing to repeat.
                        if stopped:
                            answers[rank] = None
                        else:
                            handles[rank] = self.group.call_on(rank, method, call, *given[rank])
        except BaseException:  # also after a signal, which is re-raised: no call may stay pending
            self._give_up(call, {rank: handles[rank] for rank in handles if rank not in answers})
            raise
        found = [answer for answer in answers.values() if answer is not None]
        if len(found) < len(answers):
            raise InterruptedError
        return [answers[rank] or {} for rank in ranks]

    def _signal(self, call: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            try:
                self._stop[rank].put(call, 0.0)
            except ChannelTimeout:
                logger.warning("rollout process %d has not polled its signals", rank)

    def _give_up(self, call: int, handles: dict[int, Handle]) -> None:
        """Let the other processes finish, too, so that they are free for the next request."""
        self._signal(call, handles)
        deadline = time.monotonic() + START_TIMEOUT_S
        futures = [future for handle in handles.values() for future in handle.futures.values()]
        while wait(futures, _POLL_S).not_done and time.monotonic() < deadline:
            self._patience.end_late(handles)

    def call_all(self, method: str, *arguments: Sequence[object], ranks: Sequence[int] | None = None) -> list[Any]:
        """Return all processes' answers to a short request; ``arguments`` are by process.

        A process that has died is restarted and asked again; if the run is about to end, its answer is None.
        """
        ranks = range(self.size) if ranks is None else ranks
        given = list(zip(*arguments, strict=True)) if arguments else [()] * len(ranks)
        # As in ``call``: noted before the calls begin.
        incarnations = list(self._restarts.incarnations)
        handles = [self.group.call_on(rank, method, *own) for rank, own in zip(ranks, given, strict=True)]
        answers: list[Any] = []
        for rank, handle, own in zip(ranks, handles, given, strict=True):
            while True:
                try:
                    answers.append(handle.result())
                    break
                except WorkerDied as error:
                    try:
                        self.revive(error, incarnations[rank])
                    except InterruptedError:
                        answers.append(None)
                        break
                    incarnations[rank] = self._restarts.incarnations[rank]
                    handle = self.group.call_on(rank, method, *own)
        return answers


def _no_update(random: list[str]) -> Snapshot:
    """Return the snapshot of a process with these random numbers and no update in progress."""
    return {"metas": [], "random": random, "before": None}
