"""Child side of the parent connection: start, following the parent's death, core binding, error reports."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import platform
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypedDict

from embodrl.errors import EmbodrlError, user_frames
from embodrl.processes.codec import PLAIN, Codec
from embodrl.processes.frames import Connection
from embodrl.processes.guard import adopt
from embodrl.processes.liveness import start_beating

logger = logging.getLogger("embodrl.processes")


class ErrorReport(TypedDict):
    """An error on its way to the parent; see ``describe_error``."""

    type: str
    method: str
    message: str
    hint: str
    code: str | None
    traceback: str
    user_traceback: str


_STOPS_RUNS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
_PR_SET_PDEATHSIG = 1
_MPOL_PREFERRED = 1
_SET_MEMPOLICY_SYSCALL = {"x86_64": 238, "aarch64": 237}


def begin(socket_fd: int, codec: Codec = PLAIN) -> tuple[Connection, dict[str, Any]]:
    """Prepare this child process; return the connection to its parent and the value of its START frame.

    Signals that ask a run to stop are left to the parent; SIGUSR1 writes the stack of every thread to the log.

    Raises:
        PeerGoneError: the parent has exited.
    """
    adopt()
    # Ctrl-C reaches all processes of a terminal, but the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_signals_to_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sock = socket.socket(fileno=socket_fd)
    connection = Connection(sock, codec)
    start = connection.receive().value
    _die_with_parent(sock, start["started_by_main_thread"])
    start_beating(start["heartbeat_fd"])
    sys.path[:0] = [path for path in start["sys_path"] if path not in sys.path]
    return connection, start


def leave_signals_to_parent() -> None:
    """Survive signals that ask a run to stop, when they reach each of its processes.

    systemd (``KillMode=control-group``) and schedulers signal all of them, but the parent needs this one to save, and
    ends it. An empty handler replaces SIG_IGN, which programs started by this process would inherit: they, and its
    forked children, end on these signals as usual.
    """

    def mask(how: int) -> None:
        signal.pthread_sigmask(how, _STOPS_RUNS)

    def restore() -> None:
        for number in _STOPS_RUNS:
            if signal.getsignal(number) is _ignore_signal:
                signal.signal(number, signal.SIG_DFL)
        mask(signal.SIG_UNBLOCK)

    for number in _STOPS_RUNS:
        signal.signal(number, _ignore_signal)
        signal.siginterrupt(number, False)  # native code may not handle EINTR
    # Blocked meanwhile: a signal to a child that still has this handler would be lost.
    os.register_at_fork(
        before=lambda: mask(signal.SIG_BLOCK),
        after_in_parent=lambda: mask(signal.SIG_UNBLOCK),
        after_in_child=restore,
    )


def _ignore_signal(_number: int, _frame: FrameType | None) -> None:
    return


def _die_with_parent(sock: socket.socket, started_by_main_thread: bool) -> None:
    """Make sure that this process does not outlive its parent, not even one killed by SIGKILL.

    The kernel's parent-death signal works even if this process hangs in native code, but is tied to the *thread* that
    started it, so it is used only if that was the main thread. The watcher sees the socket's end-of-file.
    """
    if started_by_main_thread:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    watch = select.poll()
    watch.register(sock, 0)
    if watch.poll(0):
        os._exit(0)  # the parent exited before the signal was armed

    def wait_for_hangup() -> None:
        watch.poll()
        os._exit(0)

    threading.Thread(target=wait_for_hangup, name="parent-watch", daemon=True).start()


def bind_to_cores(cpus: Sequence[int], numa_node: int | None, hint: str) -> None:
    """Bind this process to logical CPUs, if any, and prefer the memory of a NUMA node, if given.

    Raises:
        EmbodrlError: this process may not use those cores.
    """
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            allowed = sorted(os.sched_getaffinity(0))
            raise EmbodrlError(
                f"CPU {', '.join(map(str, cpus))} cannot be used ({error}); allowed: {allowed}",
                hint,
                code="cpu-unavailable",
            ) from error
    num_nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if numa_node is None or num_nodes < 2:
        return
    number = _SET_MEMPOLICY_SYSCALL.get(platform.machine())
    # 1024 bits: the largest number of nodes that a kernel is built for.
    mask = (ctypes.c_ulong * 16)()
    mask[numa_node // 64] = 1 << (numa_node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    # Preferred, not bound: a full node then takes memory from another one instead of ending the process.
    if number is None or libc.syscall(number, _MPOL_PREFERRED, mask, 16 * 64) != 0:
        logger.warning("memory stays unbound to NUMA node %d (errno %d)", numa_node, ctypes.get_errno())


def describe_error(error: BaseException, method: str = "") -> ErrorReport:
    """Return the value of a RAISED frame, with all that the parent needs to raise the error itself.

    Args:
        error: raised error; an EmbodrlError keeps message, hint and code, others only their text.
        method: called method.
    """
    ours = error if isinstance(error, EmbodrlError) else None
    return {
        "type": type(error).__name__,
        "method": method,
        "message": ours.message if ours else str(error),
        "hint": ours.hint if ours else "",
        "code": ours.code if ours else None,
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        "user_traceback": "".join(traceback.format_list(user_frames(error))),
    }
