"""Weights from the processes that train to those that act, without the main process in between.

In synchronous runs rank 0 sends, and the others take part in gathering; the main process says when, and hears from the
rollout processes what they took over. Ahead of training a process that is brought up anew needs the version that acts,
while the next one trains: the main process keeps that, and sends.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from embodrl.config.rules.rollout_processes import main_component
from embodrl.config.schema import Config
from embodrl.errors import TornSyncError, WeightSyncError, WorkerDied, WorkerError
from embodrl.hybrid_engines.weight_sync.base import GatherOnly, WeightSender
from embodrl.hybrid_engines.weight_sync.group import cancel_meeting, open_meeting
from embodrl.scheduler.channel import Channel
from embodrl.scheduler.group import Handle, WorkerGroup
from embodrl.scheduler.launchers.base import free_port
from embodrl.scheduler.worker import Worker, dispatch
from embodrl.workers.weight_link import SendingEnd, drain, make_sender

_POLL_S = 0.1
_FIND_S = 60.0
_NOTICE_S = 5.0
"""Within which the end of a process is noticed."""
_LOCALHOST = "127.0.0.1"
Problem = tuple[str, str]
"""Message and hint of what kept weights from being sent; the process itself is well."""


def sends_weights(config: Config) -> bool:
    """Tell whether the processes that train send their weights to those that act by themselves."""
    return main_component(config) is None and not config.runner.max_staleness


class SendingWorker(Worker):
    """A training process that can send its weights."""

    _sender: WeightSender | None = None
    _meeting: Store | None = None

    @abstractmethod
    def stream(self, wanted: Container[str] | None) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors of the policy, those of the wanted names or all: a collective call."""

    @dispatch("rank_zero")
    def open_meeting(self, world_size: int) -> str:
        """Open the meeting of a collective sync on this machine; return where it is."""
        self.close_sender()
        # Where the training processes meet is known to be reached from everywhere; a file is of one machine.
        host = urlsplit(self.context.rendezvous).hostname or _LOCALHOST
        where = f"tcp://{host}:{free_port()}"
        self._meeting = open_meeting(where, world_size)
        return where

    @dispatch("one_to_all")
    def open_sender(self, options: dict[str, Any], pipes: list[str], trained: list[str]) -> Problem | None:
        """Make the sender of a generation. See ``make_sender``.

        Args:
            options: of the generation.
            pipes: names of channels.
            trained: names that travel after the first sync.
        """
        meeting, self._meeting = self._meeting, None
        self.close_sender()
        if self.rank:
            self._sender = GatherOnly(trained)
            return None
        try:
            self._sender = make_sender(options, [self.channel(name) for name in pipes], trained, meeting)
        except WeightSyncError as error:
            return error.message, error.hint
        if self._sender.version is not None:  # the others, who gather with it, would not agree on what comes next
            return f"{options['directory']} holds weights already", "remove it"
        return None

    @dispatch("one_to_all")
    def send_weights(self, version: int) -> Problem | None:
        """Send the weights as they are; return what went wrong with that."""
        sender = self._sender
        assert sender is not None
        wanted = None if sender.base is None else sender.trained
        try:
            sender.send(self.stream(wanted), version)
        except WeightSyncError as error:
            return error.message, error.hint
        return None

    def close_sender(self) -> None:
        """Free what the sender holds; a meeting that nobody has used is called off."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._meeting is not None:
            cancel_meeting(self._meeting)
            self._meeting = None


class ActorEnd(SendingEnd):
    """The processes that train send, each in its part.

    Args:
        group: of ``SendingWorker``; was launched with the pipes.
        pipes: channels by name, one a rollout process, in their order.
        trained: names that travel after the first sync (``trained_names``).

    Raises:
        WorkerError: by all methods: a process that trains failed or has gone, and the group with it; never
            ``WorkerDied``, which tells of rollout processes here.
    """

    def __init__(self, group: WorkerGroup, pipes: Mapping[str, Channel], trained: Collection[str]) -> None:
        self.group, self.pipes, self.trained = group, pipes, sorted(trained)
        self._meeting: Store | None = None

    def meet(self, world_size: int) -> str:
        where: str = self._ask("open_meeting", world_size)
        try:
            self._meeting = open_meeting(where, world_size, is_sender=False, timeout_s=_FIND_S)
        except RuntimeError as error:
            raise TornSyncError(
                f"the main process does not reach {where}, where weights are to be sent from: {error}",
                "see whether the machines reach each other",
            ) from error
        return where

    def open(self, options: dict[str, Any], check: Callable[[], None]) -> None:
        self._raise_first(self._ask("open_sender", options, list(self.pipes), self.trained, check=check))
        self._meeting = None

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, check: Callable[[], None]) -> None:
        self._raise_first(self._ask("send_weights", version, check=check))

    def close(self) -> None:
        """Call off a meeting; a sender is closed when the next one is opened, or with its process."""
        if self._meeting is not None:
            with contextlib.suppress(RuntimeError):  # it ended with the process that had opened it
                cancel_meeting(self._meeting)
            self._meeting = None

    def _raise_first(self, problems: list[Problem | None]) -> None:
        for problem in problems:
            if problem is not None:
                raise WeightSyncError(*problem)

    def _ask(self, method: str, *args: Any, check: Callable[[], None] = lambda: None) -> Any:
        """Return what the processes answer. What ``check`` raises is raised when they are free again."""
        failure: WorkerError | None = None
        handle: Handle | None = None
        try:
            self.group.check()
            handle = self.group.call(method, *args)
            while not handle.done and handle.error is None:
                wait(handle.futures.values(), _POLL_S, FIRST_EXCEPTION)
                failure = failure or _failure(check)
                if failure is not None:
                    self._let_go(failure)
            answer = handle.result()
        except WorkerError as error:
            cause = error if handle is None else _cause(handle, error)
            self.group.kill()  # without one of them the others would wait for ever
            raise WorkerError(cause.message, cause.hint, cause.rank) from cause
        if failure is not None:
            raise failure
        return answer

    def _let_go(self, failure: WorkerError) -> None:
        """Free the sender, which may wait for a process that has gone: for it to come, or to empty its pipe."""
        self.close()
        if isinstance(failure, WorkerDied):
            drain(list(self.pipes.values())[failure.rank])


def _cause(handle: Handle, error: WorkerError) -> WorkerError:
    """Return the death of a process, if that is what another has told by an error of its connection."""
    wait(handle.futures.values(), _NOTICE_S)  # the other may be quicker
    errors = [future.exception() for future in handle.futures.values() if future.done()]
    return next((found for found in errors if isinstance(found, WorkerDied)), error)


def _failure(check: Callable[[], None]) -> WorkerError | None:
    try:
        check()
    except WorkerError as error:
        return error
    return None
