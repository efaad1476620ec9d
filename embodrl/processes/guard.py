"""Ends what a run leaves behind: ``python guard.py FD FAMILY PID`` waits until its socket closes, and kills the family.

A process that embodrl starts, and all that it starts in turn, inherits its place in the family tree through the
environment variable ``EMBODRL_FAMILY``: neither a session of its own nor a dead parent takes that away. The guard
belongs to the driver. It covers what the driver cannot do once it was killed: simulators that hang with the interpreter
lock held see no end-of-file, and the processes that simulators start know nothing of it. It also ends a driver that a
signal has asked to stop and in which native code holds the interpreter lock, so that no Python code runs.

A driver that a worker or simulator of another run has started inherits the variable, and founds a family of its own
below it: it ends with the outer run, and what it ends is its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

VARIABLE = "EMBODRL_FAMILY"
_ROUNDS = 5  # a process may fork while it is looked for
_SECONDS = struct.Struct("<d")
CALM = math.inf
PAUSE = math.nan
_RELEASE = -1.0
_TERM_S = 0.5


class _Root:
    """The family of this process, made at the first use; a forked copy of this process makes its own."""

    pid = 0
    family = ""
    channel: socket.socket | None = None


def adopt() -> None:
    """Belong to the family of the process that has started this one; without it, ``family`` founds one."""
    _Root.pid = os.getpid()
    _Root.family = os.environ[VARIABLE]


def family() -> str:
    """Return the family of this process; who founds one starts its guard."""
    if _Root.pid != os.getpid():
        above = os.environ.get(VARIABLE, "")
        own = f"{os.getpid()}-{secrets.token_hex(4)}"
        _Root.pid = os.getpid()
        _Root.family = f"{above}/run.{own}" if above else own
        # Our end closes with this process, however it ends.
        theirs, _Root.channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A guard that is stopped must not block the driver.
        _Root.channel.setblocking(False)
        # -I and -S: the guard needs the standard library alone, and starts faster without site-packages.
        command = [sys.executable, "-I", "-S", __file__, str(theirs.fileno()), _Root.family, str(os.getpid())]
        # The guard is in no family: the end of an outer run would kill it before it has ended its own.
        environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environ,
                start_new_session=True,
                check=False,
            )
        finally:
            theirs.close()
    return _Root.family


def watch_signals(wakeup: int, seconds: float) -> None:
    """Let the guard end this process so long after a signal if nothing tells it a time (``keep_time``) before.

    Args:
        wakeup: read end of the pipe of ``signal.set_wakeup_fd``, to which the interpreter's C handler writes even
            while native code holds the interpreter lock. The guard does not read from it.
        seconds: time from the signal to the end.
    """
    family()
    descriptors = [wakeup]
    with contextlib.suppress(OSError):  # closed: there is nowhere to say it
        os.fstat(2)
        descriptors.append(2)
    _send(seconds, descriptors)


def keep_time(seconds: float) -> None:
    """Set when the guard is to end this process whose signals it watches; a later call replaces the time.

    Args:
        seconds: time from now; ``CALM``: after the next signal; ``PAUSE``: not until a later call.
    """
    _send(seconds)


def release_signals() -> None:
    """Undo ``watch_signals``."""
    _send(_RELEASE)


def _send(seconds: float, descriptors: list[int] | None = None) -> None:
    if _Root.pid == os.getpid() and _Root.channel is not None:
        with contextlib.suppress(OSError):  # the guard was killed or is stopped
            socket.send_fds(_Root.channel, [_SECONDS.pack(seconds)], descriptors or [])


def members(family: str) -> list[int]:
    """Return the ids of the processes that belong to a family or to one below it, and of their descendants.

    Descendants count by their parents, too: a process has no readable environment while it executes another program,
    and it may clear it.
    """
    own = f"{VARIABLE}={family}".encode()
    found: set[int] = set()
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[1-9]*"):
        pid = int(process.name)
        try:
            # The name of the program, which comes before in parentheses, may hold any byte.
            parent = int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
            environ = (process / "environ").read_bytes()
        except OSError:  # ended, or of another user
            continue
        if any(variable == own or variable.startswith(own + b"/") for variable in environ.split(b"\0")):
            found.add(pid)
    found.discard(os.getpid())
    unseen = list(found)
    while unseen:
        new = set(children.get(unseen.pop(), [])) - found - {os.getpid()}
        found |= new
        unseen += new
    return sorted(found)


def end_family(family: str) -> None:
    """Kill all members of a family that there are."""
    for _ in range(_ROUNDS):
        pids = members(family)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        if not pids:
            return


class _Watch:
    """Waits for the end of the driver, or for a signal that it does not react to.

    Args:
        channel: channel to the driver.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._descriptors: list[int] = []  # the pipe of signals, and the driver's stderr if it has one
        self._limit_s = self._deadline = math.inf
        self._listens = False

    def wait(self) -> int:
        """Return 0 once the driver has ended, or the number of the signal that it has not reacted to in time."""
        while True:
            pipe = self._descriptors[:1] if self._listens and self._deadline == math.inf else []
            left_s = None if self._deadline == math.inf else max(0.0, self._deadline - time.monotonic())
            ready = select.select([self._channel, *pipe], [], [], left_s)[0]
            if self._channel in ready:
                if not self._take_message():
                    return 0
            elif ready:
                self._deadline = time.monotonic() + self._limit_s
            else:
                return signal.SIGTERM

    def say(self, text: str) -> None:
        for descriptor in self._descriptors[1:]:
            with contextlib.suppress(OSError):  # the terminal is gone
                os.write(descriptor, text.encode())

    def _take_message(self) -> bool:
        """Take a message; return False at the end of the driver."""
        message, descriptors, _, _ = socket.recv_fds(self._channel, _SECONDS.size, 2)
        if not message:
            return False
        (seconds,) = _SECONDS.unpack(message)
        if descriptors or seconds < 0:
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._descriptors = descriptors
            self._limit_s = seconds
        # Without a pipe nothing is watched, and this process is not the guard's to end.
        counts = bool(self._descriptors) and not descriptors and 0 <= seconds < math.inf
        self._deadline = time.monotonic() + seconds if counts else math.inf
        self._listens = bool(self._descriptors) and seconds >= 0
        return True


def main() -> None:
    """Guard the driver, as no child of it: it is nothing that the driver has to care for."""
    if os.fork():
        os._exit(0)
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
    # A signal to the whole session must not end the guard before the driver.
    for name in names:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    watch = _Watch(socket.socket(fileno=int(sys.argv[1])))
    driver = -1
    # A pidfd, because the number of a process that has ended may be given to another one.
    with contextlib.suppress(OSError):  # it has ended
        driver = os.pidfd_open(int(sys.argv[3]))
    number = watch.wait()
    if number and driver >= 0:
        watch.say(_UNSAVED)
        for last in (number, signal.SIGKILL):  # the first one kills where its handler was for one signal only
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(driver, last)
            if select.select([driver], [], [], _TERM_S)[0]:
                break
    end_family(sys.argv[2])


_UNSAVED = """error: stopped by a signal without saving: native code held the interpreter lock, so no Python code ran
  hint: `embodrl resume DIR` continues a run from its last checkpoint; let your native code release the lock
  code: stopped-unsaved
"""


if __name__ == "__main__":
    main()
