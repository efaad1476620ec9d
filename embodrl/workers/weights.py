"""The weights of a run on their way to its rollout processes.

``WeightChannel`` is the driver's view. The driver sends (``LocalSender``), or lets the training processes send
(``RemoteSender``, ``SendingWorker``); in each rollout process a ``ReceiverThread`` accepts versions between two batches
and acknowledges them. A failure costs a version, never a policy with half of its weights: see docs/weight_sync.md.

In synchronous runs with trainer and rollouts in processes of their own, training rank 0 sends and the other ranks take
part in gathering. In asynchronous runs the driver keeps the version in use, which a restarted rollout process needs
while the next one trains, so the driver sends.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from embodrl.errors import ChannelClosed, ChannelTimeout, IncompleteSyncError, WeightSyncError, WorkerDied, WorkerError
from embodrl.hybrid_engines.weight_sync.base import GatherOnly, WeightReceiver, WeightSender, WeightTarget, no_check
from embodrl.hybrid_engines.weight_sync.buckets import Layout
from embodrl.hybrid_engines.weight_sync.choice import Kind
from embodrl.hybrid_engines.weight_sync.collective import CollectiveReceiver, CollectiveSender
from embodrl.hybrid_engines.weight_sync.disk import DiskReceiver, DiskSender
from embodrl.hybrid_engines.weight_sync.group import SENDER, SyncGroup, cancel_rendezvous, open_rendezvous
from embodrl.hybrid_engines.weight_sync.memory import MemoryReceiver, MemorySender
from embodrl.scheduler.channel import Channel
from embodrl.scheduler.group import Handle, WorkerGroup
from embodrl.scheduler.launchers.base import free_port
from embodrl.scheduler.worker import Worker, dispatch

logger = logging.getLogger(__name__)

Check = Callable[[], None]
"""Called while waiting; raises if a process has died."""
Problem = tuple[str, str]
"""Message and hint of a failed sync in a process that is otherwise well."""
_POLL_S = 0.2
_CONNECT_S = 600.0
"""A rollout process connects once its present batch is done."""
_FIND_S = 10.0
"""A receiver connects when the rendezvous is open; the sender may have given up meanwhile."""
_REACH_S = 60.0


def drain(channel: Channel) -> None:
    """Discard what is in a channel."""
    with contextlib.suppress(ChannelTimeout):
        while True:
            channel.get(0.0)


# -- the receiving side -----------------------------------------------------------------------------------------------


def make_receiver(
    target: WeightTarget, options: Mapping[str, Any], pipe: Channel, rank: int, layout: Layout
) -> WeightReceiver:
    """Return the receiver of a rollout process.

    Args:
        target: accepts the weights.
        options: of the generation (``WeightChannel.options``).
        pipe: buckets for this process, for memory.
        rank: of the rollout process.
        layout: of its policy.
    """
    if options["kind"] == "memory":
        return MemoryReceiver(target, pipe, layout)
    if options["kind"] == "disk":
        return DiskReceiver(target, Path(options["directory"]), layout)
    return CollectiveReceiver(target, _sync_group(options, rank + 1, find_s=_FIND_S), layout)


def _sync_group(options: Mapping[str, Any], rank: int, **further: Any) -> SyncGroup:
    device = torch.device(options["device"])
    return SyncGroup(options["init_method"], rank, options["world_size"], device, connect_s=_CONNECT_S, **further)


class ReceiverThread:
    """The thread of a rollout process that accepts weights and acknowledges them to the driver.

    Args:
        receiver: new.
        answers: to the driver: generation, version and, if it was refused, why.
        generation: of the channel; the driver ignores answers of earlier ones.
    """

    def __init__(self, receiver: WeightReceiver, answers: Channel, generation: int) -> None:
        self._receiver, self._answers, self._generation = receiver, answers, generation
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="weights", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not (self._closing.is_set() or self._receiver.is_broken):
            try:
                report = self._receiver.receive(_POLL_S)
            except WeightSyncError as error:
                logger.warning("weight update rejected: %s", error)
                self._answer(None, str(error))
            except Exception as error:  # the border of this thread: the driver raises it
                logger.exception("no further weight updates are accepted")
                self._answer(None, f"{type(error).__name__}: {error}")
                return
            else:
                if report is not None:
                    self._answer(report.version, "")

    def _answer(self, version: int | None, problem: str) -> None:
        try:
            self._answers.put({"generation": self._generation, "version": version, "problem": problem}, _POLL_S)
        except (ChannelTimeout, ChannelClosed):
            logger.warning("the driver does not read weight-update acknowledgements")

    def close(self) -> None:
        """End the thread; a sync in progress completes or fails first."""
        self._closing.set()
        self._thread.join()
        self._receiver.close()


# -- the sending side -------------------------------------------------------------------------------------------------


class Sender(ABC):
    """Sends for a ``WeightChannel``. Each generation begins with ``open``, for a collective after ``rendezvous``."""

    @abstractmethod
    def rendezvous(self, world_size: int) -> str:
        """Open the rendezvous of a collective sync; return where it is, as ``tcp://HOST:PORT``.

        Raises:
            WeightSyncError: it cannot be opened or reached.
        """

    @abstractmethod
    def open(self, options: Mapping[str, object], check: Check = no_check) -> None:
        """Begin a generation; for a collective sync the receivers must be connecting meanwhile.

        Raises:
            WeightSyncError: they did not all connect.
        """

    @abstractmethod
    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, check: Check = no_check) -> None:
        """Send weights.

        Args:
            weights: names and tensors of the policy; ignored where the trainer is elsewhere.
            version: number of updates behind them.
            check: called meanwhile.

        Raises:
            WeightSyncError: they could not be sent.
        """

    @abstractmethod
    def close(self) -> None:
        """End the generation, and cancel a rendezvous that was not used."""


class LocalSender(Sender):
    """This process sends.

    Args:
        pipes: one channel per rollout process, for memory.
        trained: names to send after the first sync (``trained_names``).
        address: returns a new ``tcp://HOST:PORT`` of this machine.
        gathers_only: this rank of a sharded trainer takes part in gathering and sends nothing.
    """

    def __init__(
        self, pipes: Sequence[Channel], trained: Collection[str], address: Callable[[], str], gathers_only: bool = False
    ) -> None:
        self.pipes, self.trained, self.address, self.gathers_only = pipes, trained, address, gathers_only
        self.sender: WeightSender | None = None
        self._rendezvous: Store | None = None

    def rendezvous(self, world_size: int) -> str:
        self.close()
        init_method = self.address()
        self._rendezvous = open_rendezvous(init_method, world_size)
        return init_method

    def open(self, options: Mapping[str, Any], check: Check = no_check) -> None:
        rendezvous, self._rendezvous = self._rendezvous, None
        self.close()
        if self.gathers_only:
            self.sender = GatherOnly(self.trained)
        elif options["kind"] == "memory":
            self.sender = MemorySender(self.pipes, self.trained)
        elif options["kind"] == "disk":
            self.sender = DiskSender(Path(options["directory"]), self.trained)
            if self.sender.version is not None:  # the ranks that gather would not agree on what the next sync contains
                raise WeightSyncError(f"{options['directory']} already holds weights", "remove it")
        else:
            group = _sync_group(options, SENDER, check=check, rendezvous=rendezvous)
            self.sender = CollectiveSender(group, self.trained)

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, check: Check = no_check) -> None:
        assert self.sender is not None
        self.sender.send(weights, version, check=check)

    @property
    def next_names(self) -> Collection[str] | None:
        """Names that the next sync contains; None for all."""
        return None if self.sender is None or self.sender.base is None else self.sender.trained

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()
            self.sender = None
        if self._rendezvous is not None:
            cancel_rendezvous(self._rendezvous)
            self._rendezvous = None


class SendingWorker(Worker):
    """A training process that can send its weights."""

    sending: LocalSender | None = None

    @abstractmethod
    def stream(self, wanted: Container[str] | None) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors of the policy, those of the wanted names or all: a collective call."""

    @dispatch("one_to_all")
    def make_sender(self, pipes: list[str], trained: list[str]) -> None:
        """Prepare to send through the channels of these names; see LocalSender."""
        # The address where the training processes connect is known to be reachable; a file is of one machine.
        host = urlsplit(self.context.rendezvous).hostname or "127.0.0.1"
        channels = [self.channel(name) for name in pipes]
        self.sending = LocalSender(channels, trained, lambda: f"tcp://{host}:{free_port()}", gathers_only=self.rank > 0)

    @dispatch("rank_zero")
    def open_rendezvous(self, world_size: int) -> str:
        """See Sender.rendezvous."""
        assert self.sending is not None
        return self.sending.rendezvous(world_size)

    @dispatch("one_to_all")
    def open_sender(self, options: Mapping[str, object]) -> Problem | None:
        """See Sender.open."""
        return self._attempt(lambda sending: sending.open(options))

    @dispatch("one_to_all")
    def send_weights(self, version: int) -> Problem | None:
        """Send the present weights."""
        return self._attempt(lambda sending: sending.send(self.stream(sending.next_names), version))

    def _attempt(self, action: Callable[[LocalSender], None]) -> Problem | None:
        assert self.sending is not None
        try:
            action(self.sending)
        except WeightSyncError as error:
            return error.message, error.hint
        return None

    def close_sender(self) -> None:
        """Release what the sender holds."""
        if self.sending is not None:
            self.sending.close()


