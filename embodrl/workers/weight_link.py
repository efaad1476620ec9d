"""The weights of a run on their way to its rollout processes.

The main process sends, or has the processes that train send (``ActorEnd``); in each rollout process a thread takes
versions over between two batches, and answers which it has. What goes wrong costs a version, never a policy that is
half new: see docs/weight_sync.md.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from embodrl.errors import ChannelClosed, ChannelTimeout, WeightSyncError
from embodrl.hybrid_engines.weight_sync.base import WeightReceiver, WeightSender, WeightTarget
from embodrl.hybrid_engines.weight_sync.buckets import Layout
from embodrl.hybrid_engines.weight_sync.collective import CollectiveReceiver, CollectiveSender
from embodrl.hybrid_engines.weight_sync.disk import DiskReceiver, DiskSender
from embodrl.hybrid_engines.weight_sync.group import SyncGroup, cancel_meeting, open_meeting
from embodrl.hybrid_engines.weight_sync.memory import MemoryReceiver, MemorySender
from embodrl.scheduler.channel import Channel

logger = logging.getLogger(__name__)

Kind = Literal["memory", "collective", "disk"]
_POLL_S = 0.2
_SENDER = 0
_MEET_S = 600.0
"""A process that plays joins when it has done so."""
_FIND_S = 10.0
"""The sender asks to join when the meeting is open; it may have given up meanwhile."""


class WeightInbox:
    """The thread of a rollout process that takes weights over and tells the main process.

    Args:
        receiver: new.
        answers: to the main process: generation, version and, if that was refused, why.
        generation: number of the link; answers of an earlier one are passed over.
    """

    def __init__(self, receiver: WeightReceiver, answers: Channel, generation: int) -> None:
        self._receiver, self._answers, self._generation = receiver, answers, generation
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="weights", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._closing.is_set():
            try:
                report = self._receiver.receive(_POLL_S)
            except WeightSyncError as error:
                logger.warning("weights were not taken over: %s", error)
                self._answer(None, str(error))
                if isinstance(self._receiver, CollectiveReceiver) and self._receiver.group.broken:
                    return
            except Exception as error:
                logger.exception("no more weights are taken over")
                self._answer(None, f"{type(error).__name__}: {error}")
                return
            else:
                if report is not None:
                    self._answer(report.version, "")

    def _answer(self, version: int | None, problem: str) -> None:
        try:
            self._answers.put({"generation": self._generation, "version": version, "problem": problem}, _POLL_S)
        except (ChannelTimeout, ChannelClosed):
            logger.warning("the main process does not ask for what became of its weights")

    def close(self) -> None:
        """End the thread; a sync under way is finished or given up first."""
        self._closing.set()
        self._thread.join()
        self._receiver.close()


def make_receiver(
    kind: str, target: WeightTarget, options: dict[str, Any], pipe: Channel, rank: int, layout: Layout
) -> WeightReceiver:
    """Return the receiving end of a link.

    Args:
        kind: memory, collective or disk.
        target: takes the weights over.
        options: what the sending end told (``WeightLink.options``).
        pipe: buckets of this process, for memory.
        rank: of the rollout process.
        layout: of its policy.
    """
    if kind == "memory":
        return MemoryReceiver(target, pipe, layout)
    if kind == "disk":
        return DiskReceiver(target, Path(options["directory"]), layout)
    group = SyncGroup(
        options["init_method"],
        rank + 1,
        options["world_size"],
        torch.device(options["device"]),
        meet_s=_MEET_S,
        find_s=_FIND_S,
    )
    return CollectiveReceiver(target, group, layout)


def make_sender(
    options: dict[str, Any],
    pipes: Sequence[Channel],
    trained: Collection[str],
    meeting: Store | None = None,
    check: Callable[[], None] = lambda: None,
) -> WeightSender:
    """Return the sending end of a link; for a collective sync the receiving ends must be joining meanwhile.

    Args:
        options: of the generation (``WeightLink.options``).
        pipes: a channel a rollout process, for memory.
        trained: names that travel after the first sync (``trained_names``).
        meeting: that was opened for a collective sync.
        check: asked meanwhile; raises if a process has gone.

    Raises:
        TornSyncError: they did not all join.
    """
    if options["kind"] == "memory":
        return MemorySender(pipes, trained)
    if options["kind"] == "disk":
        return DiskSender(Path(options["directory"]), trained)
    group = SyncGroup(
        options["init_method"],
        _SENDER,
        options["world_size"],
        torch.device(options["device"]),
        meet_s=_MEET_S,
        check=check,
        meeting=meeting,
    )
    return CollectiveSender(group, trained)


class SendingEnd(ABC):
    """Who sends the weights of a link."""

    @abstractmethod
    def meet(self, world_size: int) -> str:
        """Open the meeting of a collective sync; return where it is, as ``tcp://HOST:PORT``."""

    @abstractmethod
    def open(self, options: dict[str, Any], check: Callable[[], None]) -> None:
        """Make the sender of a generation; ``check`` is asked meanwhile, and what it raises ends that.

        Raises:
            WeightSyncError: the receiving ends did not all join.
        """

    @abstractmethod
    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, check: Callable[[], None]) -> None:
        """Send weights; ``check`` may be asked meanwhile.

        Args:
            weights: names and tensors of the policy, for an end that has none itself.
            version: updates that they have seen.
            check: raises if a process has gone.

        Raises:
            WeightSyncError: they could not be sent.
        """

    @abstractmethod
    def close(self) -> None:
        """Call off a meeting that nobody has used, and free what this process holds."""


