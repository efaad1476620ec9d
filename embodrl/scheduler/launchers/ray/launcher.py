"""Workers as Ray actors: several machines, reserved resources, and Ray's object store for messages.

Ray pickles between its own processes; from here it only gets descriptions and raw memory, as the other launchers do.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from embodrl.config.schema import ClusterConfig
from embodrl.deployment import ProcessPlace
from embodrl.errors import EmbodrlError, MissingDependencyError, WorkerDied, WorkerError
from embodrl.processes.child import LOG_TAIL_BYTES
from embodrl.processes.codec import Blobs
from embodrl.processes.liveness import Limits, start_beating, stop_requested
from embodrl.processes.serve import describe_error
from embodrl.scheduler.channel import Channel
from embodrl.scheduler.launchers.base import (
    PACKAGE_ROOT,
    CallOutcome,
    Job,
    Launcher,
    Running,
    free_port,
    hung_error,
    raised,
    settle,
)
from embodrl.scheduler.launchers.host import Host, context_message, environment
from embodrl.scheduler.launchers.ray.machines import RayMachine, Reservation
from embodrl.scheduler.launchers.ray.watcher import Watcher
from embodrl.scheduler.messages import CODEC

RESERVE_TIMEOUT_S = 60.0
_LOOK_S = 1.0  # seconds between checks of an actor, or of the machine of one that is still starting
_ANSWER_S = 5.0  # of a watcher
_STACK_DUMP_S = 0.3
Packed = tuple[bytes, Blobs]


def import_ray() -> ModuleType:
    """Import ``ray``; raises MissingDependencyError if it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise MissingDependencyError("Ray is not installed", "pip install 'embodrl[ray]'")
    return importlib.import_module("ray")


def connect(ray: ModuleType, address: str | None, **options: object) -> None:
    """Join the Ray cluster at an address; for None, at RAY_ADDRESS or on this machine, or start one."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else Ray writes a token to the home directory
    path = os.pathsep.join([PACKAGE_ROOT, *(entry for entry in sys.path if entry)])
    ray.init(
        address,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="warning",
        runtime_env={"env_vars": {"PYTHONPATH": path}},
        **options,
    )


def _address() -> str:
    return f"tcp://{import_ray().util.get_node_ip_address()}:{free_port()}"


class RayHost:
    """The actor: holds a worker and answers calls; messages are packed."""

    def __init__(self, variables: dict[str, str]) -> None:
        os.environ.update(variables)
        self._host: Host | None = None
        self._heartbeat = os.memfd_create("embodrl-heartbeat")
        start_beating(self._heartbeat)
        faulthandler.register(signal.SIGUSR1, all_threads=True)

    def about(self) -> tuple[int, str, str, int]:
        """Return process id, machine address, log directory, and the descriptor of the heartbeat."""
        ray = import_ray()
        session = getattr(ray._private.worker._global_node, "get_logs_dir_path", lambda: "")()
        return os.getpid(), ray.util.get_node_ip_address(), str(session), self._heartbeat

    def address(self) -> str:
        """Return an ``init_method`` for ``torch.distributed`` with its store on this machine, on a free port."""
        return _address()

    def start(
        self, class_path: str, numa_node: int | None, packed: Packed, channels: dict[str, Channel]
    ) -> Packed | None:
        """Build the worker; returns None, or a packed error report."""
        context, kwargs = CODEC.unpack(*packed)
        try:
            self._host = Host(class_path, context, numa_node, kwargs, channels)
        except BaseException as error:  # noqa: BLE001 - raised by the driver
            return CODEC.pack(describe_error(error, "__init__"))
        return None

    def call(self, method: str, packed: Packed) -> tuple[bool, Packed]:
        """Return, packed, whether a method returned, and its result with seconds or an error report."""
        assert self._host is not None
        # Ray's object store is read-only and shared, but a worker owns its arguments.
        args, kwargs = CODEC.unpack(*packed)
        try:
            return True, CODEC.pack(self._host.call(method, args, kwargs))
        except BaseException as error:  # noqa: BLE001 - raised by the driver
            return False, CODEC.pack(describe_error(error, method))

    def close(self) -> None:
        if self._host is not None:
            self._host.worker.close()


class RayQueue(Protocol):
    """The part of ``ray.util.queue.Queue`` that a channel uses."""

    def put(self, item: Packed, *, timeout: float | None) -> None:
        """Add an item; raises ``Full``."""

    def get(self, *, timeout: float | None) -> Packed:
        """Take an item; raises ``Empty``."""
        ...

    def qsize(self) -> int: ...

    def shutdown(self, force: bool) -> None:
        """End the actor that holds the items."""


class RayChannel(Channel):
    """A channel whose values are in Ray's object store."""

    def __init__(self, name: str, capacity: int, queue: RayQueue) -> None:
        super().__init__(name, capacity)
        self._queue = queue

    def put(self, value: object, timeout_s: float | None = None) -> None:
        queue = importlib.import_module("ray.util.queue")
        try:
            self._queue.put(CODEC.pack(value), timeout=timeout_s)
        except queue.Full as error:
            raise self._timeout("full", timeout_s) from error
        except import_ray().exceptions.RayActorError as error:
            raise self._closed() from error

    def get(self, timeout_s: float | None = None) -> object:
        queue = importlib.import_module("ray.util.queue")
        try:
            description, blobs = self._queue.get(timeout=timeout_s)
        except queue.Empty as error:
            raise self._timeout("empty", timeout_s) from error
        except import_ray().exceptions.RayActorError as error:
            raise self._closed() from error
        return CODEC.unpack(description, blobs)

    def close(self) -> None:
        self._queue.shutdown(force=True)


