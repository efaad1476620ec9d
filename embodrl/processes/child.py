"""Parent's view of a child process: start, connection, death, log, stack dump, kill."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import select
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from embodrl.errors import EmbodrlError, MessageError
from embodrl.fields import open_descriptor
from embodrl.processes.codec import PLAIN, Codec
from embodrl.processes.cores import unbind
from embodrl.processes.ending import OUT_OF_MEMORY
from embodrl.processes.frames import Connection, Frame, Kind, PeerGoneError, socket_pair, wait_for
from embodrl.processes.guard import VARIABLE, end_family, family
from embodrl.processes.liveness import Limits, Liveness, stop_requested
from embodrl.processes.trace import naming
from embodrl.processes.traffic import kind_of

LOG_TAIL_BYTES = 8192  # the last output and a dump of every thread's stack
LOG_BYTES = 8 << 20
"""Maximum size of a log; only the beginning and the end of a longer log are kept."""
_LOG_KEPT_BYTES = 1 << 20
_LOOK_S = 1.0
_NUMBERS = itertools.count()
_STACK_DUMP_S = 2.0
_HURRIED_DUMP_S = 0.3
_STACK_DUMP_PAUSE_S = 0.05  # the dump arrives in several writes; a pause of this length ends it
_REAP_S = 10.0


def module_command(module: str) -> list[str]:
    """Return the command that runs a module in this interpreter.

    -P keeps the current directory, which may be another user's run, off the module search path.
    """
    return [sys.executable, "-P", "-m", module]


def importable_in_other_python() -> list[str]:
    """Return the entries of ``sys.path`` outside this interpreter's installation, i.e. the user's own code."""
    names = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = {Path(name).resolve() for name in [*names, *site.getsitepackages(), site.getusersitepackages()]}
    paths = [Path(entry or ".").resolve() for entry in sys.path]
    return [str(path) for path in paths if path.is_dir() and not installed & {path, *path.parents}]


def _open_log(path: Path | None) -> BinaryIO:
    if path is None:
        return tempfile.TemporaryFile()
    return open(path, "ab+", opener=open_descriptor)


class ChildHungError(Exception):
    """The process is alive but does not work; the message gives the evidence."""


class ChildProcess:
    """A running child in its own process group and family (``guard``), so that its descendants end with it.

    The shutdown order is fixed: a stack dump first if the child hangs (a dead process has no stack), then SIGKILL to
    the whole group before the leader is reaped (until then its id, the group's, can't be reused), then reap, and only
    then close socket, log and pidfd, which provide the log tail and the exit reason.

    Args:
        command: interpreter and script, which calls ``serve.begin`` first; the child's socket number is appended.
        start: value of the START frame, a dictionary; ``sys_path`` and ``started_by_main_thread`` are added.
        codec: codec of the values.
        environ: environment variables on top of this process's.
        log_path: file for the output of the process; None for an unnamed one.
        pass_fds: inherited file descriptors, with the same numbers.
        stuck_error: raised if the process does not end after SIGKILL.
        name: name in the process list; see ``guard``.
        limits: time limits for hang detection.
        oom_score_adj: added to the kernel's score when memory runs out; the process with the highest score is killed
            first.

    Attributes:
        connection: connection to the child.
        pidfd: readable once the child has ended; -1 once everything is closed.

    Raises:
        OSError: the process can't be started.
        MessageError: ``start`` can't be sent.
    """

    def __init__(
        self,
        command: Sequence[str],
        start: Mapping[str, object],
        codec: Codec = PLAIN,
        environ: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        pass_fds: Sequence[int] = (),
        stuck_error: type[EmbodrlError] = EmbodrlError,
        name: str = "process",
        limits: Limits | None = None,
        oom_score_adj: int = 0,
    ) -> None:
        same_python = command[0] == sys.executable
        self._family = f"{family()}/{name.replace('/', '_')}.{next(_NUMBERS)}"
        self._looked = time.monotonic()
        self._dropped_bytes = 0
        self.log_path = log_path
        self._stuck_error = stuck_error
        self._reaping = threading.Lock()
        if log_path is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log: BinaryIO = _open_log(log_path)
        # A log file may hold output of earlier processes with this name; error messages show only this process's.
        self._log_start = self._log.seek(0, os.SEEK_END)
        flags = fcntl.fcntl(self._log, fcntl.F_GETFL)  # both sides append at the current end: see _trim_log
        fcntl.fcntl(self._log, fcntl.F_SETFL, flags | os.O_APPEND)
        ours, theirs = socket_pair()
        self._heartbeat = os.memfd_create("embodrl-heartbeat")
        # Another interpreter must not import this one's packages.
        inherited = {k: v for k, v in os.environ.items() if same_python or k not in ("PYTHONPATH", "PYTHONHOME")}
        try:
            self._popen = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(), self._heartbeat, *pass_fds),
                env={
                    **inherited,
                    # Output just before a death must reach the log.
                    "PYTHONUNBUFFERED": "1",
                    **(environ or {}),
                    VARIABLE: self._family,
                    **naming(name),
                },
                process_group=0,  # Ctrl-C reaches only the parent, which decides
            )
        except OSError:
            ours.close()
            self._log.close()
            os.close(self._heartbeat)
            raise
        finally:
            # An open copy of the child's end would prevent end-of-file.
            theirs.close()
        self.pidfd = os.pidfd_open(self._popen.pid)
        # A child inherits the cores of its parent thread, which ``cores.bound_to`` may have restricted.
        with contextlib.suppress(ProcessLookupError):  # already ended
            unbind(self._popen.pid)
        self._liveness = Liveness(self._popen.pid, self._heartbeat, limits or Limits())
        # If memory runs out, simulators are killed first, then rollout processes, and the driver last.
        with contextlib.suppress(OSError):  # already ended, or not permitted
            Path(f"/proc/{self._popen.pid}/oom_score_adj").write_text(str(oom_score_adj))
        self.connection = Connection(ours, codec, self.pidfd, kind_of(name))
        message = {
            **start,
            "sys_path": sys.path if same_python else importable_in_other_python(),
            "started_by_main_thread": threading.current_thread() is threading.main_thread(),
            "heartbeat_fd": self._heartbeat,
        }
        try:
            self.connection.send(Frame(Kind.START, value=message))
        except PeerGoneError:
            pass  # the first receive reports it, with the log
        except MessageError:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._popen.pid

    def receive(self, deadline: float | None = None, busy: Callable[[], bool] = bool) -> Frame:
        """Return the next frame; meanwhile check that the process is alive, and limit the size of its log.

        Args:
            deadline: time of ``time.monotonic()``; None waits until the process is found dead or hung.
            busy: returns whether the process owes an answer, so that it must make progress.

        Raises:
            ChildHungError: the process hangs, see ``liveness``.
            PeerGoneError, TimeoutError, MessageError: see ``Connection.receive``.
        """
        while True:
            # Runs for every simulator step; reading /proc each time would cost more than the frame.
            now = time.monotonic()
            if now - self._looked >= _LOOK_S:
                self._looked = now
                self._trim_log()
                reason = self._liveness.look(busy())
                if reason:
                    raise ChildHungError(reason)
            next_look = self._looked + _LOOK_S
            try:
                return self.connection.receive(next_look if deadline is None else min(next_look, deadline))
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise

    def _trim_log(self) -> None:
        """Cut the middle out of an oversized log; output that arrives meanwhile is appended at the end."""
        number = self._log.fileno()
        size = os.fstat(number).st_size - self._log_start
        if size <= LOG_BYTES:
            return
        head = self._log_start + _LOG_KEPT_BYTES
        tail = os.pread(number, _LOG_KEPT_BYTES, self._log_start + size - _LOG_KEPT_BYTES)
        self._dropped_bytes += size - 2 * _LOG_KEPT_BYTES
        os.ftruncate(number, head)
        note = f"\n--- embodrl dropped {self._dropped_bytes / 2**20:.0f} MiB of this log here: it grew too long ---\n"
        os.write(number, note.encode() + tail)

    def exit_reason(self) -> str:
        """Describe how an ending process ended, and reap it.

        Raises:
            EmbodrlError: ``stuck_error``, the process did not end.
        """
        # Let it end by itself first: a kill would replace its exit code by SIGKILL's.
        self.wait_ended(_REAP_S)
        code = self.end_group()
        if code == OUT_OF_MEMORY:
            return "could not allocate memory, and ended"
        if code >= 0:
            return f"exited with code {code}"
        reason = f"was killed by {signal.Signals(-code).name}"
        # This side only kills processes that have not ended by themselves, so the sender was probably the kernel's
        # out-of-memory killer.
        return reason + " (out of memory?)" if code == -signal.SIGKILL else reason

    def log_tail(self) -> str:
        """Return the end of the process's output; "" once everything is closed."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        start = max(min(self._log_start, size), size - LOG_TAIL_BYTES)
        return os.pread(self._log.fileno(), size - start, start).decode(errors="replace").strip()

    def dump_stack(self) -> None:
        """Ask a hanging process to write its Python stack to its log, and wait briefly for it.

        ``faulthandler`` answers SIGUSR1 in the C signal handler, which works even while the interpreter is blocked.
        """
        if self._liveness.is_stopped():
            return  # it handles no signal but SIGKILL
        before = size = os.fstat(self._log.fileno()).st_size
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + (_HURRIED_DUMP_S if stop_requested.is_set() else _STACK_DUMP_S)
        while time.monotonic() < deadline:
            time.sleep(_STACK_DUMP_PAUSE_S)
            last = size
            size = os.fstat(self._log.fileno()).st_size
            if before < size == last:
                return

    def wait_ended(self, grace_s: float) -> bool:
        """Wait for the process to end by itself; return whether it did. ``kill`` must still be called."""
        return bool(wait_for({self.pidfd: select.POLLIN}, time.monotonic() + grace_s))

    def kill(self) -> None:
        """Kill the process and its descendants immediately; close everything.

        Raises:
            EmbodrlError: ``stuck_error``, the process did not end; everything on this side is closed anyway.
        """
        try:
            self.end_group()
        finally:
            self.release()

    def end_group(self) -> int:
        """Kill the rest of the process group and reap the leader; return its exit code.

        Raises:
            EmbodrlError: ``stuck_error``, the process did not end.
        """
        with self._reaping:  # the thread that waits for answers and the one that closes may both get here
            if self._popen.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._popen.pid, signal.SIGKILL)
            try:
                code = self._popen.wait(_REAP_S)
                # Cleared before the search through /proc, so that a second caller does not repeat it.
                if self._family:  # processes that left the group still belong to the family
                    gone = self._family
                    self._family = ""
                    end_family(gone)
                return code
            except subprocess.TimeoutExpired as error:
                gone = self._family
                self._family = ""
                threading.Thread(target=self._reap_late, args=(gone,), name="reap", daemon=True).start()
                raise self._stuck_error(
                    f"process {self._popen.pid} was killed and still exists {_REAP_S:.0f} s later",
                    "the process waits for a driver or a disk: check `dmesg`; if the machine is only busy, try again",
                ) from error

    def _reap_late(self, family: str) -> None:
        """Wait for a killed process that a driver, disk or busy machine delays, so that it does not stay a zombie."""
        self._popen.wait()
        if family:
            end_family(family)

    def release(self) -> None:
        """Close socket, log and pidfd of the ended process."""
        self.connection.close()
        self._log.close()
        # -1 marks everything as closed, since two threads may end the same process.
        if self.pidfd >= 0:
            os.close(self.pidfd)
            os.close(self._heartbeat)
        self.pidfd = -1
