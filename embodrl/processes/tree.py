"""Processor time and memory of this process and its descendants, by component of a run."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import NamedTuple

from embodrl.processes.liveness import descendants, stat_fields
from embodrl.processes.memory import process_name
from embodrl.processes.traffic import kind_of

MAIN = "main"
COMPONENTS = {"env": "env", "rollout": "rollout", "actor": "actor", "evaluation": "eval"}
"""Kinds of processes, and what metrics call them."""
SEARCH_S = 30.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class _Stat(NamedTuple):
    """``start`` tells a process from a later one with the same id."""

    start: int
    cpu_s: float
    resident_bytes: int


@dataclass
class Use:
    """What the processes of a component used: processor seconds since the last look, and memory now."""

    cpu_s: float = 0.0
    resident_bytes: int = 0


class ProcessTree:
    """Looks at this process and its descendants on this machine.

    Searching all processes of the machine for descendants takes longer than looking at those that are known, so new
    ones are searched every ``search_s`` seconds, and when a known one has ended; their processor time so far counts
    then. What a process used after the last look before its end is not counted.
    """

    def __init__(self, search_s: float = SEARCH_S) -> None:
        self._search_s = search_s
        self._components: dict[tuple[int, int], str] = {}
        self._before: dict[tuple[int, int], float] = {}
        self._pids: list[int] = []
        self._searched_s = 0.0
        self._search()
        self.look()

    def look(self) -> dict[str, Use]:
        """Return the use of each component that has a process; ``main`` is this process and its helpers."""
        found = self._read()
        if len(found) < len(self._pids) or time.monotonic() - self._searched_s >= self._search_s:
            self._search()
            found = self._read()
        uses: dict[str, Use] = {}
        for (pid, start), stat in found.items():
            component = self._component(pid, start)
            use = uses.setdefault(component, Use())
            use.cpu_s += stat.cpu_s - self._before.get((pid, start), 0.0)
            use.resident_bytes += stat.resident_bytes
        self._before = {key: stat.cpu_s for key, stat in found.items()}
        self._components = {key: self._components[key] for key in found}
        return uses

    def _search(self) -> None:
        self._pids = [os.getpid(), *descendants(os.getpid())]
        self._searched_s = time.monotonic()

    def _read(self) -> dict[tuple[int, int], _Stat]:
        stats = {pid: _stat(pid) for pid in self._pids}
        return {(pid, stat.start): stat for pid, stat in stats.items() if stat is not None}

    def _component(self, pid: int, start: int) -> str:
        key = (pid, start)
        if key not in self._components:
            self._components[key] = MAIN if pid == os.getpid() else component_of(process_name(pid))
        return self._components[key]


def component_of(name: str) -> str:
    """Return the component of a process from its place in the family, such as ``rollout[0]/env_1``.

    A process of no component belongs to the one that started it. All below an evaluation process are ``eval``.
    """
    kinds = [kind_of(part) for part in name.split("/")]
    known = [COMPONENTS[kind] for kind in kinds if kind in COMPONENTS]
    if "eval" in known:
        return "eval"
    return known[-1] if known else MAIN


def _stat(pid: int) -> _Stat | None:
    """Return figures of a process; None if it has ended."""
    try:
        fields = stat_fields(pid)
        return _Stat(int(fields[19]), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, int(fields[21]) * _PAGE_BYTES)
    except (OSError, IndexError):
        return None
