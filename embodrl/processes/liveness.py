"""Heartbeats and hang detection of child processes.

A thread of the child increments a counter in a memory file; whatever stops all threads (SIGSTOP, native code that never
releases the interpreter lock, a frozen machine) stops the counter. A silent process is only considered hung if the
kernel confirms it: it is stopped, or uses neither processor nor disk. A process that computes while it holds the lock
gets ``stall_s``, and so does a live one without progress in a call (e.g. a collective whose peer never comes).
The parent reads the memory file with ``pread`` instead of mapping it, so a child that shrinks it can't cause a bus
error.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

_BEAT_S = 0.5
_BEAT = struct.Struct("<QQ")  # beats, and completed pieces of work
_MAX_STEP_S = 2.0  # maximum time that a look may add, since this process may have been stopped itself
_MIN_CPU = 0.03  # of one core; threads that wait for the interpreter lock use about 0.01
_MIN_IO_BYTES_PER_S = 65536
_HURRIED_S = 3.0
_STAT_BYTES = 4096
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STOPPED = "Tt"
_WAITS_FOR_DISK_OR_CORE = "DR"

stop_requested = threading.Event()
"""Set once this process is about to end: a silence of ``_HURRIED_S`` then counts as hung."""


@dataclass(frozen=True)
class Limits:
    """Time limits after which a child counts as hung, in seconds.

    Attributes:
        heartbeat_s: time without a heartbeat, while the child is stopped or uses neither processor nor disk.
        stall_s: time in a call without processor or disk use, children included; or without a heartbeat at all.
    """

    heartbeat_s: float = 20.0
    stall_s: float = 600.0


class _Work:
    completed = 0
    watched: ClassVar[weakref.WeakSet[Liveness]] = weakref.WeakSet()


def report_work() -> None:
    """Count a completed piece of work, such as a micro-batch."""
    _Work.completed += 1


def completed_work() -> int:
    """Return the number of pieces of work completed by this process and the children that it watches."""
    return _Work.completed + sum(child.completed for child in list(_Work.watched))


def start_beating(memory_fd: int) -> None:
    """Start a thread that sends heartbeats until the process ends."""

    def beat() -> None:
        for count in range(1, 1 << 62):
            os.pwrite(memory_fd, _BEAT.pack(count, _Work.completed), 0)
            time.sleep(_BEAT_S)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


@dataclass(frozen=True)
class _Use:
    """Cumulative processor and disk use of a process."""

    state: str
    cpu_s: float
    major_faults: int
    io_bytes: int

    @staticmethod
    def of(pid: int) -> _Use | None:
        try:
            fields = stat_fields(pid)
            counted = _io_bytes(pid)
        except (OSError, IndexError):
            return None
        return _Use(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, int(fields[9]), counted)

    def progressed_since(self, before: _Use, seconds: float) -> bool:
        return (
            self.cpu_s - before.cpu_s >= _MIN_CPU * seconds
            or self.major_faults > before.major_faults
            or self.io_bytes - before.io_bytes >= _MIN_IO_BYTES_PER_S * seconds
        )


def _io_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:  # another user's, or hidden
        return 0
    return sum(int(line.split()[1]) for line in lines[:2])  # rchar, wchar


def stat_fields(pid: int) -> list[str]:
    """Return the fields of a process's ``stat`` from its state (3rd) on; raises OSError if it has ended.

    Without ``open``: all processes of a machine are read so, and it would take four times as long.
    """
    descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    try:
        content = os.read(descriptor, _STAT_BYTES)
    finally:
        os.close(descriptor)
    # The name, in parentheses, may contain anything; the fields after it are numbers.
    return content.rpartition(b")")[2].decode().split()


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    children: dict[int, list[int]] = {}
    for other in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()):
        try:
            parent = int(stat_fields(other)[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(other)
    found = list(children.get(pid, ()))
    for child in found:  # grows meanwhile
        found += children.get(child, ())
    return found


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process."""
    use = _Use.of(pid)
    return use is not None and use.state in _STOPPED


