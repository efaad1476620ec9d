"""The interface of launchers."""

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

PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
"""The directory that contains the package, which workers import it from, installed or not."""


@dataclass(frozen=True)
class CallOutcome:
    """Return value of a call, and its wall time in the worker in seconds."""

    value: object
    seconds: float


@dataclass(frozen=True)
class Job:
    """A worker to start.

    Attributes:
        worker_class: class, importable by name.
        rendezvous: address for ``torch.distributed``.
        channels: channels by name, made by the same launcher.
        log_dir: directory of its output; None keeps it for error messages only.
        restarts: the worker can be replaced, since no other worker waits for it.
        variables: further environment variables.
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
    variables: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.group}[{self.rank}]"

    @property
    def class_path(self) -> str:
        """Import path ``module:Class``; raises EmbodrlError if another process can't import the class."""
        module = self.worker_class.__module__
        name = self.worker_class.__qualname__
        if module == "__main__" or "<" in name or "." in name:
            raise EmbodrlError(
                f"the class {name} of {module} can't be imported by another process",
                "define it at the top of a module, not in the main script, or use the launcher 'inline'",
                code="worker-class",
            )
        return f"{module}:{name}"


class Running(ABC):
    """A started worker, which answers calls in order."""

    @abstractmethod
    def started(self) -> Future[CallOutcome]:
        """Return a future that completes once the worker's constructor has returned."""

    @abstractmethod
    def call(self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Future[CallOutcome]:
        """Start a call; the future gets its outcome, or a WorkerError."""

    @abstractmethod
    def explain_delay(self) -> str:
        """Return diagnostics of an unresponsive worker: its stack and last output."""

    @abstractmethod
    def close(self, grace_s: float) -> None:
        """Ask the worker to end, and kill it if it has not after some seconds."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the worker and its child processes at once."""

    def give_up(self, reason: str) -> None:
        """End the worker as hung: its calls fail with the reason."""
        self.kill()


class Launcher(ABC):
    """Starts workers and makes the channels between them."""

    @classmethod
    def for_run(
        cls,
        places: Sequence[ProcessPlace],
        simulators: Mapping[int, int] | None,
        cluster: ClusterConfig,
        limits: Limits,
    ) -> Launcher:
        """Return the launcher of a run.

        ``simulators`` is the number of simulator processes that the processes in ``places`` will start, by machine of
        the placement.

        Raises:
            MissingDependencyError: a package is missing.
            EmbodrlError: a requested resource is not available.
        """
        return cls()

    @abstractmethod
    def start(self, job: Job, on_death: Callable[[WorkerError], None]) -> Running:
        """Start a worker without waiting for its constructor.

        ``on_death`` is called, from any thread, if the worker ends without being asked to.

        Raises:
            EmbodrlError: the worker can't be started.
        """

    @abstractmethod
    def channel(self, name: str, capacity: int = 2) -> Channel:
        """Return a channel that the workers of this launcher can share."""

    def prepare(self, places: Sequence[ProcessPlace]) -> None:  # noqa: B027 - most need nothing
        """Reserve resources for the places of a group; raises EmbodrlError if they are not available."""

    def rendezvous(self, group: str) -> str:
        """Return an ``init_method`` for the workers of a group; "" if the workers agree on one themselves."""
        return ""

    def address(self) -> str:
        """Return a ``tcp://HOST:PORT`` of this process with a free port, reachable from all workers of the launcher."""
        return f"tcp://127.0.0.1:{free_port('127.0.0.1')}"

    @abstractmethod
    def close(self) -> None:
        """Release the launcher's resources; its workers are already closed."""


class RendezvousFiles:
    """Files of this machine through which the workers of a group find each other."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="embodrl-")

    def init_method(self, group: str) -> str:
        directory = Path(self._directory.name)
        # A run of weeks outlives the files in a machine's temporary directory.
        directory.mkdir(mode=0o700, exist_ok=True)
        return f"file://{directory / group}"

    def close(self) -> None:
        self._directory.cleanup()


def free_port(host: str = "") -> int:
    """Return an unused port."""
    with socket.socket() as free:
        free.bind((host, 0))
        # Another program may take the port first; the process that then can't listen reports it.
        return free.getsockname()[1]


def settle(future: Future[CallOutcome], outcome: CallOutcome | BaseException) -> None:
    """Complete a future, unless the death of another worker has done so."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def hung_error(name: str, reason: str, rank: int, log_tail: str) -> WorkerHung:
    """Return the error for a worker that is alive but makes no progress."""
    hint = (
        "its last output has its stack, unless the process was suspended; if it was only slow, increase"
        " cluster.heartbeat_timeout_s or cluster.stall_timeout_s"
    )
    return WorkerHung(f"{name} {reason}", hint, rank, log_tail=log_tail)


def raised(name: str, rank: int, report: ErrorReport, log_tail: str = "") -> WorkerRaised:
    """Return a method's error from the report of ``describe_error``; an EmbodrlError keeps its code."""
    message = f"{name} raised {report['type']} in {report['method']}: {report['message']}"
    return WorkerRaised(message, report["hint"], rank, report["traceback"], log_tail, code=report["code"])