class RemoteSender(Sender):
    """The training processes send, each its part.

    Args:
        group: of ``SendingWorker``; was launched with the pipes.
        pipes: channels by name, one per rollout process, in their order.
        trained: names to send after the first sync (``trained_names``).

    Raises:
        WorkerError: by all methods: a training process failed or died, and the group with it. Never ``WorkerDied``,
            which means a rollout process here, and that one would be restarted.
    """

    def __init__(self, group: WorkerGroup, pipes: Mapping[str, Channel], trained: Collection[str]) -> None:
        self.group, self.pipes = group, pipes
        self._rendezvous: Store | None = None
        self._call("make_sender", list(pipes), sorted(trained))

    def rendezvous(self, world_size: int) -> str:
        where: str = self._call("open_rendezvous", world_size)
        try:
            self._rendezvous = open_rendezvous(where, world_size, is_sender=False, timeout_s=_REACH_S)
        except RuntimeError as error:
            raise IncompleteSyncError(
                f"the driver cannot reach {where}, where weights are to be sent from: {error}",
                "check whether the machines can reach each other",
            ) from error
        return where

    def open(self, options: Mapping[str, Any], check: Check = no_check) -> None:
        self._raise_first(self._call("open_sender", dict(options), check=check))
        self._rendezvous = None

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, check: Check = no_check) -> None:
        self._raise_first(self._call("send_weights", version, check=check))

    def close(self) -> None:
        """Cancel a rendezvous; a sender is closed when the next generation begins, or with its process."""
        if self._rendezvous is not None:
            with contextlib.suppress(RuntimeError):  # it ended with the process that had opened it
                cancel_rendezvous(self._rendezvous)
            self._rendezvous = None

    def _raise_first(self, problems: list[Problem | None]) -> None:
        for problem in filter(None, problems):
            raise WeightSyncError(*problem)

    def _call(self, method: str, *args: object, check: Check = no_check) -> Any:
        """Return the answer of the processes. An error of ``check`` is raised when they are free again."""
        failure: WorkerError | None = None
        handle: Handle | None = None
        try:
            self.group.check()
            handle = self.group.call(method, *args)
            while not handle.done and handle.error is None:
                wait(handle.futures.values(), _POLL_S / 2, FIRST_EXCEPTION)
                if failure is None:
                    try:
                        check()
                    except WorkerError as error:
                        failure = error
                if failure is not None:
                    self._release(failure)
            answer = handle.result()
        except WorkerError as error:
            cause = error  # of a process that has died, if there is one
            self.group.kill()  # without one of them the others would wait for ever
            raise WorkerError(cause.message, cause.hint, cause.rank) from cause
        if failure is not None:
            raise failure
        return answer

    def _release(self, failure: WorkerError) -> None:
        """Release the sender, which may be waiting for a dead process: for its connection, or for room in its pipe."""
        self.close()
        if isinstance(failure, WorkerDied):
            drain(list(self.pipes.values())[failure.rank])