class _RayWorker(Running):
    """A worker in a Ray actor.

    Args:
        lost: returns the error if the worker's machine is lost; else None.
    """

    def __init__(
        self,
        ray: ModuleType,
        actor: Any,
        job: Job,
        context: Mapping[str, object],
        on_death: Callable[[WorkerError], None],
        lost: Callable[[], WorkerDied | None],
        watcher: Any,
    ) -> None:
        self._ray = ray
        self._actor = actor
        self._job = job
        self._on_death = on_death
        self._closing = False
        self._settled = threading.Event()  # the start has succeeded or failed
        self._over = threading.Event()
        self._given_up = False
        self._dead: WorkerError | None = None
        self._pending: set[Future[CallOutcome]] = set()
        self._watcher = watcher
        self._about: tuple[int, str, str, int] | None = None
        self._started: Future[CallOutcome] = Future()
        actor.about.remote().future().add_done_callback(self._introduce)
        packed = CODEC.pack((context, job.kwargs))
        started = actor.start.remote(job.class_path, job.place.numa_node, packed, dict(job.channels))
        started.future().add_done_callback(lambda done: self._complete(done, self._started, starting=True))
        self._thread = threading.Thread(target=self._watch, args=(lost,), name=f"watches {job.name}", daemon=True)
        self._thread.start()

    def started(self) -> Future[CallOutcome]:
        return self._started

    def call(self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Future[CallOutcome]:
        future: Future[CallOutcome] = Future()
        if self._dead is not None:
            future.set_exception(self._dead)
            return future
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        answer = self._actor.call.remote(method, CODEC.pack((args, kwargs)))
        answer.future().add_done_callback(lambda done: self._complete(done, future, starting=False))
        return future

    def _introduce(self, done: Future[tuple[int, str, str, int]]) -> None:
        if done.exception() is None:
            self._about = done.result()
        self._settled.set()

    def _watch(self, lost: Callable[[], WorkerDied | None]) -> None:
        """Give up a hung actor, and one whose machine is lost during the start.

        Ray does not notice the first, and would wait for the machine of the second to return.
        """
        while not self._settled.wait(_LOOK_S):
            if (died := lost()) is not None:
                settle(self._started, died)
                self._on_death(died)
                return
        while self._about is not None and not self._over.wait(_LOOK_S):
            pid, _, _, heartbeat = self._about
            busy = not self._started.done() or bool(self._pending)
            if reason := self._ask_watcher("look", pid, heartbeat, busy, stop_requested.is_set()):
                self.give_up(reason)
                return

    def _ask_watcher(self, method: str, *args: object) -> Any:
        """Return the watcher's result; None while Ray restarts it."""
        try:
            return self._ray.get(getattr(self._watcher, method).remote(*args), timeout=_ANSWER_S)
        except self._ray.exceptions.RayError:
            return None

    def give_up(self, reason: str) -> None:
        if self._about is None:  # still starting
            self.kill()
            return
        self._given_up = True  # the stack dump may interrupt what it hangs in
        self._ask_watcher("dump_stack", self._about[0])
        time.sleep(_STACK_DUMP_S)
        self._dead = hung_error(self._job.name, f"{reason}; killed", self._job.rank, self.explain_delay())
        self._over.set()
        self._on_death(self._dead)
        for future in (self._started, *tuple(self._pending)):
            settle(future, self._dead)
        self._ask_watcher("end", self._about[0])  # a suspended process does not receive ray.kill

    def _complete(self, done: Future[Any], future: Future[CallOutcome], starting: bool) -> None:
        if self._given_up and self._dead is None:  # settled by ``give_up``
            return
        error = done.exception()
        if error is not None:
            settle(future, self._on_actor_error(error))
            return
        answer = done.result()
        well, packed = (answer is None, answer) if starting else answer
        value = None if packed is None else CODEC.unpack(*packed)
        if well:
            result, seconds = (None, 0.0) if value is None else value
            settle(future, CallOutcome(result, seconds))
        else:
            assert value is not None
            settle(future, raised(self._job.name, self._job.rank, value, self.explain_delay()))

    def _on_actor_error(self, error: BaseException) -> WorkerError:
        if self._dead is not None:
            return self._dead
        reason = "was closed" if self._closing else f"has gone: {str(error).splitlines()[0]}"
        died = WorkerDied(
            f"{self._job.name} {reason}",
            "" if self._closing else "see its last output, or `ray logs`",
            self._job.rank,
            log_tail="" if self._closing else self.explain_delay(),
        )
        if not self._closing:
            self._on_death(died)
        return died

    def explain_delay(self) -> str:
        """Return the end of its output if this machine has it, else its location."""
        if self._about is None:
            return ""
        pid, address, logs, _ = self._about
        found = sorted(Path(logs).glob(f"worker-*-{pid}.*")) if logs else []
        tails = [path.read_text(errors="replace")[-LOG_TAIL_BYTES:] for path in found]
        tails = ["\n".join(line for line in tail.splitlines() if not line.startswith(":")) for tail in tails]
        return "\n".join(filter(None, tails)).strip() or f"its output is in {logs} of {address}, process {pid}"

    def close(self, grace_s: float) -> None:
        self._closing = True
        self._ray.wait([self._actor.close.remote()], timeout=grace_s)
        self.kill()

    def kill(self) -> None:
        self._closing = True
        self._settled.set()
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join()  # the thread calls Ray, which may be shut down next
        self._ray.kill(self._actor)


class RayLauncher(Launcher):
    """Ray actors. Joins a running Ray cluster, or starts one on this machine.

    Machine 0 of the placement is the driver's Ray node, the others follow by address; each is a bundle of one placement
    group, see ``Reservation``. The processes of a machine share the GPUs of its bundle as the placement says.

    Args:
        places: all places to launch, so that co-located groups share a reservation; default: the first group's.
        address: address of a Ray cluster; None joins a running one or starts one.
        timeout_s: time limit of the reservation, in seconds.
        children: number of processes that the workers will start, by machine of the placement.
        limits: times after which a worker counts as hung.
        options: options of ``ray.init``, e.g. ``num_gpus``.
    """

    def __init__(
        self,
        places: Sequence[ProcessPlace] | None = None,
        address: str | None = None,
        timeout_s: float = RESERVE_TIMEOUT_S,
        children: Mapping[int, int] | None = None,
        limits: Limits | None = None,
        **options: object,
    ) -> None:
        self._ray = import_ray()
        self._children = children or {}
        self._limits = limits or Limits()
        self._watchers: dict[int, Any] = {}  # by machine
        self._timeout_s = timeout_s
        self._owned = not self._ray.is_initialized()
        if self._owned:
            connect(self._ray, address, **options)
        self._channels: list[RayChannel] = []
        self._reservation: Reservation | None = None
        self._meeting: dict[str, str] = {}
        if places is not None:
            try:
                self.prepare(places)
            except BaseException:  # not even a signal may leave actors and a reservation; re-raised
                self.close()
                raise

    @classmethod
    def for_run(
        cls,
        places: Sequence[ProcessPlace],
        simulators: Mapping[int, int] | None,
        cluster: ClusterConfig,
        limits: Limits,
    ) -> Launcher:
        return cls(places, cluster.ray_address, children=simulators, limits=limits)

    def start(self, job: Job, on_death: Callable[[WorkerError], None]) -> Running:
        """Start a worker; see ``Launcher.start``.

        Raises:
            WorkerDied: its machine is lost, or it is the first of its group, where the others meet, and did not start.
            EmbodrlError: no resources are reserved for it.
        """
        if self._reservation is None:
            raise EmbodrlError(
                "no resources are reserved", "give RayLauncher the places of all groups", code="ray-resources"
            )
        machine = self._reservation.machine(job.place.node)
        if machine is None:
            raise EmbodrlError(
                f"{job.name} is on machine {job.place.node}, which has no reservation",
                "give RayLauncher the places of all groups",
                code="ray-resources",
            )
        if (died := self._lost(job, machine)) is not None:
            raise died
        where = self._reservation.strategy(machine)
        actor = self._ray.remote(RayHost).options(num_cpus=1, num_gpus=0, scheduling_strategy=where)
        variables = {**environment(job.place, job.world_size), **job.variables}
        running = actor.remote(variables)
        if job.rank == 0:  # started first, since the others meet at its address
            try:
                self._meeting[job.rendezvous] = self._ask_address(running, job, machine)
            except BaseException:  # not even a signal may leave the actor behind; re-raised
                self._ray.kill(running)
                raise
        meeting = self._meeting.get(job.rendezvous, "")
        context = context_message(job.group, job.rank, job.world_size, job.place, meeting)
        watcher = self._watcher(machine)
        return _RayWorker(self._ray, running, job, context, on_death, lambda: self._lost(job, machine), watcher)

    def _watcher(self, machine: RayMachine) -> Any:
        """Return the actor that detects hung workers on a machine, where the kernel knows."""
        assert self._reservation is not None
        if machine.rank not in self._watchers:
            options = {"num_cpus": 0, "scheduling_strategy": self._reservation.strategy(machine), "max_restarts": -1}
            self._watchers[machine.rank] = self._ray.remote(Watcher).options(**options).remote(self._limits)
        return self._watchers[machine.rank]

    def _ask_address(self, actor: Any, job: Job, machine: RayMachine) -> str:
        """Wait for the first worker of a group, and return the address where the others meet it."""
        asked = actor.address.remote()
        deadline = time.monotonic() + self._timeout_s
        while not self._ray.wait([asked], timeout=_LOOK_S)[0]:
            if (died := self._lost(job, machine)) is not None:
                raise died
            if time.monotonic() > deadline:
                message = f"{job.name} did not start on {machine} within {self._timeout_s:g} s"
                raise WorkerDied(message, "see `ray status`, and Ray's logs on that machine", job.rank)
        try:
            return self._ray.get(asked)
        except self._ray.exceptions.RayError as error:
            message = f"{job.name} died during start-up on {machine}: {str(error).splitlines()[0]}"
            raise WorkerDied(message, "see Ray's logs on that machine", job.rank) from error

    def _lost(self, job: Job, machine: RayMachine) -> WorkerDied | None:
        if self._reservation is None or not self._reservation.is_lost(machine):
            return None
        return WorkerDied(
            f"{job.name} can't be started: {machine} has left Ray",
            "bring the machine back to Ray (`ray start`), or place the run on the remaining machines and restart it",
            job.rank,
        )

    def prepare(self, places: Sequence[ProcessPlace]) -> None:
        if self._reservation is None:
            self._reservation = Reservation(self._ray, places, self._children, self._timeout_s)

    def rendezvous(self, group: str) -> str:
        return group  # a placeholder for the address that rank 0 reports once it is up

    def address(self) -> str:
        return _address()

    def channel(self, name: str, capacity: int = 2) -> Channel:
        queue = importlib.import_module("ray.util.queue").Queue(capacity, actor_options={"num_cpus": 0})
        self._channels.append(RayChannel(name, capacity, queue))
        return self._channels[-1]

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self._channels = []
        for watcher in self._watchers.values():
            self._ray.kill(watcher)
        self._watchers = {}
        if self._reservation is not None:
            self._reservation.release()
        self._reservation = None
        if self._owned:
            self._ray.shutdown()
