"""The benchmark of ratios: what it compares, with which record, and what its exit code says."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from expect import raises_code

from embodrl.bench import ratios
from embodrl.bench.ratios import Figures, Record
from embodrl.errors import MissingDependencyError, OutputError

HERE = {"cpu": "this one", "cores": 2}


def figures(ratio: float, spread: float = 0.0) -> Figures:
    return Figures(ratio=ratio, spread=spread, embodrl_ms=1.0, plain_ms=ratio)


def record(cpu: str = "this one", **found: tuple[float, float]) -> Record:
    """A record of cases with ratio and spread."""
    cases = {
        name: Figures(ratio=ratio, spread=spread, embodrl_ms=1.0, plain_ms=ratio)
        for name, (ratio, spread) in found.items()
    }
    return Record(commit=None, date="2026-01-01", hardware={"cpu": cpu}, ratios=cases, skipped={})


def test_a_ratio_is_the_median_of_rounds_and_its_spread_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.chain([1.0, 2.0], [1.0, 4.0], [2.0, 6.0], [1.0, 8.0], [1.0, 5.0])
    monkeypatch.setattr(ratios, "_timed", lambda side: next(times))
    assert ratios.measure((lambda: None, lambda: None), rounds=5) == {
        "ratio": 4.0,
        "spread": 0.5,  # of 2, 3, 4, 5 and 8: 5 - 3 over 4
        "embodrl_ms": 1000.0,
        "plain_ms": 5000.0,
    }


def test_only_what_was_and_is_stable_can_be_worse() -> None:
    before = record(worse=(4.0, 0.05), as_before=(4.0, 0.05), shaky=(4.0, 0.05), was_shaky=(4.0, 0.2), gone=(4.0, 0.0))
    now = record(worse=(3.5, 0.05), as_before=(3.7, 0.05), shaky=(2.0, 0.2), was_shaky=(2.0, 0.05), new=(1.0, 0.0))
    assert ratios.lost(now, before) == {"worse": 0.875}


def test_the_last_record_of_the_same_processor_counts(tmp_path: Path) -> None:
    history = tmp_path / "ratios.jsonl"
    lines = [record(a=(1.0, 0.0)), record(a=(2.0, 0.0)), record(cpu="another", a=(3.0, 0.0))]
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ratios.last_record(history, HERE) == lines[1]
    assert ratios.last_record(history, {"cpu": "a third"}) is None
    history.write_text("{}\n")
    with raises_code("bench-history", OutputError):
        ratios.last_record(history, HERE)


def test_the_exit_code_says_that_something_became_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def missing() -> Iterator[ratios.Sides]:
        raise MissingDependencyError("it is not there", code="bench-needs-maniskill")
        yield  # a generator

    @contextmanager
    def known() -> Iterator[ratios.Sides]:
        yield (lambda: None, lambda: None)

    found = iter((2.0, 2.0, 1.0))
    monkeypatch.setattr(ratios, "CASES", (missing, known))
    monkeypatch.setattr(
        ratios, "measure", lambda sides: Figures(ratio=next(found), spread=0.0, embodrl_ms=1, plain_ms=1)
    )
    monkeypatch.setattr(ratios, "describe_hardware", lambda: HERE)
    history, path = tmp_path / "history.jsonl", tmp_path / "now.json"
    assert ratios.main(record=history) == 0
    assert [ratios.main(path, against=history, record=history) for _ in range(2)] == [0, 1]
    assert json.loads(path.read_text())["skipped"] == {"missing": "it is not there"}
    assert len(history.read_text().splitlines()) == 3
    assert "50 %" in capsys.readouterr().out
