"""The timeline of a run, and the shares computed from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from expect import raises_code

from embodrl.errors import OutputError
from embodrl.processes.trace import NAME_VARIABLE, VARIABLE, naming, record, recordable, span, switch
from embodrl.tools.profile.timeline import Event, measured_window, read_events, shares, watch


def event(name: str, start: float, end: float, pid: int) -> Event:
    return {"name": name, "ph": "X", "ts": 1e6 * start, "dur": 1e6 * (end - start), "pid": pid, "tid": pid}


def named(pid: int, name: str) -> Event:
    return {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}


def test_busy_is_what_the_spans_cover_together_without_waiting() -> None:
    events = [
        *(named(1, "main"), named(2, "env/0"), named(3, "idle")),
        *(event("iteration 1", 0, 10, 1), event("iteration 2", 10, 20, 1), event("iteration 3", 20, 30, 1)),
        *(event("rollout", 10, 16, 1), event("policy", 10, 12, 1), event("wait for simulators", 12, 16, 1)),
        *(event("train", 16, 20, 1), event("forward and backward", 16, 19, 1), event("train", 28, 40, 1)),
        *(event("step", 8, 11, 2), event("step", 12, 15, 2), event("step", 14, 16, 2), event("step", 50, 60, 2)),
    ]
    main, simulator = shares(events, measured_window(events))
    assert (main.name, main.busy) == ("main", pytest.approx((2 + 4 + 2) / 20))
    assert main.seconds == {"rollout": 6, "train": 6, "wait for simulators": 4, "forward and backward": 3, "policy": 2}
    assert (simulator.name, simulator.busy) == ("env/0", pytest.approx((1 + 4) / 20))
    assert simulator.counts == {"step": 3}
    with raises_code("profile-short", OutputError):
        measured_window([each for each in events if each["name"] != "iteration 2" and each["name"] != "iteration 3"])


def test_nothing_is_recorded_unless_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with span("a"):
        record("b", 0.0, 1.0)
    assert naming("env/0") == {} and list(tmp_path.iterdir()) == []


def test_every_process_writes_its_own_file_under_its_name(tmp_path: Path) -> None:
    code = "from embodrl.processes.trace import span\nwith span('work'): pass\nraise SystemExit(3)"
    switch(tmp_path, on=True)
    for name in ("one", "two"):
        environment = {VARIABLE: str(tmp_path), NAME_VARIABLE: name}
        assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 3
    (tmp_path / "9.jsonl").write_text(json.dumps(named(9, "killed")) + '\n{"name": "wo')
    events = read_events(tmp_path)
    assert sorted(e["args"]["name"] for e in events if e["ph"] == "M") == ["killed", "one", "two"]
    worked = [e for e in events if e["ph"] == "X"]
    assert [e["name"] for e in worked] == ["work", "work"] and all(e["dur"] >= 0 for e in worked)
    assert worked[0]["pid"] != worked[1]["pid"]


def test_the_switch_starts_and_stops_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    directory = tmp_path / "trace"
    with recordable(directory):
        for number, on in enumerate((False, True, False, True)):
            switch(directory, on)
            record(f"work {number}", number, number + 1)
        assert [e["name"] for e in read_events(directory) if e["ph"] == "X"] == ["work 1", "work 3"]
    with recordable(directory):
        record("work 4", 4, 5)
        assert read_events(directory) == []  # those of before are gone
    assert VARIABLE not in os.environ and list(tmp_path.iterdir()) == []


def test_a_process_on_a_machine_without_the_directory_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "elsewhere"))
    record("work", 0.0, 1.0)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_nobody_carries_out_is_not_recorded(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    with raises_code("profile-not-running", OutputError):
        watch(tmp_path, 1.0)
