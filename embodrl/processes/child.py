"""A child process as its parent sees it: start, connection, death, log, stack dump, kill."""

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

LOG_TAIL_BYTES = 8192  # the last words and a dump of every thread's stack
LOG_BYTES = 8 << 20
"""Largest size of a log; of a longer one the first and the last part are kept."""
_LOG_KEPT_BYTES = 1 << 20
_LOOK_S = 1.0
_NUMBERS = itertools.count()
_STACK_DUMP_S = 2.0
_HURRIED_DUMP_S = 0.3
_STACK_DUMP_PAUSE_S = 0.05  # the dump comes in several writes; a pause as long as this ends it
_REAP_S = 10.0


def module_command(module: str) -> list[str]:
    """Return the command that runs a module by this interpreter.

    The current directory, which may be a run of somebody else, is not searched: without -P its files would come first.
    """
    return [sys.executable, "-P", "-m", module]


def importable_in_other_python() -> list[str]:
    """Return the entries of ``sys.path`` outside this interpreter's installation: the user's own code."""
    names = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = {Path(name).resolve() for name in [*names, *site.getsitepackages(), site.getusersitepackages()]}
    paths = [Path(entry or ".").resolve() for entry in sys.path]
    return [str(path) for path in paths if path.is_dir() and not installed & {path, *path.parents}]


def _open_log(path: Path | None) -> BinaryIO:
    """Open the file that a child prints into; None stands for one without a name."""
    if path is None:
        return tempfile.TemporaryFile()
    return open(path, "ab+", opener=open_descriptor)


class ChildHungError(Exception):
    """The process lives and does not work; the text says how that shows."""