class LocalEnd(SendingEnd):
    """This process sends.

    Args:
        pipes: a channel a process, for memory.
        trained: names that travel after the first sync (``trained_names``).
        address: returns a new ``tcp://HOST:PORT`` of this machine.
    """

    def __init__(self, pipes: Sequence[Channel], trained: Collection[str], address: Callable[[], str]) -> None:
        self.pipes, self.trained, self.address = pipes, trained, address
        self._sender: WeightSender | None = None
        self._meeting: Store | None = None

    def meet(self, world_size: int) -> str:
        init_method = self.address()
        self._meeting = open_meeting(init_method, world_size)
        return init_method

    def open(self, options: dict[str, Any], check: Callable[[], None]) -> None:
        meeting, self._meeting = self._meeting, None
        self._sender = make_sender(options, self.pipes, self.trained, meeting, check)

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, check: Callable[[], None]) -> None:
        assert self._sender is not None
        if isinstance(self._sender, MemorySender):
            self._sender.check = check
        self._sender.send(weights, version)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._meeting is not None:
            cancel_meeting(self._meeting)
            self._meeting = None


class WeightLink:
    """What the main process knows of the weights' way to all rollout processes of a group.

    Args:
        kind: memory, collective or disk.
        end: sends.
        pipes: a channel a process, for memory.
        answers: a channel a process.
        directory: of the versions, for disk.
        device: of the buckets of a collective sync.
        timeout_s: seconds that a version may take until all processes have it.
    """

    def __init__(
        self,
        kind: Kind,
        end: SendingEnd,
        pipes: Sequence[Channel],
        answers: Sequence[Channel],
        directory: Path,
        device: str = "cpu",
        timeout_s: float = 600.0,
    ) -> None:
        self.kind, self.end, self.pipes, self.answers = kind, end, pipes, answers
        self.directory, self.device, self.timeout_s = directory, device, timeout_s
        self.generation = 0

    def options(self) -> dict[str, Any]:
        """Begin a new generation: return what the receiving ends need to join it. Then comes ``open``."""
        self.close()
        self.generation += 1
        options: dict[str, Any] = {"kind": self.kind, "generation": self.generation}
        if self.kind == "disk":
            return options | {"directory": str(self.directory)}
        if self.kind == "collective":
            world_size = len(self.answers) + 1
            where = self.end.meet(world_size)
            return options | {"init_method": where, "world_size": world_size, "device": self.device}
        for pipe in self.pipes:
            drain(pipe)
        return options

    def open(self, options: dict[str, Any], check: Callable[[], None] = lambda: None) -> None:
        """Make the sender; for a collective sync the receiving ends must be joining meanwhile.

        Args:
            options: of the generation.
            check: asked meanwhile; raises if a process has gone.

        Raises:
            WeightSyncError: they did not all join.
        """
        self.end.open(options, check)

    def send(
        self, weights: Iterable[tuple[str, Tensor]], version: int, check: Callable[[], None] = lambda: None
    ) -> None:
        """Send weights, and wait until all processes have them.

        Args:
            weights: names and tensors of the policy.
            version: updates that they have seen.
            check: asked meanwhile; raises if a process has gone.

        Raises:
            WeightSyncError: a process has not taken them over; it goes on with those that it had.
        """
        check()
        self.end.send(weights, version, check)
        deadline = time.monotonic() + self.timeout_s
        for rank, channel in enumerate(self.answers):
            while (answer := self._answer(channel)) is None:
                check()
                if time.monotonic() > deadline:
                    raise WeightSyncError(
                        f"rollout process {rank} has not taken over weights of version {version} within"
                        f" {self.timeout_s:g} s",
                        f"see logs/rollout_{rank}.log of the run (with Ray, `ray logs`)",
                    )
            if answer["version"] != version:
                raise WeightSyncError(
                    f"rollout process {rank} refused weights of version {version}: {answer['problem']}",
                    f"see logs/rollout_{rank}.log of the run (with Ray, `ray logs`)",
                )

    def _answer(self, channel: Channel) -> dict[str, Any] | None:
        try:
            answer: dict[str, Any] = channel.get(_POLL_S)
        except ChannelTimeout:
            return None
        return answer if answer["generation"] == self.generation else None

    def close(self) -> None:
        """Free what the sending end holds."""
        self.end.close()
        if self.kind == "disk":
            shutil.rmtree(self.directory, ignore_errors=True)


def drain(channel: Channel) -> None:
    """Take out what nobody wants any more."""
    try:
        while True:
            channel.get(0.0)
    except ChannelTimeout:
        pass
