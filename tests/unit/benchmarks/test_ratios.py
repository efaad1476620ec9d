"""The guard against slower code: what it compares, and when it fails."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import pytest
import ratios
from expect import raises_code
from ratios import CaseFigures, RatioRecord, last_record, lost, main, measure

from embodrl.errors import OutputError


def record(**found: tuple[float, float]) -> RatioRecord:
    """A record of (ratio, spread) by case."""
    figures = {
        name: CaseFigures(ratio=ratio, spread=spread, embodrl_ms=1.0, plain_ms=ratio)
        for name, (ratio, spread) in found.items()
    }
    return RatioRecord(commit=None, date="2026-01-01", hardware={"cpu": "ours"}, ratios=figures, skipped={})


def test_only_stable_cases_are_compared() -> None:
    before = record(worse=(2.0, 0.05), same=(2.0, 0.05), shaky=(2.0, 0.2), gone=(2.0, 0.0), better=(2.0, 0.0))
    now = record(worse=(1.7, 0.1), same=(1.81, 0.1), shaky=(1.0, 0.0), better=(3.0, 0.0), new=(0.1, 0.0))
    assert lost(now, before) == {"worse": pytest.approx(0.85)}
    assert lost(record(worse=(1.0, 0.11)), before) == {}


def test_a_measurement_is_of_both_sides_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def work(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(ratios, "_processor_s", lambda: clock[0])
    found = measure((lambda: work(0.02), lambda: work(0.06)), rounds=3)
    assert found == {"ratio": 3.0, "spread": 0.0, "embodrl_ms": 20.0, "plain_ms": 60.0}


@pytest.mark.parametrize(("attempts", "code"), [([1.0, 1.0, 1.9], 0), ([1.0, 1.0, 1.0], 1), ([1.9], 0)])
def test_what_seems_to_have_lost_is_measured_again(
    attempts: list[float], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = tmp_path / "ratios.jsonl"
    history.write_text(json.dumps(record(a=(2.0, 0.0), b=(1.0, 0.0))) + "\n")
    asked: list[Collection[str] | None] = []

    def run(names: Collection[str] | None = None) -> RatioRecord:
        asked.append(names)
        return record(a=(attempts[len(asked) - 1], 0.0), **({"b": (1.0, 0.0)} if names is None else {}))

    monkeypatch.setattr(ratios, "run", run)
    assert main(against=history) == code
    assert len(asked) == len(attempts) and all("b" not in (names or ()) for names in asked)


def test_a_history_is_of_one_processor(tmp_path: Path) -> None:
    history = tmp_path / "ratios.jsonl"
    history.write_text("".join(json.dumps(record(a=(each, 0.0))) + "\n" for each in (1.0, 2.0)))
    newest = last_record(history, {"cpu": "ours"})
    assert newest is not None and newest["ratios"]["a"]["ratio"] == 2.0
    assert last_record(history, {"cpu": "another"}) is None
    history.write_text("{")
    with raises_code("bench-history", OutputError, str(history)):
        last_record(history, {"cpu": "ours"})
