"""Memory of this process and its descendants: a warning names the growing process before memory runs out."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from embodrl.processes.guard import VARIABLE
from embodrl.processes.liveness import descendants

logger = logging.getLogger("embodrl.processes")

_LOOK_S = 5.0
_LEAST_FREE = 0.1  # fraction of the memory
_REPEAT_S = 300.0
_CGROUP = Path("/sys/fs/cgroup")


def resident_bytes(pid: int | None) -> int:
    """Return the resident memory of a process in bytes; 0 if it does not exist."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Available:
    """Free and total memory in bytes, of the control group if that is less."""

    free: int
    total: int


def available() -> Available | None:
    """Return the memory that this process may use; None if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        found = Available(values["MemAvailable"], values["MemTotal"])
    except (OSError, KeyError, IndexError, ValueError):
        return None
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        cached = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # Page cache counts as used, but the kernel reclaims this part of it first.
        free = limit - used + int(cached["inactive_file"])
        return Available(free, limit) if free < found.free else found
    except (OSError, ValueError, KeyError):  # no control group, or one without a limit
        return found


def process_name(pid: int) -> str:
    """Return embodrl's name of a process, its place in the family (``guard``), or the name of its program."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        own = next((item for item in variables if item.startswith(f"{VARIABLE}=".encode())), b"")
        if own:
            return "/".join(part.rpartition(".")[0] for part in own.decode().split("/")[1:])
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "a process"


class MemoryWatch:
    """Context manager that warns while little memory is free, and names the process that has grown most."""

    def __init__(self, measure: Callable[[], Available | None] = available, look_s: float = _LOOK_S) -> None:
        self._measure = measure
        self._look_s = look_s
        self._first: dict[int, int] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        quiet_s = 0.0
        while not self._closing.wait(self._look_s):
            warning = self.look()
            quiet_s = max(0.0, quiet_s - self._look_s)
            if warning and not quiet_s:
                logger.warning("%s", warning)
                quiet_s = _REPEAT_S

    def look(self) -> str:
        """Return a warning if little memory is left, or ""."""
        now = {pid: resident_bytes(pid) for pid in (os.getpid(), *descendants(os.getpid()))}
        self._first = {pid: self._first.get(pid) or held for pid, held in now.items()}
        memory = self._measure()
        if memory is None or memory.free >= _LEAST_FREE * memory.total:
            return ""
        grown = max(now, key=lambda pid: now[pid] - self._first[pid])
        name = "the driver" if grown == os.getpid() else process_name(grown)
        return (
            f"{memory.free / 2**30:.1f} of {memory.total / 2**30:.1f} GiB of memory are left; largest growth:"
            f" {name} (process {grown}): {self._first[grown] / 2**30:.2f} GiB at first,"
            f" {now[grown] / 2**30:.2f} GiB now"
        )
