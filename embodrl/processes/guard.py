"""Ends what a run leaves behind: ``python guard.py FD FAMILY`` waits until its pipe closes, then kills the family.

A process that embodrl starts, and all that it starts in turn, inherits its place in the family tree through the
environment variable ``EMBODRL_FAMILY``: neither a session of its own nor a dead parent takes that away. The guard
belongs to the driver. It covers what the driver cannot do once it was killed: simulators that hang with the interpreter
lock held see no end-of-file, and the processes that simulators start know nothing of it.

A driver that a worker or simulator of another run has started inherits the variable, and founds a family of its own
below it: it ends with the outer run, and what it ends is its own.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

VARIABLE = "EMBODRL_FAMILY"
_ROUNDS = 5  # a process may fork while it is looked for


class _Root:
    """The family of this process, made at the first use; a forked copy of this process makes its own."""

    pid = 0
    family = ""
    pipe = -1


def adopt() -> None:
    """Belong to the family of the process that has started this one; without it, ``family`` founds one."""
    _Root.pid, _Root.family = os.getpid(), os.environ[VARIABLE]


def family() -> str:
    """Return the family of this process; who founds one starts its guard."""
    if _Root.pid != os.getpid():
        above = os.environ.get(VARIABLE, "")
        own = f"{os.getpid()}-{secrets.token_hex(4)}"
        _Root.pid, _Root.family = os.getpid(), f"{above}/run.{own}" if above else own
        theirs, _Root.pipe = os.pipe()  # the write end closes with this process, however it ends
        command = [sys.executable, "-I", "-S", __file__, str(theirs), _Root.family]
        environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs],
                env=environ,
                start_new_session=True,
                check=False,
            )
        finally:
            os.close(theirs)
    return _Root.family


def members(family: str) -> list[int]:
    """Return the ids of the processes that belong to a family or to one below it."""
    own = f"{VARIABLE}={family}".encode()
    found: list[int] = []
    for process in Path("/proc").glob("[1-9]*"):
        if process.name == str(os.getpid()):
            continue
        try:
            environ = (process / "environ").read_bytes()
        except OSError:  # ended, or of another user
            continue
        if any(variable == own or variable.startswith(own + b"/") for variable in environ.split(b"\0")):
            found.append(int(process.name))
    return found


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


def main() -> None:
    """Wait for the end of the driver, as no child of it: it is nothing that the driver has to care for."""
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(int(sys.argv[1]), 1)
    end_family(sys.argv[2])


if __name__ == "__main__":
    main()
