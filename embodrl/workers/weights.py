"""The path of a run's weights to its rollout processes.

``WeightChannel`` is the driver's view. The driver sends (``LocalSender``), or lets the training processes send
(``RemoteSender``, ``SendingWorker``); in each rollout process a ``ReceiverThread`` accepts versions between two batches
and acknowledges them. A failure costs a version, but never leaves a policy with half of its weights: see
docs/weight_sync.md.

In synchronous runs with separate trainer and rollout processes, training rank 0 sends and the other ranks take part in
gathering. In asynchronous runs the driver sends, since it keeps the current version for rollout processes that restart
while the next one trains.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from pathlib import Path
from typing import Any, Literal, TypedDict
from urllib.parse import urlsplit

from torch import Tensor

from embodrl.deployment import Deployment
from embodrl.errors import (
    ChannelClosed,
    ChannelTimeout,
    EmbodrlError,
    WeightSyncError,
    WorkerDied,
    WorkerError,
)
from embodrl.fields import Fields
from embodrl.hybrid_engines.process_groups import cause_of
from embodrl.hybrid_engines.weight_sync.base import (
    Check,
    GatherOnly,
    Received,
    WeightReceiver,
    WeightSender,
    WeightTarget,
    no_check,
)
from embodrl.hybrid_engines.weight_sync.buckets import Layout
from embodrl.hybrid_engines.weight_sync.collective import (
    SENDER,
    CollectiveReceiver,
    CollectiveSender,
    SyncGroup,
    cancel_rendezvous,
    open_rendezvous,
)
from embodrl.hybrid_engines.weight_sync.disk import DiskReceiver, DiskSender
from embodrl.hybrid_engines.weight_sync.memory import MemoryReceiver, MemorySender
from embodrl.scheduler.channel import Channel
from embodrl.scheduler.group import Handle, WorkerGroup
from embodrl.scheduler.launchers.base import free_port
from embodrl.scheduler.worker import Worker, dispatch

logger = logging.getLogger(__name__)

Kind = Literal["memory", "collective", "disk"]
KINDS: tuple[Kind, ...] = ("memory", "collective", "disk")
Problem = tuple[str, str]
"""Message and hint of a failed sync in an otherwise healthy process."""
_POLL_S = 0.2
_CONNECT_S = 600.0  # a rollout process connects after its current batch
_FIND_S = 15.0  # until the sender has opened its rendezvous; it may have given up by then
_CANCEL_S = 2.0


def choose_weight_sync(deployment: Deployment, kind: str = "auto") -> Kind:
    """Return the cheapest kind of sync, or check the requested one.

    ``memory`` if every machine with a rollout process has a trainer; else ``collective``.

    Raises:
        EmbodrlError: the requested kind cannot work with this placement.
    """
    far = {place.node for place in deployment.of("rollout")} - {place.node for place in deployment.of("actor")}
    if kind == "auto":
        return "collective" if far else "memory"
    if kind == "memory" and far:
        machines = ", ".join(map(str, sorted(far)))
        raise EmbodrlError(
            f"weight sync by memory needs trainer and rollout on one machine: machine {machines} has a rollout process"
            " and no trainer",
            "set rollout.weight_sync to auto, collective or disk",
            code="weight-sync-settings",
        )
    return next(known for known in KINDS if known == kind)


def uses_nccl(deployment: Deployment) -> bool:
    """Return whether a collective sync can use NCCL: trainer and rollout have separate GPUs."""
    actor, rollout = (
        {(place.node, device) for place in deployment.of(component) for device in place.devices}
        for component in ("actor", "rollout")
    )
    # NCCL refuses two ranks on one GPU.
    return bool(actor and rollout) and not actor & rollout


class Route(TypedDict):
    """Connection data of a generation, which ends when a process is restarted.

    Attributes:
        generation: acknowledgements of earlier generations are ignored.
        where: directory (disk) or rendezvous ``tcp://HOST:PORT`` (collective).
        world_size: number of processes of a collective: sender and receivers.
    """

    kind: Kind
    generation: int
    where: str
    world_size: int
    device: str


def _sync_group(route: Route, rank: int, check: Check = no_check) -> SyncGroup:
    return SyncGroup(route["where"], rank, route["world_size"], route["device"], 60.0, _CONNECT_S, check, _FIND_S)


def drain(channel: Channel) -> None:
    """Discard the contents of a channel."""
    with contextlib.suppress(ChannelTimeout):
        while True:
            channel.get(0.0)


# -- receiving side ----------------------------------------------------------------------------------------------------


def make_receiver(target: WeightTarget, route: Route, pipe: Channel, rank: int, layout: Layout) -> WeightReceiver:
    """Return the receiver of a rollout process; ``pipe`` delivers its buckets with memory."""
    if route["kind"] == "memory":
        return MemoryReceiver(target, pipe, layout)
    if route["kind"] == "disk":
        return DiskReceiver(target, Path(route["where"]), layout)
    # Rank 0 is the sender.
    return CollectiveReceiver(target, _sync_group(route, rank + 1), layout)


class ReceiverThread:
    """The thread of a rollout process that accepts weights and acknowledges them to the driver.

    ``answers`` carries generation, version (-1 if rejected), problem and the fields of ``Received``; the driver
    ignores earlier generations.
    """

    def __init__(self, receiver: WeightReceiver, answers: Channel, generation: int) -> None:
        self._receiver = receiver
        self._answers = answers
        self._generation = generation
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="weights", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not (self._closing.is_set() or self._receiver.is_broken):
            try:
                report = self._receiver.receive(_POLL_S)
            except WeightSyncError as error:
                # The thread continues: the receiver keeps the previous version, and can take the next one.
                logger.warning("weight update rejected: %s", error)
                self._answer(-1, str(error))
            except Exception as error:  # outermost frame of this thread: the driver raises it
                logger.exception("no further weight updates are accepted")
                self._answer(-1, f"{type(error).__name__}: {error}")
                return
            else:
                if report is not None:
                    self._answer(report.version, "", report.received)

    def _answer(self, version: int, problem: str, received: Received | None = None) -> None:
        answer: dict[str, object] = {"generation": self._generation, "version": version, "problem": problem}
        try:
            self._answers.put(answer | vars(received or Received()), _POLL_S)
        except (ChannelTimeout, ChannelClosed):
            logger.warning("the driver does not read weight-update acknowledgements")

    def close(self) -> None:
        """End the thread after the sync in progress completes or fails."""
        self._closing.set()
        self._thread.join()
        self._receiver.close()


# -- sending side ------------------------------------------------------------------------------------------------------


class LocalSender:
    """This process sends. Failures are WeightSyncErrors; ``check`` is called while waiting.

    Args:
        trained: names to send after the first sync (``trained_names``).
        address: returns a new ``tcp://HOST:PORT`` of this machine.
        gathers_only: this rank of a sharded trainer takes part in gathering and sends nothing.
        patches: send only changed values; not by disk.
    """

    def __init__(
        self,
        pipes: Sequence[Channel],
        trained: Collection[str],
        address: Callable[[], str],
        gathers_only: bool = False,
        patches: bool = False,
    ) -> None:
        self.pipes = pipes
        self.trained = trained
        self.address = address
        self.gathers_only = gathers_only
        self.patches = patches
        self.sender: WeightSender | None = None

    def open(self, route: Route, check: Check = no_check) -> None:
        """Begin a generation; for a collective sync the receivers must be connecting at the same time."""
        self.close()
        if self.gathers_only:
            self.sender = GatherOnly(self.trained)
        elif route["kind"] == "memory":
            self.sender = MemorySender(self.pipes, self.trained, patches=self.patches)
        elif route["kind"] == "collective":
            group = _sync_group(route, SENDER, check)
            self.sender = CollectiveSender(group, self.trained, patches=self.patches)
        else:
            self.sender = DiskSender(Path(route["where"]), self.trained)
            if self.sender.version is not None:  # the gathering ranks would disagree on the contents of the next sync
                raise WeightSyncError(f"{route['where']} already holds weights", "remove it")

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, check: Check = no_check) -> None:
        """Send names and tensors of the policy."""
        assert self.sender is not None
        self.sender.send(weights, version, check=check)

    @property
    def next_names(self) -> Collection[str] | None:
        """Names in the next sync; None for all."""
        return None if self.sender is None or self.sender.base is None else self.sender.trained

    def close(self) -> None:
        """End the generation."""
        if self.sender is not None:
            self.sender.close()
            self.sender = None


class SendingWorker(Worker):
    """A training process that can send its weights."""

    sending: LocalSender | None = None

    @abstractmethod
    def stream(self, wanted: Container[str] | None) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors of the policy, of the wanted names or all: a collective call."""

    @dispatch("one_to_all")
    def make_sender(self, pipes: list[str], trained: list[str], patches: bool) -> None:
        """Prepare to send through the channels of these names; see LocalSender."""
        # The address where the training processes connect is known to be reachable; a file exists on one machine only.
        host = urlsplit(self.context.rendezvous).hostname or "127.0.0.1"
        channels = [self.channel(name) for name in pipes]
        self.sending = LocalSender(
            channels, trained, lambda: f"tcp://{host}:{free_port()}", gathers_only=self.rank > 0, patches=patches
        )

    @dispatch("rank_zero")
    def sender_address(self) -> str:
        assert self.sending is not None
        return self.sending.address()

    @dispatch("one_to_all")
    def open_sender(self, route: Route) -> Problem | None:
        return self._attempt(lambda sending: sending.open(route))

    @dispatch("one_to_all")
    def send_weights(self, version: int) -> Problem | None:
        """Send the current weights."""
        return self._attempt(lambda sending: sending.send(self.stream(sending.next_names), version))

    def _attempt(self, action: Callable[[LocalSender], None]) -> Problem | None:
        assert self.sending is not None
        try:
            action(self.sending)
        except WeightSyncError as error:
            # Returned, not raised: the process itself is healthy, and an error would fail the whole group.
            return error.message, error.hint
        return None

    def close_sender(self) -> None:
        """Release what the sender holds."""
        if self.sending is not None:
            self.sending.close()


