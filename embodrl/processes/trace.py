"""Time spans of all processes of a run, for a timeline; nothing is recorded unless a directory is named.

Each process appends Chrome trace events to its own file, one JSON object per line.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from embodrl.fields import open_descriptor

VARIABLE = "EMBODRL_TRACE"
"""Environment variable: directory of the trace files."""
NAME_VARIABLE = "EMBODRL_TRACE_NAME"


def record(name: str, start_s: float, end_s: float) -> None:
    """Record a span between two times of ``time.perf_counter``, whose zero is the same in all processes."""
    if VARIABLE in os.environ:
        event = {"name": name, "ph": "X", "ts": 1e6 * start_s, "dur": 1e6 * (end_s - start_s)}
        _write(event | {"pid": os.getpid(), "tid": threading.get_native_id()})


@contextmanager
def span(name: str) -> Iterator[None]:
    """Record the block as a span."""
    start_s = time.perf_counter()
    try:
        yield
    finally:
        record(name, start_s, time.perf_counter())


def naming(name: str) -> Mapping[str, str]:
    """Return the environment variables that name a child process in the timeline."""
    return {NAME_VARIABLE: name} if VARIABLE in os.environ else {}


def _write(event: Mapping[str, object]) -> None:
    # One write per line keeps lines of several threads whole in a file open for appending.
    os.write(_file(os.getpid()), (json.dumps(event) + "\n").encode())


# By process id, so that a forked process opens its own file.
@lru_cache(maxsize=1)
def _file(pid: int) -> int:
    path = Path(os.environ[VARIABLE]) / f"{pid}.jsonl"
    descriptor = open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    name = {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": os.environ.get(NAME_VARIABLE, "main")}}
    os.write(descriptor, (json.dumps(name) + "\n").encode())
    return descriptor
