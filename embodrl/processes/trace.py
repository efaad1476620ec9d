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
from pathlib import Path

from embodrl.fields import open_descriptor

VARIABLE = "EMBODRL_TRACE"
"""Environment variable: directory of the trace files."""
NAME_VARIABLE = "EMBODRL_TRACE_NAME"
SWITCH = "switch"
"""File in that directory: the time of ``time.perf_counter`` until which spans are recorded."""
_SWITCH_BYTES = 32


@contextmanager
def recordable(directory: Path, until_s: float = 0.0) -> Iterator[None]:
    """Let ``switch`` start and stop the recording of this process and those that it starts, in ``directory``.

    Earlier recordings there are deleted. Within another such block nothing changes.
    """
    if VARIABLE in os.environ:
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    for left in (*directory.glob("[0-9]*.jsonl"), directory / SWITCH):
        left.unlink(missing_ok=True)
    (directory / SWITCH).touch()
    switch(directory, until_s)
    os.environ[VARIABLE] = str(directory)
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        with suppress(OSError):  # it stays where something was recorded
            (directory / SWITCH).unlink()
            directory.rmdir()


def switch(directory: Path, until_s: float) -> None:
    """Record until that time, by ``time.perf_counter``; OSError if there is no switch, or a link in its place."""
    descriptor = open_descriptor(directory / SWITCH, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, f"{until_s:.6f}".ljust(_SWITCH_BYTES).encode(), 0)
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


# Files are opened for each span: a descriptor that is kept could outlive its run, or be another file's by then.
def _write(event: Mapping[str, object]) -> None:
    path = Path(os.environ[VARIABLE]) / f"{os.getpid()}.jsonl"
    with suppress(OSError):  # a full disk costs the timeline, not the run
        descriptor = open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            lines = [event] if os.fstat(descriptor).st_size else [_process_name(), event]
            # One write keeps lines of several threads whole in a file open for appending.
            os.write(descriptor, "".join(json.dumps(line) + "\n" for line in lines).encode())
        finally:
            os.close(descriptor)


def _process_name() -> Mapping[str, object]:
    args = {"name": os.environ.get(NAME_VARIABLE, "main")}
    return {"name": "process_name", "ph": "M", "pid": os.getpid(), "args": args}


def _is_on(directory: str) -> bool:
    try:
        descriptor = open_descriptor(Path(directory) / SWITCH, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # a process on another machine, which is not recorded
        return False
    try:
        return time.perf_counter() < float(os.pread(descriptor, _SWITCH_BYTES, 0))
    except ValueError:
        return False
    finally:
        os.close(descriptor)
