"""Workers in processes of this machine: own interpreters, bound cores, messages through shared memory.

Nothing is forked or pickled: a child is told the name of its class and its arguments. A thread in the driver waits for
its answers and for its death.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO

from embodrl.errors import EmbodrlError, MessageError, WorkerDied, WorkerError
from embodrl.scheduler.channel import Channel, SharedChannel
from embodrl.scheduler.launchers.base import Job, Launcher, Outcome, Running, raised, settle
from embodrl.scheduler.launchers.host import context_message, environment
from embodrl.scheduler.wire import Kind, Message, PeerGone, receive, send, socket_pair, wait_for

MODULE = "embodrl.scheduler.launchers.process_main"
_LOG_TAIL_BYTES = 4096
_STACK_DUMP_S = 2.0
_STACK_DUMP_PAUSE_S = 0.05  # the dump comes in several writes; a pause as long as this ends it
_REAP_S = 10.0
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])


class _ProcessWorker(Running):
    def __init__(self, job: Job, on_death: Callable[[WorkerError], None]) -> None:
        self._job, self._on_death = job, on_death
        shared = _shared_channels(job)
        context = context_message(job.group, job.rank, job.world_size, job.place, job.rendezvous)
        message = {
            "class_path": job.class_path,
            "context": context,
            "numa_node": job.place.numa_node,
            "kwargs": job.kwargs,
            "channels": {name: (channel.capacity, channel.descriptors) for name, channel in shared.items()},
            "sys_path": [path for path in sys.path if path],
            "started_by_main_thread": threading.current_thread() is threading.main_thread(),
        }
        self._log = _open_log(job)
        self._log_start = self._log.seek(0, os.SEEK_END)
        self._sock, theirs = socket_pair()
        descriptors = [number for channel in shared.values() for number in channel.descriptors]
        self._popen = _spawn(theirs.fileno(), descriptors, self._log, environment(job.place, job.world_size))
        theirs.close()
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._lock, self._reaping = threading.Lock(), threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[str, Future[Outcome]]] = {0: ("__init__", Future())}
        self._started = self._pending[0][1]
        self._closing = False
        self._dead: WorkerError | None = None
        self._thread = threading.Thread(target=self._listen, name=f"embodrl-{job.name}", daemon=True)
        try:
            send(self._sock, Kind.START, 0, message)
        except PeerGone:
            pass  # the thread tells
        except MessageError:
            self.kill()
            raise
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def started(self) -> Future[Outcome]:
        return self._started

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        with self._lock:
            if self._dead is not None:
                future.set_exception(self._dead)
                return future
            number = next(self._numbers)
            self._pending[number] = (method, future)
        try:
            send(self._sock, Kind.CALL, number, (method, args, kwargs))
        except PeerGone:
            pass  # the thread tells
        except BaseException:
            self._pending.pop(number, None)
            raise
        return future

    def _listen(self) -> None:
        """Complete calls until the process has gone."""
        while True:
            try:
                message = receive(self._sock)
                if message is not None:
                    self._complete(message)
                    continue
            except (PeerGone, OSError):
                break
            if self._pidfd in wait_for({self._sock.fileno(): select.POLLIN, self._pidfd: select.POLLIN}, None):
                with contextlib.suppress(PeerGone, OSError):
                    while (message := receive(self._sock)) is not None:
                        self._complete(message)
                break
        self._mourn()

    def _complete(self, message: Message) -> None:
        with self._lock:
            _, future = self._pending.pop(message.call)
        if message.kind == Kind.OK:
            value, seconds = message.value
            settle(future, Outcome(value, seconds))
        else:
            settle(future, raised(self._job.name, self._job.rank, message.value, self._log_tail()))

    def _mourn(self) -> None:
        """Fail what is pending, and tell the group unless this end was asked for."""
        reason = self._exit_reason()
        with self._lock:
            error = WorkerDied(
                f"{self._job.name} {'was closed' if self._closing else reason}",
                "" if self._closing else "see its last output; `embodrl doctor` checks memory and drivers",
                self._job.rank,
                log_tail="" if self._closing else self._log_tail(),
            )
            self._dead = error
            pending, self._pending = list(self._pending.values()), {}
        failed_to_start = self._started.done() and self._started.exception() is not None
        if not self._closing and not failed_to_start:
            self._on_death(error)
        for _, future in pending:
            settle(future, error)

    def explain_delay(self) -> str:
        before = size = os.fstat(self._log.fileno()).st_size
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_DUMP_S
        while time.monotonic() < deadline:
            time.sleep(_STACK_DUMP_PAUSE_S)
            last, size = size, os.fstat(self._log.fileno()).st_size
            if before < size == last:
                break
        return self._log_tail()

    def close(self, grace_s: float) -> None:
        self._closing = True
        with contextlib.suppress(PeerGone, TimeoutError, OSError):
            send(self._sock, Kind.CLOSE, 0, None, time.monotonic() + grace_s)
            wait_for({self._pidfd: select.POLLIN}, time.monotonic() + grace_s)
        self.kill()

    def kill(self) -> None:
        self._closing = True
        if self._pidfd < 0:
            return
        self._end_group()
        if self._thread.ident is not None:
            self._thread.join(_REAP_S)
        self._sock.close()
        self._log.close()
        os.close(self._pidfd)
        self._pidfd = -1

    def _log_tail(self) -> str:
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        start = max(self._log_start, size - _LOG_TAIL_BYTES)
        return os.pread(self._log.fileno(), size - start, start).decode(errors="replace").strip()

    def _exit_reason(self) -> str:
        wait_for({self._pidfd: select.POLLIN}, time.monotonic() + _REAP_S)
        code = self._end_group()
        if code >= 0:
            return f"exited with code {code}"
        reason = f"was killed by {signal.Signals(-code).name}"
        return reason + " (out of memory?)" if code == -signal.SIGKILL else reason

    def _end_group(self) -> int:
        """Kill what is left of the process group and reap; its id is safe to use until the leader is reaped."""
        with self._reaping:
            if self._popen.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._popen.pid, signal.SIGKILL)
            return self._popen.wait(_REAP_S)


def _shared_channels(job: Job) -> dict[str, SharedChannel]:
    shared: dict[str, SharedChannel] = {}
    for name, channel in job.channels.items():
        if not isinstance(channel, SharedChannel):
            raise EmbodrlError(
                f"channel '{name}' is a {type(channel).__name__}, which processes of this machine can't share",
                "make it with the launcher of the group: launcher.channel(name, capacity)",
            )
        shared[name] = channel
    return shared


def _open_log(job: Job) -> BinaryIO:
    if job.log_dir is None:
        return tempfile.TemporaryFile()
    job.log_dir.mkdir(parents=True, exist_ok=True)
    return (job.log_dir / f"{job.group}_{job.rank}.log").open("ab+")


def _spawn(descriptor: int, others: list[int], log: BinaryIO, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, [_PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, str(descriptor)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(descriptor, *others),
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path, **variables},
        process_group=0,  # Ctrl-C goes to the driver alone, which decides
    )


class ProcessLauncher(Launcher):
    """Processes of this machine, each bound to the cores and the memory of its place."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="embodrl-")
        self._channels: list[SharedChannel] = []

    def start(self, job: Job, on_death: Callable[[WorkerError], None]) -> Running:
        if job.place.node != 0:
            raise EmbodrlError(
                f"{job.name} is placed on machine {job.place.node}, and the launcher 'process' knows only this one",
                "use the launcher 'ray', or place everything on machine 0",
            )
        return _ProcessWorker(job, on_death)

    def channel(self, name: str, capacity: int = 2) -> Channel:
        self._channels.append(SharedChannel(name, capacity))
        return self._channels[-1]

    def rendezvous(self, group: str) -> str:
        return f"file://{Path(self._directory.name) / group}"

    def close(self) -> None:
        for channel in self._channels:
            channel.release()
        self._channels = []
        self._directory.cleanup()
