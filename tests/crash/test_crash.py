"""A part of `make crash-test`: power cuts in a training run, and damaged files; evenly spread over all cases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash import Harness, failures, saved_after, scratch
from damage import DAMAGED, changes
from recorder import Op, missing_tool
from runs import Outcome
from scenarios import SCENARIOS, verdict

STATES = 6
DAMAGES = 4


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with scratch() as place:
        yield place


@pytest.fixture(scope="module")
def harness(place: Path) -> Harness:
    return Harness(place, jobs=2, sample=STATES)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_tool()), reason=missing_tool())
@pytest.mark.parametrize(
    "name", [name if name == "train" else pytest.param(name, marks=pytest.mark.long) for name in SCENARIOS]
)
def test_a_power_cut_costs_nothing_that_was_saved(harness: Harness, name: str) -> None:
    harness.sample = STATES
    series = harness.power_cuts(SCENARIOS[name])
    assert not failures([series])
    assert len(series.trials) == STATES < series.found or name == "collect"
    assert series.count["identical"] >= STATES // 2 or name not in ("train", "resume")


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_without_effect_or_named(harness: Harness, name: str) -> None:
    harness.sample = DAMAGES
    assert not failures([harness.damages(name)])


@pytest.mark.long
@pytest.mark.skipif(bool(missing_tool()), reason=missing_tool())
def test_a_command_that_syncs_nothing_is_found_out(place: Path) -> None:
    series = Harness(place / "careless", sample=60, careless=True).power_cuts(SCENARIOS["train"])
    assert any("a saved checkpoint is lost" in line for line in failures([series]))


def test_a_checkpoint_counts_as_saved_when_other_work_follows() -> None:
    ops = [
        Op("create", "checkpoints/.staging_step_1/manifest.json"),
        Op("rename", "checkpoints/.staging_step_1", "checkpoints/step_1"),
        Op("sync", "checkpoints"),
        Op("write", "metrics.jsonl", data=b"{}"),
    ]
    assert saved_after(ops, {}) == 3 and saved_after(ops[:3], {}) == math.inf
    assert saved_after(ops, {"checkpoints/step_7": None}) == 0


def test_verdicts() -> None:
    reference = {"metrics.jsonl": [{"iteration": 1}, {"iteration": 2}], "policy": "abc"}
    names = ["state.json"]

    def kind(code: int, stderr: str, result: dict[str, object] | None) -> str:
        return verdict(Outcome(code, "", stderr), result, reference, names).kind

    assert kind(0, "", reference) == "identical"
    assert kind(0, "", reference | {"policy": "abd"}) == "FAILED"
    assert kind(0, "state.json was damaged", reference | {"policy": "abd"}) == "FAILED"
    assert kind(0, "state.json was damaged", reference | {"metrics.jsonl": [{"iteration": 2}]}) == "noted"
    assert kind(0, "", reference | {"metrics.jsonl": [{"iteration": 2}]}) == "FAILED"
    assert kind(0, "state.json", reference | {"metrics.jsonl": [{"iteration": 3}]}) == "FAILED"
    assert kind(0, "Traceback (most recent call last):\nKeyError", reference) == "FAILED"
    assert kind(1, "error: state.json is damaged", None) == "refused"
    assert kind(1, "error: something is damaged", None) == "FAILED"
    assert kind(-9, "error: state.json", None) == "FAILED"


def test_every_value_of_a_json_file_is_changed_once() -> None:
    content = b'{"a": 1, "b": [true, "text"], "c": {"d": null, "e": -1.5}}\n'
    changed = {what.partition(" at byte")[0] for what, _ in changes("x.json", content) if " at byte" in what}
    assert changed == {"1", "true", '"text"', "null", "-1.5"}
    assert all(new != content for _, new in changes("x.json", content))