class RemoteSender:
    """The training processes send; the argument of ``send`` is ignored. Otherwise like ``LocalSender``.

    Args:
        group: group of ``SendingWorker``, launched with the pipes.
        pipes: channels by name, one per rollout process, in rank order.
        trained, patches: see LocalSender.

    Raises:
        WorkerError: from all methods: a training process failed or died, and the group with it. Never ``WorkerDied``,
            which stands for a rollout process here and would restart it.
    """

    def __init__(
        self, group: WorkerGroup, pipes: Mapping[str, Channel], trained: Collection[str], patches: bool = False
    ) -> None:
        self.group = group
        self.pipes = list(pipes.values())
        self.patches = patches
        self._call("make_sender", list(pipes), sorted(trained), patches)

    def address(self) -> str:
        return self._call("sender_address")

    def open(self, route: Route, check: Check = no_check) -> None:
        self._attempt("open_sender", route, check, route["where"] if route["kind"] == "collective" else "")

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, check: Check = no_check) -> None:
        self._attempt("send_weights", version, check)

    def close(self) -> None:
        """Do nothing: a sender is closed when the next generation begins, or with its process."""

    def _attempt(self, method: str, argument: object, check: Check, rendezvous: str = "") -> None:
        problems: list[Problem | None] = self._call(method, argument, check=check, rendezvous=rendezvous)
        for problem in filter(None, problems):
            raise WeightSyncError(*problem)

    def _call(self, method: str, *args: object, check: Check = no_check, rendezvous: str = "") -> Any:
        """Return the processes' answer. An error of ``check`` is raised once they are free again."""
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
                    self._release(failure, rendezvous)
            answer = handle.result()
        except WorkerError as error:
            cause = error if handle is None else cause_of(handle, error)
            self.group.kill()  # without one of them the others would wait forever
            raise WorkerError(cause.message, cause.hint, cause.rank) from cause
        if failure is not None:
            raise failure
        return answer

    def _release(self, failure: WorkerError, rendezvous: str) -> None:
        """Unblock the sender, which may be waiting for a dead process: for its connection, or for room in its pipe."""
        if rendezvous:
            with contextlib.suppress(RuntimeError):  # not open yet, or already closed
                cancel_rendezvous(open_rendezvous(rendezvous, len(self.pipes) + 1, False, _CANCEL_S))
        if isinstance(failure, WorkerDied):
            drain(self.pipes[failure.rank])


