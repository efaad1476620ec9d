"""Detects hung processes of this machine for a driver on another one."""

from __future__ import annotations

import contextlib
import os
import signal

from embodrl.processes.liveness import Limits, Liveness, is_stopped, stop_requested


class Watcher:
    """Detects hung processes by their heartbeat; see ``liveness``."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: dict[int, Liveness] = {}

    def look(self, pid: int, memory_fd: int, busy: bool, hurried: bool) -> str:
        """Return why a process counts as hung; "" otherwise. To be called about once per second.

        Args:
            pid: process id.
            memory_fd: the process's descriptor of its heartbeat memory.
            busy: a call is pending.
            hurried: the run is to end soon.
        """
        if hurried:
            stop_requested.set()
        if pid not in self._known:
            try:
                heartbeat = os.open(f"/proc/{pid}/fd/{memory_fd}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # the process has ended
                return ""
            self._known[pid] = Liveness(pid, heartbeat, self._limits)
        return self._known[pid].look(busy)

    def dump_stack(self, pid: int) -> None:
        """Make a hung process write its stack to its log."""
        if not is_stopped(pid):  # a suspended process handles no signal but SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    def end(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
