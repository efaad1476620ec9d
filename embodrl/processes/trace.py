"""Time spans of all processes of a run, for a timeline; recorded while the switch in the run's trace directory is on.

Each process appends Chrome trace events to its own file, one JSON object per line.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from embodrl.fields import open_descriptor

VARIABLE = "EMBODRL_TRACE"
"""Environment variable: directory of the trace files."""
NAME_VARIABLE = "EMBODRL_TRACE_NAME"
SWITCH = "switch"
"""File in that directory; its first byte is 1 while spans are recorded."""


@contextmanager
def recordable(directory: Path, on: bool = False) -> Iterator[None]:
    """Let ``switch`` start and stop the recording of this process and those that it starts, in ``directory``.

    Earlier recordings there are deleted. Within another such block nothing changes.
    """
    if VARIABLE in os.environ:
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob("[0-9]*.jsonl"):
        left.unlink()
    switch(directory, on)
    os.environ[VARIABLE] = str(directory)
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        with suppress(OSError):  # it stays where something was recorded
            (directory / SWITCH).unlink()
            directory.rmdir()


def switch(directory: Path, on: bool) -> None:
    """Start or stop the recording; OSError if there is no such directory."""
    descriptor = open_descriptor(directory / SWITCH, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, b"1" if on else b"0", 0)
    finally:
        os.close(descriptor)


def record(name: str, start_s: float, end_s: float) -> None:
    """Record a span between two times of ``time.perf_counter``, whose zero is the same in all processes."""
    directory = os.environ.get(VARIABLE)
    if directory is not None and _is_on(directory):
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
    os.write(_file(os.getpid(), os.environ[VARIABLE]), (json.dumps(event) + "\n").encode())


def _is_on(directory: str) -> bool:
    descriptor = _switch(os.getpid(), directory)
    return descriptor is not None and os.pread(descriptor, 1, 0) == b"1"


# By process id, so that a forked process opens its own files.
@lru_cache(maxsize=1)
def _switch(pid: int, directory: str) -> int | None:
    try:
        return open_descriptor(Path(directory) / SWITCH, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # a process on another machine, which is not recorded
        return None


@lru_cache(maxsize=1)
def _file(pid: int, directory: str) -> int:
    path = Path(directory) / f"{pid}.jsonl"
    descriptor = open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    name = {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": os.environ.get(NAME_VARIABLE, "main")}}
    os.write(descriptor, (json.dumps(name) + "\n").encode())
    return descriptor