class WeightChannel:
    """The driver's view of the weights' way to all rollout processes of a group.

    Args:
        kind: memory, collective or disk.
        sender: in this process, or in those that train.
        pipes: one channel per rollout process, for memory.
        answers: one channel per rollout process, for acknowledgements.
        directory: of the versions, for disk.
        device: of the buckets of a collective sync.
        timeout_s: seconds until all processes must have acknowledged a version.
    """

    def __init__(
        self,
        kind: Kind,
        sender: Sender,
        pipes: Sequence[Channel],
        answers: Sequence[Channel],
        directory: Path,
        device: str = "cpu",
        timeout_s: float = 600.0,
    ) -> None:
        self.kind, self.sender, self.pipes, self.answers = kind, sender, pipes, answers
        self.directory, self.device, self.timeout_s = directory, device, timeout_s
        self.generation = 0

    def options(self) -> dict[str, object]:
        """Begin a new generation: return what the receivers need to connect. ``open`` follows."""
        self.close()
        self.generation += 1
        options: dict[str, object] = {"kind": self.kind, "generation": self.generation}
        if self.kind == "disk":
            return options | {"directory": str(self.directory)}
        if self.kind == "collective":
            world_size = len(self.answers) + 1
            where = self.sender.rendezvous(world_size)
            return options | {"init_method": where, "world_size": world_size, "device": self.device}
        for pipe in self.pipes:
            drain(pipe)
        return options

    def open(self, options: Mapping[str, object], check: Check = no_check) -> None:
        """See Sender.open."""
        self.sender.open(options, check)

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, check: Check = no_check) -> None:
        """Send weights, and wait until all processes use them. Arguments as of Sender.send.

        Raises:
            WeightSyncError: a process refused them, and keeps those that it had.
        """
        check()
        self.sender.send(weights, version, check)
        deadline = time.monotonic() + self.timeout_s
        for rank, channel in enumerate(self.answers):
            hint = f"see logs/rollout_{rank}.log of the run (with Ray, `ray logs`)"
            while (answer := self._answer(channel)) is None:
                check()
                if time.monotonic() > deadline:
                    message = f"did not acknowledge weights of version {version} within {self.timeout_s:g} s"
                    raise WeightSyncError(f"rollout process {rank} {message}", hint)
            if answer["version"] != version:
                message = f"refused weights of version {version}: {answer['problem']}"
                raise WeightSyncError(f"rollout process {rank} {message}", hint)

    def _answer(self, channel: Channel) -> dict[str, object] | None:
        try:
            answer = cast(dict[str, object], channel.get(_POLL_S))
        except ChannelTimeout:
            return None
        return answer if answer["generation"] == self.generation else None

    def close(self) -> None:
        """Release what the sender holds."""
        self.sender.close()
        if self.kind == "disk":
            shutil.rmtree(self.directory, ignore_errors=True)
