"""Watches processes of this machine for somebody on another one."""

from __future__ import annotations

import contextlib
import os
import signal

from embodrl.processes.liveness import Limits, Liveness, is_stopped, stop_requested


class Watcher:
    """Knows of processes that beat whether they hang; see ``liveness``.

    Args:
        limits: when one counts as hung.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: dict[int, Liveness] = {}

    def look(self, pid: int, memory_fd: int, busy: bool, hurried: bool) -> str:
        """Return why a process counts as hung; "" while it does not. To be called about once per second.

        Args:
            pid: of the process.
            memory_fd: its own descriptor of the memory in which it beats.
            busy: it owes an answer.
            hurried: the run is to end soon.
        """
        if hurried:
            stop_requested.set()
        if pid not in self._known:
            try:
                heartbeat = os.open(f"/proc/{pid}/fd/{memory_fd}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # it has ended
                return ""
            self._known[pid] = Liveness(pid, heartbeat, self._limits)
        return self._known[pid].look(busy)

    def dump_stack(self, pid: int) -> None:
        """Let a process that hangs write its stack to its log."""
        if not is_stopped(pid):  # a stopped process handles no signal but SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    def end(self, pid: int) -> None:
        """Kill a process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
