"""The weights of a run on their way to its rollout processes.

The main process sends; in each rollout process a thread takes versions over between two batches, and answers which it
has. What goes wrong costs a version, never a policy that is half new: see docs/weight_sync.md.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from embodrl.errors import ChannelClosed, ChannelTimeout, WeightSyncError
from embodrl.hybrid_engines.weight_sync.base import WeightReceiver, WeightSender, WeightTarget
from embodrl.hybrid_engines.weight_sync.buckets import Layout
from embodrl.hybrid_engines.weight_sync.collective import CollectiveReceiver, CollectiveSender
from embodrl.hybrid_engines.weight_sync.disk import DiskReceiver, DiskSender
from embodrl.hybrid_engines.weight_sync.group import SyncGroup
from embodrl.hybrid_engines.weight_sync.memory import MemoryReceiver, MemorySender
from embodrl.scheduler.channel import Channel

logger = logging.getLogger(__name__)

Kind = Literal["memory", "collective", "disk"]
_POLL_S = 0.2
_SENDER = 0
_MEET_S = 600.0
"""A process that plays joins when it has done so."""


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
                self._answer(None, str(error))
                if isinstance(self._receiver, CollectiveReceiver) and self._receiver.group.broken:
                    return
            except Exception as error:  # noqa: BLE001 - the main process raises it
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
        options: what the sending end told (``WeightLink.join``).
        pipe: buckets of this process, for memory.
        rank: of the rollout process.
        layout: of its policy.
    """
    if kind == "memory":
        return MemoryReceiver(target, pipe, layout)
    if kind == "disk":
        return DiskReceiver(target, Path(options["directory"]), layout)
    group = SyncGroup(
        options["init_method"], rank + 1, options["world_size"], torch.device(options["device"]), meet_s=_MEET_S
    )
    return CollectiveReceiver(target, group, layout)


class WeightLink:
    """The sending end, for all rollout processes of a group.

    Args:
        kind: memory, collective or disk.
        pipes: a channel a process, for memory.
        answers: a channel a process.
        trained: names that travel after the first sync (``trained_names``).
        directory: of the versions, for disk.
        address: returns a new ``tcp://HOST:PORT`` of this machine, for collective.
        device: of the buckets of a collective sync.
        timeout_s: seconds that a version may take until all processes have it.
    """

    def __init__(
        self,
        kind: Kind,
        pipes: list[Channel],
        answers: list[Channel],
        trained: Collection[str],
        directory: Path,
        address: Callable[[], str],
        device: str = "cpu",
        timeout_s: float = 600.0,
    ) -> None:
        self.kind, self.pipes, self.answers, self.trained = kind, pipes, answers, trained
        self.directory, self.address, self.device, self.timeout_s = directory, address, device, timeout_s
        self.generation = 0
        self._sender: WeightSender | None = None

    def options(self) -> dict[str, Any]:
        """Begin a new generation: return what the receiving ends need to join it. Then comes ``open``."""
        self.close()
        self.generation += 1
        options: dict[str, Any] = {"kind": self.kind, "generation": self.generation}
        if self.kind == "disk":
            shutil.rmtree(self.directory, ignore_errors=True)  # of an earlier generation
            return options | {"directory": str(self.directory)}
        if self.kind == "collective":
            init_method = self.address()
            return options | {
                "init_method": init_method,
                "world_size": len(self.answers) + 1,
                "device": self.device,
            }
        for pipe in self.pipes:
            _drain(pipe)
        return options

    def open(self, options: dict[str, Any]) -> None:
        """Make the sender; for a collective sync the receiving ends must be joining meanwhile."""
        if self.kind == "memory":
            self._sender = MemorySender(self.pipes, self.trained)
        elif self.kind == "disk":
            self._sender = DiskSender(Path(options["directory"]), self.trained)
        else:
            device = torch.device(self.device)
            group = SyncGroup(options["init_method"], _SENDER, options["world_size"], device, meet_s=_MEET_S)
            self._sender = CollectiveSender(group, self.trained)

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
        assert self._sender is not None
        self._sender.send(weights, version)
        deadline = time.monotonic() + self.timeout_s
        for rank, channel in enumerate(self.answers):
            while (answer := self._answer(channel)) is None:
                check()
                if time.monotonic() > deadline:
                    raise WeightSyncError(
                        f"rollout process {rank} has not taken over weights of version {version} within"
                        f" {self.timeout_s:g} s",
                        "see its log",
                    )
            if answer["version"] != version:
                raise WeightSyncError(
                    f"rollout process {rank} refused weights of version {version}: {answer['problem']}",
                    "see its log",
                )

    def _answer(self, channel: Channel) -> dict[str, Any] | None:
        try:
            answer: dict[str, Any] = channel.get(_POLL_S)
        except ChannelTimeout:
            return None
        return answer if answer["generation"] == self.generation else None

    def close(self) -> None:
        """Free what the sending end holds."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None


def _drain(channel: Channel) -> None:
    """Take out what nobody wants any more."""
    try:
        while True:
            channel.get(0.0)
    except ChannelTimeout:
        pass