class ChildProcess:
    """A running child in a process group and a family (``guard``) of its own, so that what it starts ends with it.

    The way down is always the same: a stack dump first if it hangs (a dead process has no stack), then SIGKILL to the
    whole group while the leader is not reaped (its id, which is the group's, can't be given to another process until
    then), then reap, and only then close socket, log and pidfd, which the log tail and the exit reason are read from.

    Args:
        command: interpreter and script; the number of the child's socket is appended. It begins with ``serve.begin``.
        start: value of the START frame, a dictionary; ``sys_path`` and ``started_by_main_thread`` are added.
        codec: codec of the values.
        environ: environment variables on top of this process's.
        log_path: file that gets what the process prints; None for an unnamed one.
        pass_fds: file descriptors that it inherits, under the same numbers.
        stuck_error: raised if it does not end after SIGKILL.
        name: name in the list of processes; see ``guard``.
        limits: times after which it counts as hung.
        oom_score_adj: added to the kernel's score when memory runs out; a process with a higher score is killed first.

    Attributes:
        connection: connection to the child.
        pidfd: readable once the child has ended; -1 once everything is closed.

    Raises:
        OSError: it can't be started.
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
        # A log file may hold the output of earlier processes of that name; error messages show this one's alone.
        self._log_start = self._log.seek(0, os.SEEK_END)
        flags = fcntl.fcntl(self._log, fcntl.F_GETFL)  # both sides write at the end, wherever that is: see _trim_log
        fcntl.fcntl(self._log, fcntl.F_SETFL, flags | os.O_APPEND)
        ours, theirs = socket_pair()
        self._heartbeat = os.memfd_create("embodrl-heartbeat")
        # Another interpreter must not find the packages of this one.
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
                    # What a process printed just before it died must be in the log.
                    "PYTHONUNBUFFERED": "1",
                    **(environ or {}),
                    VARIABLE: self._family,
                    **naming(name),
                },
                process_group=0,  # Ctrl-C goes to the parent alone, which decides
            )
        except OSError:
            ours.close()
            self._log.close()
            os.close(self._heartbeat)
            raise
        finally:
            # With a copy of the child's end open here, end-of-file would never arrive.
            theirs.close()
        self.pidfd = os.pidfd_open(self._popen.pid)
        # A child inherits the cores of the thread that starts it, which ``cores.bound_to`` may have narrowed.
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            unbind(self._popen.pid)
        self._liveness = Liveness(self._popen.pid, self._heartbeat, limits or Limits())
        # If memory runs out, a simulator goes before a rollout process, and that before the driver (``oom_score_adj``).
        with contextlib.suppress(OSError):  # it has ended already, or the system does not allow it
            Path(f"/proc/{self._popen.pid}/oom_score_adj").write_text(str(oom_score_adj))
        self.connection = Connection(ours, codec, self.pidfd)
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
        """Return the next frame; meanwhile look whether the process is alive, and bound the size of its log.

        Args:
            deadline: time of ``time.monotonic()``; None waits until it is found dead or hung.
            busy: whether it owes an answer, so that it must make progress.

        Raises:
            ChildHungError: it hangs, see ``liveness``.
            PeerGoneError, TimeoutError, MessageError: see ``Connection.receive``.
        """
        while True:
            # Every step of a simulator comes through here; reading /proc each time would cost more than the frame.
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
        """Cut the middle out of a log that has become too long; what arrives meanwhile is appended behind."""
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
        """Describe how the process, which is known to be ending, ended; reaps it.

        Raises:
            EmbodrlError: ``stuck_error``, it did not end.
        """
        # Time to end by itself first: a kill would replace its own exit code by that of SIGKILL.
        self.wait_ended(_REAP_S)
        code = self.end_group()
        if code == OUT_OF_MEMORY:
            return "could not allocate memory, and ended"
        if code >= 0:
            return f"exited with code {code}"
        reason = f"was killed by {signal.Signals(-code).name}"
        # This side kills only what has not ended by itself, so the sender was probably the kernel's out-of-memory
        # killer.
        return reason + " (out of memory?)" if code == -signal.SIGKILL else reason

    def log_tail(self) -> str:
        """Return the end of what this process printed; "" once everything is closed."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        start = max(min(self._log_start, size), size - LOG_TAIL_BYTES)
        return os.pread(self._log.fileno(), size - start, start).decode(errors="replace").strip()

    def dump_stack(self) -> None:
        """Ask a process that hangs to write its Python stack to its log, and wait for it a short while.

        ``faulthandler`` answers SIGUSR1 from the C signal handler, so that it works while the interpreter is blocked.
        """
        if self._liveness.is_stopped():
            return  # it would handle no signal but SIGKILL
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
        """Wait for the process to end by itself; return whether it did. ``kill`` is still due."""
        return bool(wait_for({self.pidfd: select.POLLIN}, time.monotonic() + grace_s))

    def kill(self) -> None:
        """End the process, and what it started, at once; close everything.

        Raises:
            EmbodrlError: ``stuck_error``, it did not end; everything on this side is closed anyway.
        """
        try:
            self.end_group()
        finally:
            self.release()

    def end_group(self) -> int:
        """Kill what is left of the process group and reap the leader; return its exit code.

        Raises:
            EmbodrlError: ``stuck_error``, it did not end.
        """
        with self._reaping:  # the thread that waits for answers and the one that closes may both come here
            if self._popen.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._popen.pid, signal.SIGKILL)
            try:
                code = self._popen.wait(_REAP_S)
                # Cleared before the search through all of /proc, so that a second caller does not repeat it.
                if self._family:  # what has left the process group is still of the family
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
                    "it waits for a driver or a disk: look at `dmesg`; if the machine is only busy, try again",
                ) from error

    def _reap_late(self, family: str) -> None:
        """Wait for a killed process that a driver, a disk or a busy machine holds up: it would stay a zombie."""
        self._popen.wait()
        if family:
            end_family(family)

    def release(self) -> None:
        """Close socket, log and pidfd; the process has ended."""
        self.connection.close()
        self._log.close()
        # -1 marks everything as closed: two threads may end the same process.
        if self.pidfd >= 0:
            os.close(self.pidfd)
            os.close(self._heartbeat)
        self.pidfd = -1
