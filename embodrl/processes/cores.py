"""CPU binding of this process, and of the children that it starts meanwhile."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

_UNBOUND: list[set[int]] = []


@contextmanager
def bound_to(cpus: Collection[int]) -> Iterator[None]:
    """Bind this thread, and threads that it starts, to cores within the block; child processes start unbound.

    Memory follows by itself: Linux allocates it on the NUMA node of the core that first writes to it.

    Args:
        cpus: logical CPUs near the GPU; unavailable ones are skipped, and nothing is bound if none is left or binding
            is unsupported.
    """
    # Only Linux lets a process choose its cores.
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    near = before.intersection(cpus)
    if not near:
        yield
        return
    os.sched_setaffinity(0, near)
    _UNBOUND.append(before)
    try:
        yield
    finally:
        _UNBOUND.pop()
        os.sched_setaffinity(0, before)


def unbind(pid: int) -> None:
    """Let a newly started child use the cores that this process was started with."""
    # The outermost entry: the cores of the process before any nested binding.
    if _UNBOUND:
        os.sched_setaffinity(pid, _UNBOUND[0])
