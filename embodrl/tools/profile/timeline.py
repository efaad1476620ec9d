"""`embodrl profile`: the time spent by every process, of a run of its own or of one in progress."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodrl.config.load import LoadedConfig
from embodrl.errors import OutputError
from embodrl.fields import read_regular_file
from embodrl.processes.trace import SWITCH, recordable, switch
from embodrl.reporting.metrics_file import MAX_BYTES
from embodrl.runs.train import train
from embodrl.storage.json_file import write_text_file
from embodrl.trainer.files import TRACE_DIR, removed_if_empty
from embodrl.trainer.lock import is_locked
from embodrl.trainer.result import TrainResult

TRACE_FILE = "trace.json"
_LOOK_S = 0.2
WAITING = ("wait for simulators", "rollout")
"""Spans in which a process may be idle; nested spans count by themselves."""
Event = dict[str, Any]
Span = tuple[float, float]


@dataclass(frozen=True)
class ProcessShare:
    """Activity of a process during the measured time.

    Attributes:
        busy: fraction of the time, 0 to 1.
        seconds: total of each kind of span, longest first.
        counts: number of spans of each kind.
    """

    name: str
    busy: float
    seconds: dict[str, float]
    counts: dict[str, int]


def profile(loaded: LoadedConfig, run_dir: Path) -> TrainResult:
    """Train, recording the spans of all processes of this machine; write ``trace.json`` into the absolute ``run_dir``.

    Raises:
        EmbodrlError: as ``train``.
    """
    directory = run_dir / "trace"
    with removed_if_empty(run_dir):
        try:
            with recordable(directory, on=True):
                return train(loaded)
        finally:
            if events := read_events(directory):
                write_text_file(run_dir / TRACE_FILE, json.dumps({"traceEvents": events}))


def watch(run_dir: Path, seconds: float) -> list[ProcessShare]:
    """Record a run that another process of this machine carries out; write ``logs/trace.json`` into its directory.

    Args:
        run_dir: directory of the run.
        seconds: how long; less if the run ends. A span counts if it ends within that time.

    Raises:
        OutputError: nothing carries out the run, or none of its processes ended a span.
    """
    directory = run_dir / TRACE_DIR
    if not is_locked(run_dir) or not (directory / SWITCH).is_file():
        message = f"no process of this machine carries out {run_dir}"
        raise OutputError(message, "name the directory of a run in progress", code="profile-not-running")
    started = 1e6 * time.perf_counter()
    switch(directory, on=True)
    try:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and is_locked(run_dir):
            time.sleep(min(_LOOK_S, seconds))
    finally:
        switch(directory, on=False)
    ended = 1e6 * time.perf_counter()
    events = [e for e in read_events(directory) if e["ph"] == "M" or e["ts"] + e["dur"] >= started]
    write_text_file(run_dir / "logs" / TRACE_FILE, json.dumps({"traceEvents": events}))
    found = shares(events, (started, ended))
    if not found:
        message = f"no process of {run_dir} ended anything within {seconds:g} s"
        raise OutputError(message, "give more --seconds: an iteration's length", code="profile-short")
    return found


def read_events(directory: Path) -> list[Event]:
    """Return the events written by processes; a truncated last line is left out."""
    events: list[Event] = []
    for path in sorted(directory.glob("*.jsonl")):
        for line in read_regular_file(path, MAX_BYTES).splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
    return events


def measured_window(events: Sequence[Event], first_iteration: int = 2) -> Span:
    """Return the time from the start of an iteration to the end of the last one.

    The first iterations are left out, since caches and code are cold.

    Raises:
        OutputError: no such iteration was completed.
    """
    measured = [e for e in events if _is_iteration(e) and int(e["name"].split()[1]) >= first_iteration]
    if not measured:
        message = f"iteration {first_iteration} was not completed, and the first one is not representative"
        raise OutputError(message, "profile more iterations", code="profile-short")
    return min(e["ts"] for e in measured), max(e["ts"] + e["dur"] for e in measured)


def shares(events: Sequence[Event], window: Span) -> list[ProcessShare]:
    """Return the activity of each process within a time, in microseconds."""
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    found: list[ProcessShare] = []
    for pid, name in names.items():
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == pid and not _is_iteration(e)]
        within = [e for e in spans if e["ts"] < window[1] and e["ts"] + e["dur"] > window[0]]
        if not within:
            continue
        busy = _union([_clipped(e, window) for e in within if e["name"] not in WAITING])
        seconds: defaultdict[str, float] = defaultdict(float)
        counts: defaultdict[str, int] = defaultdict(int)
        for event in within:
            start, end = _clipped(event, window)
            seconds[event["name"]] += (end - start) / 1e6
            counts[event["name"]] += 1
        ordered = dict(sorted(seconds.items(), key=lambda pair: -pair[1]))
        found.append(ProcessShare(name, busy / (window[1] - window[0]), ordered, dict(counts)))
    return found


def _is_iteration(event: Event) -> bool:
    return event["ph"] == "X" and event["name"].startswith("iteration ")


def _clipped(event: Mapping[str, float], window: Span) -> Span:
    return max(event["ts"], window[0]), min(event["ts"] + event["dur"], window[1])


def _union(spans: Sequence[Span]) -> float:
    """Return the length of the union of spans, which may overlap across threads or be nested."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
