"""Requests to a pool's simulators other than resets and chunks, in parallel where possible."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from embodrl.envs.pool.manager import EnvManager
from embodrl.envs.pool.recovery import FAULTS, Recovery
from embodrl.envs.pool.transport import copy_observation
from embodrl.errors import EnvError, EnvTimeout, EnvWorkerDied
from embodrl.processes.frames import Kind

# A request that raises is as likely to be wrong as the simulator: a new process would raise again.
_LOSSES = (EnvWorkerDied, EnvTimeout)
R = TypeVar("R")
# Requests with a lasting effect, repeated to a restarted process.
_LASTING = ("set_auto_reset", "set_ignore_terminations")


class Requests:
    """Sends requests to managers and, if asked to, restarts lost ones."""

    def __init__(self, recovery: Recovery) -> None:
        self.recovery = recovery

    def ask(self, rank: int, method: str, arguments: Mapping[str, object] | None) -> object:
        """Return the answer of one manager; if its process is lost, the next step or reset restarts it."""
        self.send(rank, method, arguments)
        return self._wait(rank, method, arguments, restart=False)

    def ask_all(self, method: str, arguments: Mapping[str, object] | None, restart: bool) -> list[object]:
        """Return the answers of all managers; arguments as in ``EnvPool.call``."""
        for rank in range(len(self.recovery.managers)):
            self.send(rank, method, arguments)
        answers: list[object] = []
        fault: EnvError | None = None
        # All of them: an unreceived answer blocks the next request.
        for rank in range(len(self.recovery.managers)):
            try:
                answers.append(self._wait(rank, method, arguments, restart))
            except EnvError as error:
                fault = fault or error
        if fault is not None:
            raise fault
        return answers

    def ask_rows(
        self, method: str, arguments: Mapping[int, Mapping[str, object]], offsets: Sequence[int]
    ) -> dict[int, object]:
        """Return the answers by row; processes work in parallel, each on one row after the other.

        ``arguments`` are by row of the pool; ``offsets`` hold the first row of each manager, and the total number of
        rows.
        """
        answers: dict[int, object] = {}
        fault: EnvError | None = None
        borders = itertools.pairwise(offsets)
        # One row of each process at a time: a process answers one request after the other.
        for turn in itertools.zip_longest(*([row for row in arguments if a <= row < b] for a, b in borders)):
            asked = [(rank, row) for rank, row in enumerate(turn) if row is not None]
            for rank, row in asked:
                self.send(rank, method, {"row": row - offsets[rank], **arguments[row]})
            for rank, row in asked:
                try:
                    answers[row] = self._wait(rank, method, None, restart=False)
                except _LOSSES:
                    pass  # the next step or reset detects it
                except EnvError as error:
                    fault = fault or error
            if fault is not None:
                raise fault
        return answers

    def ask_again(self, ranks: Sequence[int]) -> None:
        """Repeat the requests with a lasting effect: a rebuilt simulator has its state back, but its initial rules."""
        for rank in ranks:
            for method, arguments in self.recovery.managers[rank].lasting.items():
                with suppress(*_LOSSES):  # the next request detects it
                    self.ask(rank, method, arguments)

    def send(self, rank: int, method: str, arguments: Mapping[str, object] | None) -> None:
        """Send a request to one manager; if the manager is lost, lasting requests are kept for its next process."""
        if method in _LASTING:
            self.recovery.managers[rank].lasting[method] = arguments
        if rank not in self.recovery.failed:
            try:
                self.recovery.managers[rank].call_async(method, arguments)
            except _LOSSES as error:
                self.recovery.failed[rank] = error

    def drain(self) -> None:
        """Receive and drop the answers to requests left in progress by an interruption.

        The next step, reset or request with ``restart`` restarts a process lost meanwhile.
        """
        for rank, manager in enumerate(self.recovery.managers):
            try:
                _drain(manager)
            except FAULTS as error:
                self.recovery.failed[rank] = error
            if manager.pid is None and not manager.is_offloaded:
                lost = EnvWorkerDied(f"{manager}: its restart was interrupted", "look at the log for the cause")
                self.recovery.failed.setdefault(rank, lost)

    def _wait(self, rank: int, method: str, arguments: Mapping[str, object] | None, restart: bool) -> object:
        return self.answer(rank, lambda m: m.wait_call(method), restart, lambda m: m.call(method, arguments))

    def answer(
        self,
        rank: int,
        request: Callable[[EnvManager], R],
        restart: bool,
        again: Callable[[EnvManager], R] | None = None,
    ) -> R:
        """Return the answer of one manager, fetched by ``request``.

        ``restart`` restarts a lost process and asks again, with ``again`` if given.
        """
        manager = self.recovery.managers[rank]
        try:
            self.recovery.raise_failed(rank)
            return request(manager)
        except _LOSSES as error:
            if not restart:
                self.recovery.failed[rank] = error  # the next step or reset detects it
                raise
            fault: EnvError = error
        while True:
            # Copied: a view would hold the memory for long.
            self.recovery.last[rank] = copy_observation(self.recovery.restart(rank, fault))
            try:
                return (again or request)(manager)
            except _LOSSES as error:
                fault = error


def _drain(manager: EnvManager) -> None:
    """Wait for the answer to the request in progress, if any; raises EnvRaised, EnvWorkerDied or EnvTimeout."""
    process = manager.process
    timeouts = manager.timeouts
    kind = process.pending
    if kind in (Kind.START, Kind.ONLOAD):
        manager.wait_started()
    elif kind == Kind.OFFLOAD:
        process.saved = process.wait_state(kind, timeouts.reset_s)
    elif kind == Kind.STEP:
        manager.wait()
    elif kind == Kind.RESET:
        manager.wait_reset()
    elif kind == Kind.CLOSE:
        manager.close()
    elif kind is not None:
        process.receive(kind, timeouts.start_s)