class Activity:
    """Processor and disk activity of a process and its descendants."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._uses: dict[int, _Use] = {}
        self._looked = time.monotonic()

    def progressed(self) -> bool:
        """Return whether there was activity since the last call, or a process started."""
        before = self._uses
        (looked, self._looked) = (self._looked, time.monotonic())
        pids = (self._pid, *descendants(self._pid))
        self._uses = {pid: use for pid in pids if (use := _Use.of(pid)) is not None}
        seconds = self._looked - looked
        return any(pid not in before or use.progressed_since(before[pid], seconds) for pid, use in self._uses.items())


class Liveness:
    """A parent's view of a child's life signs.

    Args:
        pid: id of the child.
        memory_fd: memory file of its heartbeat; not closed here.
        limits: time limits after which the child counts as hung.

    Attributes:
        completed: pieces of work as of the last look.
    """

    def __init__(self, pid: int, memory_fd: int, limits: Limits) -> None:
        self.completed = 0
        self.pid = pid
        self.limits = limits
        self._fd = memory_fd
        self._looked = time.monotonic()
        self._beat = b""
        self._use = _Use.of(pid)
        self._family = Activity(pid)
        self._silent_s = self._idle_s = self._stalled_s = 0.0
        _Work.watched.add(self)

    def look(self, busy: bool) -> str:
        """Return why the child, ``busy`` if it owes an answer, counts as hung, or "". Call about once a second."""
        now = time.monotonic()
        elapsed = min(now - self._looked, _MAX_STEP_S)
        self._looked = now
        beat = os.pread(self._fd, _BEAT.size, 0)
        before = self._use
        self._use = use = _Use.of(self.pid)
        if use is None or before is None or elapsed <= 0:
            return ""  # already ended, which its pidfd reports
        self._silent_s = 0.0 if beat != self._beat else self._silent_s + elapsed
        if len(beat) == _BEAT.size:
            self.completed = _BEAT.unpack(beat)[1]
        self._beat = beat
        progressed = use.progressed_since(before, elapsed)
        self._idle_s = 0.0 if progressed else self._idle_s + elapsed
        stalled_before = self._stalled_s
        # A process without a call in progress may idle for any time.
        self._stalled_s = 0.0 if progressed or not busy else self._stalled_s + elapsed
        # Children are looked up only when a verdict is near: each look walks through /proc.
        if stalled_before < self.limits.stall_s / 2 <= self._stalled_s:
            self._family.progressed()  # from here on, for the verdict
        return self._verdict(use)

    def is_stopped(self) -> bool:
        """Return whether a signal or a debugger has stopped the child."""
        return is_stopped(self.pid)

    def _verdict(self, use: _Use) -> str:
        limit = min(self.limits.heartbeat_s, _HURRIED_S) if stop_requested.is_set() else self.limits.heartbeat_s
        silent = f"no heartbeat for {self._silent_s:.0f} s"
        if self._silent_s >= limit and use.state in _STOPPED:
            return f"is stopped by a signal (state {use.state}): {silent}"
        # The first idle window may have started a little after the last beat.
        if self._silent_s >= limit and self._idle_s >= limit - _MAX_STEP_S and use.state not in _WAITS_FOR_DISK_OR_CORE:
            return (
                f"hangs (state {use.state}, waits in {self._wait_channel()}): {silent}, and it uses no processor time"
            )
        if self._silent_s >= self.limits.stall_s:
            return f"hangs (state {use.state}): {silent}; native code holds the interpreter lock"
        if self._stalled_s >= self.limits.stall_s:
            stalled = self._stalled_s
            if self._family.progressed():  # e.g. a simulator that it waits for
                self._stalled_s = 0.0
                return ""
            return (
                f"makes no progress (state {use.state}, waits in {self._wait_channel()}): a call has used no processor"
                f" time for {stalled:.0f} s"
            )
        return ""

    def _wait_channel(self) -> str:
        try:
            return Path(f"/proc/{self.pid}/wchan").read_text().strip("0\n") or "user code"
        except OSError:
            return "an unknown place"