Sender = LocalSender | RemoteSender


class WeightChannel:
    """The driver's view of the weights' path to all rollout processes of a group.

    Args:
        sender: sender in this process or in the training processes.
        answers: acknowledgement channels, one per rollout process.
        timeout_s: seconds until all processes must have acknowledged a version.
    """

    def __init__(
        self,
        kind: Kind,
        sender: Sender,
        answers: Sequence[Channel],
        directory: Path,
        device: str = "cpu",
        timeout_s: float = 600.0,
    ) -> None:
        self.kind: Kind = kind
        self.sender = sender
        self.answers = answers
        self.directory = directory
        self.device = device
        self.timeout_s = timeout_s
        self.generation = 0
        self._received = Received()
        self._num_whole = 0

    def options(self) -> Route:
        """Begin a new generation; return the receivers' connection data. Call ``open`` next."""
        self.close()
        self.generation += 1
        where = str(self.directory)
        world_size = len(self.answers) + 1
        if self.kind == "collective":
            where = self.sender.address()
        if self.kind == "memory":
            # A failed generation may have left buckets in the pipes.
            for pipe in self.sender.pipes:
                drain(pipe)
        return Route(kind=self.kind, generation=self.generation, where=where, world_size=world_size, device=self.device)

    def open(self, route: Route, check: Check = no_check) -> None:
        self.sender.open(route, check)

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, check: Check = no_check) -> None:
        """Send weights, and wait until all processes use them. Arguments as in ``Sender.send``.

        Raises:
            WeightSyncError: a process rejected them and keeps its previous weights.
        """
        check()
        self.sender.send(weights, version, check)
        deadline = time.monotonic() + self.timeout_s
        received = Received()
        for rank, channel in enumerate(self.answers):
            hint = f"see logs/rollout_{rank}.log of the run (with Ray, `ray logs`)"
            while (answer := self._answer(channel)) is None:
                check()
                if time.monotonic() > deadline:
                    message = f"did not acknowledge weights of version {version} within {self.timeout_s:g} s"
                    raise WeightSyncError(f"rollout process {rank} {message}", hint)
            if answer.integer("version", low=-1) != version:
                message = f"refused weights of version {version}: {answer.text('problem')}"
                raise WeightSyncError(f"rollout process {rank} {message}", hint)
            received = Received(*(answer.integer(name, 0) for name in ("num_bytes", "num_values", "num_changed")))
        self._received = received
        self._num_whole += not received.num_values

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last sync to one process, and of all syncs so far; empty without patches.

        ``weight_sync/mib`` was sent, ``weight_sync/changed`` is the share of values with other bits (1 without a
        previous version), ``weight_sync/whole`` counts the syncs that carried everything.
        """
        if not self.sender.patches:
            return {}
        last = self._received
        share = last.num_changed / last.num_values if last.num_values else 1.0
        return {
            "weight_sync/mib": last.num_bytes / 2**20,
            "weight_sync/changed": share,
            "weight_sync/whole": float(self._num_whole),
        }

    def _answer(self, channel: Channel) -> Fields | None:
        try:
            received = Fields({"answer": channel.get(_POLL_S)}, f"channel '{channel.name}'", WeightSyncError)
        except ChannelTimeout:
            return None
        answer = received.fields("answer")
        return answer if answer.integer("generation") == self.generation else None

    def close(self) -> None:
        """Release what the sender holds."""
        self.sender.close()
        if self.kind == "disk":
            # The next generation needs an empty directory, see ``LocalSender.open``.
            shutil.rmtree(self.directory, ignore_errors=True)
