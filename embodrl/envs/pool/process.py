"""A simulator process as its parent sees it: start, frames, death, log, kill."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from embodrl.envs.pool.channel import Channel, Frame, Kind, PeerGoneError
from embodrl.envs.pool.codec import encode
from embodrl.errors import EnvTimeout

# One simulator process is bound to one core: thread pools would only fight over it.
SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "LP_NUM_THREADS": "1",
    "SAPIEN_DISABLE_RAY_TRACING": "1",
}
_LOG_TAIL_BYTES = 4096
_STACK_DUMP_S = 2.0
_STACK_DUMP_PAUSE_S = 0.05  # the dump comes in several writes; a pause as long as this ends it
_REAP_S = 10.0


def importable_elsewhere() -> list[str]:
    """Return the entries of ``sys.path`` outside this interpreter's installation: the user's own code."""
    names = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = {Path(name).resolve() for name in [*names, *site.getsitepackages(), site.getusersitepackages()]}
    paths = [Path(entry or ".").resolve() for entry in sys.path]
    return [str(path) for path in paths if path.is_dir() and not installed & {path, *path.parents}]


def resident_bytes(pid: int | None) -> int:
    """Return how much of the memory of a process is there, in bytes; 0 if there is none, or it has gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class WorkerProcess:
    """A running simulator process with its channel and its memory file.

    Args:
        config: the BUILD message, see ``worker_main.build``.
        python: interpreter; None is this one.
        environ: environment variables on top of this process's and of ``SINGLE_THREADED``.
        log_path: file that gets what the process prints; None for an unnamed one.
    """

    def __init__(
        self, config: dict[str, Any], python: str | None, environ: Mapping[str, str], log_path: Path | None
    ) -> None:
        same_python = python is None or python == sys.executable
        message = config | {
            "sys_path": sys.path if same_python else importable_elsewhere(),
            "started_by_main_thread": threading.current_thread() is threading.main_thread(),
        }
        payload = encode(message)
        self.log_path = log_path
        self._log: BinaryIO = tempfile.TemporaryFile() if log_path is None else log_path.open("ab+")  # noqa: SIM115
        self._log_start = self._log.seek(0, os.SEEK_END)
        ours, theirs = socket.socketpair()
        self.memory_fd = os.memfd_create("embodrl-env")
        bootstrap = Path(__file__).with_name("bootstrap.py")
        # Another interpreter must not find the packages of this one.
        inherited = {k: v for k, v in os.environ.items() if same_python or k not in ("PYTHONPATH", "PYTHONHOME")}
        try:
            self._popen = subprocess.Popen(
                [python or sys.executable, str(bootstrap), str(theirs.fileno()), str(self.memory_fd)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(), self.memory_fd),
                env={**inherited, **SINGLE_THREADED, "PYTHONUNBUFFERED": "1", **environ},
                process_group=0,  # Ctrl-C goes to the parent alone, which decides
            )
        except OSError:
            ours.close()
            self._log.close()
            os.close(self.memory_fd)
            raise
        finally:
            theirs.close()
        self._pidfd = os.pidfd_open(self._popen.pid)
        self.channel = Channel(ours, self._pidfd)
        with contextlib.suppress(PeerGoneError):  # the first receive reports it, with the log
            self.channel.send(Frame(Kind.BUILD, payload=payload))

    @property
    def pid(self) -> int:
        return self._popen.pid

    def exit_reason(self) -> str:
        """Say in words how the process, which is known to be going, ended; reaps it."""
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        ended.poll(_REAP_S * 1000)
        code = self._end_group()
        if code >= 0:
            return f"exited with code {code}"
        reason = f"was killed by {signal.Signals(-code).name}"
        return reason + " (out of memory?)" if code == -signal.SIGKILL else reason

    def log_tail(self) -> str:
        """Return the end of what this process printed."""
        size = os.fstat(self._log.fileno()).st_size
        start = max(self._log_start, size - _LOG_TAIL_BYTES)
        return os.pread(self._log.fileno(), size - start, start).decode(errors="replace").strip()

    def dump_stack(self) -> None:
        """Ask a process that hangs to write its Python stack to its log."""
        before = size = os.fstat(self._log.fileno()).st_size
        self._popen.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_DUMP_S
        while time.monotonic() < deadline:
            time.sleep(_STACK_DUMP_PAUSE_S)
            last, size = size, os.fstat(self._log.fileno()).st_size
            if before < size == last:
                return

    def kill(self) -> None:
        """End the process, and what it started, at once; free everything.

        Raises:
            EnvTimeout: it did not end; everything on this side is free all the same.
        """
        try:
            self._end_group()
        finally:
            self.channel.close()
            self._log.close()
            for fd in (self.memory_fd, self._pidfd):
                if fd >= 0:
                    os.close(fd)
            self.memory_fd = self._pidfd = -1

    def wait_closed(self, grace_s: float) -> bool:
        """Wait for the process to end by itself, kill it if it does not; return whether it ended well."""
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        in_time = bool(ended.poll(grace_s * 1000))
        well = self._end_group() == 0 and in_time
        self.kill()
        return well

    def _end_group(self) -> int:
        """Kill what is left of the process group and reap; the group id is safe to use until the leader is reaped."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        try:
            return self._popen.wait(_REAP_S)
        except subprocess.TimeoutExpired as error:
            raise EnvTimeout(
                f"process {self._popen.pid} was killed and is still there {_REAP_S:.0f} s later",
                "it waits for a driver or a disk: look at `dmesg`; if the machine is only busy, try again",
            ) from error
