"""A part of `make crash-test`: power cuts in a training run, and damaged files; evenly spread over all cases."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash import Harness, Trial, failures, is_lost, saved_step, scratch
from damage import DAMAGED
from disk_model import joined, states
from recorder import missing_tool, record
from runs import Outcome, environment
from scenarios import SCENARIOS, STARTS_OVER, Bench, Scenario, Verdict, verdict

STATES = 2
DAMAGES = 3


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
@pytest.mark.parametrize(
    "name", [n if n == "interrupted run" else pytest.param(n, marks=pytest.mark.long) for n in DAMAGED]
)
def test_damage_is_without_effect_or_named(harness: Harness, name: str) -> None:
    harness.sample = DAMAGES
    assert not failures([harness.damages(name)])


@pytest.mark.long
@pytest.mark.skipif(bool(missing_tool()), reason=missing_tool())
def test_a_command_that_syncs_nothing_is_found_out(place: Path) -> None:
    series = Harness(place / "careless", sample=60, careless=True).power_cuts(SCENARIOS["train"])
    assert any("a saved checkpoint is lost" in line for line in failures([series]))


SAVING = """
import sys
from pathlib import Path
from embodrl.storage import atomic

root, mutation = Path(sys.argv[1]), sys.argv[2]
(root / "checkpoints").mkdir()
atomic.sync_directory(root)
for step in (1, 2):
    staging = root / "checkpoints" / f".staging_step_{step}"
    staging.mkdir()
    atomic.write_file(staging / "manifest.json", iter([b"{}"]))
    atomic.sync_tree(staging)
    synced = atomic.sync_directory
    if mutation:
        atomic.sync_directory = lambda path: None
    atomic.publish_directory(staging, root / "checkpoints" / f"step_{step}")
    atomic.sync_directory = synced
    (root / "metrics.jsonl").open("a").write("{}")
"""


@pytest.mark.skipif(bool(missing_tool()), reason=missing_tool())
@pytest.mark.parametrize("mutation", ["", "the parent directory is not synced after the rename"])
def test_a_saved_checkpoint_that_vanishes_is_a_failure(tmp_path: Path, mutation: str) -> None:
    """The run that starts over ends as the undisturbed one, so that the result alone does not tell."""
    root = tmp_path / "root"
    root.mkdir()
    ops = record([sys.executable, "-c", SAVING, str(root), mutation], root, environment())
    operations = joined(ops)
    found = [is_lost(state.tree, saved_step(operations[: state.done], {})) for state in states(ops)]
    assert any(found) == bool(mutation)


def test_a_recovery_that_starts_over_after_a_checkpoint_was_saved_has_failed(tmp_path: Path) -> None:
    class StartsOver:
        def judge(self, *_: object) -> Verdict:
            return Verdict("identical", STARTS_OVER)

    harness = Harness.__new__(Harness)
    harness.place, harness.bench = tmp_path, StartsOver()  # type: ignore[assignment]
    whole = {"checkpoints": None, "checkpoints/step_1": None, "checkpoints/step_1/manifest.json": b"{}"}
    for tree, saved, kind in (({}, None, "identical"), ({}, 1, "FAILED"), (whole, 1, "FAILED")):
        trial = Trial("cut", tree, [], saved)
        harness._try(SCENARIOS["train"], trial, 0, "train", {})
        assert trial.verdict is not None and trial.verdict.kind == kind


def test_the_path_of_the_run_does_not_name_a_file(tmp_path: Path) -> None:
    class Refuses(Bench):
        def __init__(self) -> None: ...
        def recover(self, scenario: Scenario, directory: Path, out: Path) -> tuple[Outcome, None]:
            return Outcome(1, "", f"error: {directory} is damaged"), None

    judged = Refuses().judge(SCENARIOS["train"], tmp_path / "logs", {}, ["logs"])
    assert judged.kind == "FAILED" and "names no file" in judged.detail


def test_verdicts() -> None:
    reference = {"metrics.jsonl": [{"iteration": 1}, {"iteration": 2}], "policy": "abc"}
    names = ["state.json"]

    def kind(code: int, stderr: str, result: dict[str, object] | None) -> str:
        return verdict(Outcome(code, "", stderr), result, reference, names).kind

    assert kind(0, "", reference) == "identical"
    assert verdict(Outcome(0, "", f"DIR has no checkpoint: {STARTS_OVER}"), reference, reference, names).detail
    assert kind(0, "", reference | {"policy": "abd"}) == "FAILED"
    assert kind(0, "state.json was damaged", reference | {"policy": "abd"}) == "FAILED"
    assert kind(0, "state.json was damaged", reference | {"metrics.jsonl": [{"iteration": 2}]}) == "noted"
    assert kind(0, "", reference | {"metrics.jsonl": [{"iteration": 2}]}) == "FAILED"
    assert kind(0, "state.json", reference | {"metrics.jsonl": [{"iteration": 3}]}) == "FAILED"
    assert kind(0, "Traceback (most recent call last):\nKeyError", reference) == "FAILED"
    assert kind(1, "error: state.json is damaged", None) == "refused"
    assert kind(1, "error: something is damaged", None) == "FAILED"
    assert kind(-9, "error: state.json", None) == "FAILED"
