"""What a launcher is."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path

from embodrl.config.schema import ClusterConfig
from embodrl.deployment import ProcessPlace
from embodrl.errors import EmbodrlError, WorkerError, WorkerHung, WorkerRaised
from embodrl.processes.liveness import Limits
from embodrl.processes.serve import ErrorReport
from embodrl.scheduler.channel import Channel
from embodrl.scheduler.worker import Worker


@dataclass(frozen=True)
class CallOutcome:
    """What a call gave.

    Attributes:
        value: its result.
        seconds: wall time in the worker.
    """

    value: object
    seconds: float


@dataclass(frozen=True)
class Job:
    """A worker to bring up.

    Attributes:
        worker_class: importable by name.
        kwargs: keyword arguments of its constructor.
        group: name.
        world_size: workers of the group.
        place: where.
        rendezvous: address for ``torch.distributed``.
        channels: channels by name, made by the same launcher.
        log_dir: directory of its output; None keeps it for error messages only.
        restarts: it can be replaced, as no other worker waits for it.
    """

    worker_class: type[Worker]
    kwargs: dict[str, object]
    group: str
    world_size: int
    place: ProcessPlace
    rendezvous: str = ""
    channels: Mapping[str, Channel] = field(default_factory=dict[str, Channel])
    log_dir: Path | None = None
    restarts: bool = False

    @property
    def rank(self) -> int:
        """From 0."""
        return self.place.rank

    @property
    def name(self) -> str:
        """What to call it in a message."""
        return f"{self.group}[{self.rank}]"

    @property
    def class_path(self) -> str:
        """``module:Class``, which another process imports.

        Raises:
            EmbodrlError: no other process could.
        """
        module = self.worker_class.__module__
        name = self.worker_class.__qualname__
        if module == "__main__" or "<" in name or "." in name:
            raise EmbodrlError(
                f"the class {name} of {module} can't be imported by another process",
                "define it at the top of a module, not in the program that is run, or use the launcher 'inline'",
                code="worker-class",
            )
        return f"{module}:{name}"


class Running(ABC):
    """A worker that was started; calls are answered in their order."""

    @abstractmethod
    def started(self) -> Future[CallOutcome]:
        """Return what becomes true once the worker's constructor has returned."""

    @abstractmethod
    def call(self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Future[CallOutcome]:
        """Begin a call; the future gets its outcome, or a WorkerError."""

    @abstractmethod
    def explain_delay(self) -> str:
        """Return what is known of a worker that does not answer: its stack, what it printed last."""

    @abstractmethod
    def close(self, grace_s: float) -> None:
        """Ask it to end, and end it if it does not within some seconds."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, with what it started."""

    def give_up(self, reason: str) -> None:
        """End it as one that hangs: its calls fail with the reason."""
        self.kill()


class Launcher(ABC):
    """Brings up workers and makes the channels between them."""

    @classmethod
    def for_run(
        cls,
        places: Sequence[ProcessPlace],
        simulators: Mapping[int, int] | None,
        cluster: ClusterConfig,
        limits: Limits,
    ) -> Launcher:
        """Return the launcher of a run.

        Args:
            places: places of all processes that it will start.
            simulators: number of simulator processes that these will start, by machine of the placement.
            cluster: section ``cluster``.
            limits: times after which a worker counts as hung.

        Raises:
            MissingDependencyError: a package is missing.
            EmbodrlError: what the launcher asks for is not available.
        """
        return cls()

    @abstractmethod
    def start(self, job: Job, on_death: Callable[[WorkerError], None]) -> Running:
        """Bring up a worker; does not wait for its constructor.

        Args:
            job: what to bring up.
            on_death: called, from any thread, if it ends without being asked to.

        Raises:
            EmbodrlError: it can't be.
        """

    @abstractmethod
    def channel(self, name: str, capacity: int = 2) -> Channel:
        """Return a channel that the workers of this launcher can share."""

    def prepare(self, places: Sequence[ProcessPlace]) -> None:  # noqa: B027 - most need nothing
        """Reserve what the places of a group need, unless that has been done.

        Raises:
            EmbodrlError: it is not available.
        """

    def rendezvous(self, group: str) -> str:
        """Return an ``init_method`` for the workers of a group; "" if the workers agree on one themselves."""
        return ""

    def address(self) -> str:
        """Return a ``tcp://HOST:PORT`` of this process with a free port, which all workers of the launcher reach."""
        return f"tcp://127.0.0.1:{free_port('127.0.0.1')}"

    @abstractmethod
    def close(self) -> None:
        """Free what the launcher holds; its workers are closed already."""


class RendezvousFiles:
    """Files of this machine through which the workers of a group find each other."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="embodrl-")

    def init_method(self, group: str) -> str:
        """Return the ``init_method`` of a group."""
        directory = Path(self._directory.name)
        # A run of weeks outlives what a machine keeps in its temporary directory.
        directory.mkdir(mode=0o700, exist_ok=True)
        return f"file://{directory / group}"

    def close(self) -> None:
        """Remove the files."""
        self._directory.cleanup()


def free_port(host: str = "") -> int:
    """Return an unused port."""
    with socket.socket() as free:
        free.bind((host, 0))
        # Another program may take the port before it is used; the one that then can't listen reports it.
        return free.getsockname()[1]


def settle(future: Future[CallOutcome], outcome: CallOutcome | BaseException) -> None:
    """Complete a future, unless the death of another worker has done so."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def hung_error(name: str, reason: str, rank: int, log_tail: str) -> WorkerHung:
    """Return the error of a worker that lived and did not work."""
    hint = (
        "its last output has its stack, unless it was stopped; if it was only slow, raise"
        " cluster.heartbeat_timeout_s or cluster.stall_timeout_s"
    )
    return WorkerHung(f"{name} {reason}", hint, rank, log_tail=log_tail)


def raised(name: str, rank: int, report: ErrorReport, log_tail: str = "") -> WorkerRaised:
    """Return the error of a method from the report of ``describe_error``; it keeps the code of an EmbodrlError."""
    message = f"{name} raised {report['type']} in {report['method']}: {report['message']}"
    return WorkerRaised(message, report["hint"], rank, report["traceback"], log_tail, code=report["code"])
