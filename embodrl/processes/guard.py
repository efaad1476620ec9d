"""Kills a run's leftovers: ``python guard.py FD FAMILY PID`` waits until its socket closes, then kills the family.

Every process that embodrl starts, and its descendants, inherits its place in the family tree through the environment
variable ``EMBODRL_FAMILY``, which survives own sessions and dead parents. The guard belongs to the driver. It covers
what a killed driver can't do: simulators that hang with the interpreter lock held see no end-of-file, and the processes
that simulators start know nothing of it. It also ends a driver that was asked to stop by a signal while native code
holds the interpreter lock, so that no Python code runs.
A driver started by a worker or simulator of another run inherits the variable, and founds its own family below it: it
ends with the outer run, and only ends its own family.
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
_ROUNDS = 5  # a process may fork during the search
_SECONDS = struct.Struct("<d")
CALM = math.inf
PAUSE = math.nan
_RELEASE = -1.0
_TERM_S = 0.5


class _Root:
    """The family of this process, created on first use; a forked copy of this process creates its own."""

    pid = 0
    family = ""
    channel: socket.socket | None = None


def adopt() -> None:
    """Join the family of this process's starter; without this call, ``family`` founds a new one."""
    _Root.pid = os.getpid()
    _Root.family = os.environ[VARIABLE]


def family() -> str:
    """Return the family of this process; founding one starts its guard."""
    if _Root.pid != os.getpid():
        above = os.environ.get(VARIABLE, "")
        own = f"{os.getpid()}-{secrets.token_hex(4)}"
        _Root.pid = os.getpid()
        _Root.family = f"{above}/run.{own}" if above else own
        # Our end closes with this process, however it ends.
        theirs, _Root.channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A stopped guard must not block the driver.
        _Root.channel.setblocking(False)
        # -I and -S: the guard needs only the standard library, and starts faster without site-packages.
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
    """Let the guard end this process a given time after a signal unless ``keep_time`` sets another time first.

    Args:
        wakeup: read end of the pipe of ``signal.set_wakeup_fd``, to which the interpreter's C handler writes even while
            native code holds the interpreter lock. The guard does not read from it.
        seconds: time from the signal to the end.
    """
    family()
    descriptors = [wakeup]
    with contextlib.suppress(OSError):  # closed: there is nowhere to report it
        os.fstat(2)
        descriptors.append(2)
    _send(seconds, descriptors)


def keep_time(seconds: float) -> None:
    """Set when the guard ends this process, whose signals it watches; a later call replaces the time.

    Args:
        seconds: time from now; ``CALM``: after the next signal; ``PAUSE``: not until a later call.
    """
    _send(seconds)


def release_signals() -> None:
    """Undo ``watch_signals``."""
    _send(_RELEASE)


def _send(seconds: float, descriptors: list[int] | None = None) -> None:
    if _Root.pid == os.getpid() and _Root.channel is not None:
        with contextlib.suppress(OSError):  # the guard was killed or stopped
            socket.send_fds(_Root.channel, [_SECONDS.pack(seconds)], descriptors or [])


def members(family: str) -> list[int]:
    """Return the ids of the processes that belong to a family or a nested one, and of their descendants.

    Descendants also count by their parents: a process has no readable environment during exec, and may clear it.
    """
    own = f"{VARIABLE}={family}".encode()
    found: set[int] = set()
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[1-9]*"):
        pid = int(process.name)
        try:
            # The program name, in parentheses before this, may contain any byte.
            parent = int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
            environ = (process / "environ").read_bytes()
        except OSError:  # ended, or another user's
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
    """Kill all members of a family."""
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
    """Waits for the end of the driver, or for a signal that the driver does not react to."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._descriptors: list[int] = []  # the pipe of signals, and the driver's stderr, if any
        self._limit_s = self._deadline = math.inf
        self._listens = False

    def wait(self) -> int:
        """Return 0 once the driver has ended, or the number of a signal that it did not react to in time."""
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
            with contextlib.suppress(OSError):  # the terminal is closed
                os.write(descriptor, text.encode())

    def _take_message(self) -> bool:
        """Handle a message; return False at the end of the driver."""
        message, descriptors, _, _ = socket.recv_fds(self._channel, _SECONDS.size, 2)
        if not message:
            return False
        (seconds,) = _SECONDS.unpack(message)
        if descriptors or seconds < 0:
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._descriptors = descriptors
            self._limit_s = seconds
        # Without a pipe nothing is watched, and the guard must not end this process.
        counts = bool(self._descriptors) and not descriptors and 0 <= seconds < math.inf
        self._deadline = time.monotonic() + seconds if counts else math.inf
        self._listens = bool(self._descriptors) and seconds >= 0
        return True


def main() -> None:
    """Guard the driver, detached from it, so that the driver need not reap it."""
    if os.fork():
        os._exit(0)
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
    # A signal to the whole session must not end the guard before the driver.
    for name in names:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    watch = _Watch(socket.socket(fileno=int(sys.argv[1])))
    driver = -1
    # A pidfd, because the id of an ended process may be reused.
    with contextlib.suppress(OSError):  # already ended
        driver = os.pidfd_open(int(sys.argv[3]))
    number = watch.wait()
    if number and driver >= 0:
        watch.say(_UNSAVED)
        for last in (number, signal.SIGKILL):  # the first one kills if its handler was for one signal only
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
