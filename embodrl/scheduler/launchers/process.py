"""Workers in processes of this machine: separate interpreters, bound cores, messages through shared memory.

Nothing is forked or pickled: a child gets the name of its class and its arguments. A thread in the driver waits for its
results and its death.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from embodrl.config.schema import ClusterConfig
from embodrl.deployment import ProcessPlace
from embodrl.errors import ChannelError, EmbodrlError, WorkerDied, WorkerError, WorkerTimeout
from embodrl.processes.child import ChildHungError, ChildProcess, module_command
from embodrl.processes.frames import Frame, Kind, PeerGoneError
from embodrl.processes.liveness import Limits
from embodrl.scheduler.channel import Channel, SharedChannel
from embodrl.scheduler.launchers.base import (
    PACKAGE_ROOT,
    CallOutcome,
    Job,
    Launcher,
    RendezvousFiles,
    Running,
    hung_error,
    raised,
    settle,
)
from embodrl.scheduler.launchers.host import context_message, environment
from embodrl.scheduler.messages import CODEC

MODULE = "embodrl.scheduler.launchers.process_main"
_JOIN_S = 10.0


class _ProcessWorker(Running):
    def __init__(self, job: Job, on_death: Callable[[WorkerError], None], limits: Limits) -> None:
        self._job = job
        self._on_death = on_death
        shared = _shared_channels(job)
        context = context_message(job.group, job.rank, job.world_size, job.place, job.rendezvous)
        start = {
            "class_path": job.class_path,
            "context": context,
            "numa_node": job.place.numa_node,
            "kwargs": job.kwargs,
            "channels": {name: (channel.capacity, channel.descriptors) for name, channel in shared.items()},
        }
        # The child imports embodrl from the same place as this process, installed or not.
        search_path = os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")]))
        self._child = ChildProcess(
            module_command(MODULE),
            start,
            CODEC,
            {"PYTHONPATH": search_path, **environment(job.place, job.world_size), **job.variables},
            None if job.log_dir is None else job.log_dir / f"{job.group}_{job.rank}.log",
            [number for channel in shared.values() for number in channel.descriptors],
            WorkerTimeout,
            job.name,
            limits,
            # Under memory pressure the kernel kills restartable workers first; simulators have 300.
            oom_score_adj=200 if job.restarts else 100,
        )
        # Guards the pending calls: callers add them, and the listening thread completes them.
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        # Call 0 is the constructor.
        self._pending: dict[int, Future[CallOutcome]] = {0: Future()}
        self._started = self._pending[0]
        self._closing = False
        self._given_up = ""
        self._dead: WorkerError | None = None
        self._thread = threading.Thread(target=self._listen, name=f"embodrl-{job.name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def started(self) -> Future[CallOutcome]:
        return self._started

    def call(self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Future[CallOutcome]:
        future: Future[CallOutcome] = Future()
        with self._lock:
            if self._dead is not None:
                future.set_exception(self._dead)
                return future
            # Registered before sending, so that the response finds it.
            number = next(self._numbers)
            self._pending[number] = future
        try:
            self._child.connection.send(Frame(Kind.CALL, number, value=(method, args, kwargs)))
        except PeerGoneError:
            pass  # reported by the listening thread
        except BaseException:  # a signal or a value that can't be sent: no response will come; re-raised
            self._pending.pop(number, None)
            raise
        return future

    def _listen(self) -> None:
        """Complete calls until the process has ended; messages sent before its end still count."""
        hung = ""
        try:
            while True:
                self._complete(self._child.receive(busy=lambda: bool(self._pending)))
        except (PeerGoneError, OSError):
            hung = self._given_up
        except ChildHungError as error:
            hung = f"{error}; killed"
            self._child.dump_stack()
        self._on_exit(hung)

    def _complete(self, frame: Frame) -> None:
        with self._lock:
            future = self._pending.pop(frame.number)
        if frame.kind == Kind.OK:
            value, seconds = frame.value
            settle(future, CallOutcome(value, seconds))
        else:
            settle(future, raised(self._job.name, self._job.rank, frame.value, self._child.log_tail()))

    def _on_exit(self, hung: str) -> None:
        """Fail pending calls, and notify the group unless the end was requested."""
        try:
            reason = hung or self._child.exit_reason()
        except WorkerTimeout as error:
            reason = error.message
        name = self._job.name
        rank = self._job.rank
        tail = self._child.log_tail()
        with self._lock:
            if self._closing:
                error = WorkerDied(f"{name} was closed", "", rank)
            elif hung:
                error = hung_error(name, reason, rank, tail)
            else:
                hint = "see its last output; `embodrl doctor` checks memory and drivers"
                error = WorkerDied(f"{name} {reason}", hint, rank, log_tail=tail)
            self._dead = error
            pending = list(self._pending.values())
            self._pending = {}
        # A constructor that raised has reported it already, and the process ends because of it.
        failed_to_start = self._started.done() and self._started.exception() is not None
        if not self._closing and not failed_to_start:
            self._on_death(error)
        for future in pending:
            settle(future, error)
        if hung:  # only now: workers in a collective would report the lost peer instead of the cause
            with contextlib.suppress(WorkerTimeout):
                self._child.end_group()

    def explain_delay(self) -> str:
        self._child.dump_stack()
        return self._child.log_tail()

    def give_up(self, reason: str) -> None:
        self._child.dump_stack()
        self._given_up = f"{reason}; killed"
        self._child.end_group()

    def close(self, grace_s: float) -> None:
        # Set first, so that the listening thread takes the end as requested.
        self._closing = True
        with contextlib.suppress(PeerGoneError, TimeoutError, OSError):
            self._child.connection.send(Frame(Kind.CLOSE), time.monotonic() + grace_s)
            self._child.wait_ended(grace_s)
        self.kill()

    def kill(self) -> None:
        self._closing = True
        if self._child.pidfd < 0:
            return
        try:
            self._child.end_group()
            self._thread.join(_JOIN_S)  # the thread reads the socket and the log, which are closed next
        finally:
            self._child.release()


def _shared_channels(job: Job) -> dict[str, SharedChannel]:
    shared: dict[str, SharedChannel] = {}
    for name, channel in job.channels.items():
        if not isinstance(channel, SharedChannel):
            raise ChannelError(
                f"channel '{name}' is a {type(channel).__name__}, which the launcher 'process' can't share",
                "make it with the launcher of the group: launcher.channel(name, capacity)",
            )
        shared[name] = channel
    return shared


class ProcessLauncher(Launcher):
    """Processes of this machine, each bound to the cores and memory of its place."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._rendezvous = RendezvousFiles()
        self._channels: list[SharedChannel] = []

    @classmethod
    def for_run(
        cls,
        places: Sequence[ProcessPlace],
        simulators: Mapping[int, int] | None,
        cluster: ClusterConfig,
        limits: Limits,
    ) -> Launcher:
        return cls(limits)

    def start(self, job: Job, on_death: Callable[[WorkerError], None]) -> Running:
        if job.place.node != 0:
            raise EmbodrlError(
                f"{job.name} is placed on machine {job.place.node}, and the launcher 'process' knows only this one",
                "use the launcher 'ray', or place everything on machine 0",
                code="ray-needed",
            )
        return _ProcessWorker(job, on_death, self._limits)

    def channel(self, name: str, capacity: int = 2) -> Channel:
        self._channels.append(SharedChannel(name, capacity))
        return self._channels[-1]

    def rendezvous(self, group: str) -> str:
        return self._rendezvous.init_method(group)

    def close(self) -> None:
        for channel in self._channels:
            channel.release()
        self._channels = []
        self._rendezvous.close()
