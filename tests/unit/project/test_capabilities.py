"""The page of capabilities names tests that exist, and says what the checks of its commands say."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SYSTEMS = {"RLinf", "AReaL", "verl", "siiRL", "slime", "Prime-RL", "lerobot", "verl-vla", "Hybrid", "Card"}


@pytest.fixture
def capabilities(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = ROOT / "scripts" / "make_capabilities.py"
    spec = importlib.util.spec_from_file_location("make_capabilities", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def rows_of(capabilities: ModuleType) -> list[Any]:
    return [row for rows in capabilities.SECTIONS.values() for row in rows]


def test_the_tests_that_it_names_exist(capabilities: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert capabilities.missing_tests() == []
    row = replace(capabilities.SECTIONS["Many runs"][0], tests=("unit/project/test_docs.py::test_gone",))
    monkeypatch.setattr(capabilities, "SECTIONS", {"Many runs": [row]})
    assert capabilities.missing_tests() == ["tests/unit/project/test_docs.py::test_gone"]


def test_a_row_has_a_name_of_its_own_and_something_to_show_or_to_say(capabilities: ModuleType) -> None:
    rows = rows_of(capabilities)
    assert len(rows) > 215
    assert [name for name, number in Counter(row.name for row in rows).items() if number > 1] == []
    for row in rows:
        assert row.before in ("works", "partly", "missing", "absent"), row.name
        assert set(filter(None, row.systems.split(", "))) <= SYSTEMS, row.name
        assert row.tests or row.remains or row.untried, row.name
        assert "|" not in row.name + row.command + row.remains + row.untried, f"{row.name}: a cell ends there"


def test_the_page_has_what_the_checks_say(capabilities: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    row = capabilities.Row(
        "a", "partly", command="sweep env=toy runner.seed=1,2", tests=("unit/project/test_docs.py::x",)
    )
    refused = replace(row, name="b", command="plan train runner.seeds=3")
    said = replace(row, name="c", command="serve env=toy protocol=http model.random_weights=true", remains="why")
    nothing = capabilities.Row("d", "absent", remains="why")
    untried = replace(row, name="e", untried="such a machine")
    monkeypatch.setattr(capabilities, "SECTIONS", {"Many runs": [row, refused], "More": [said, nothing, untried]})
    cells = [line.strip("| ").split(" | ") for line in capabilities.page().splitlines() if line.startswith("| ")]
    found = {cell[0]: (cell[3].strip(), cell[6].strip()) for cell in cells if cell[0] in "abcde"}
    assert found == {
        "a": ("accepted", "works"),
        "b": ("refused: `config-unknown-key`", "missing"),
        "c": ("accepted", "partly"),
        "d": ("", "missing"),
        "e": ("accepted", "untried"),
    }


def test_rows_are_counted_before_and_now(capabilities: ModuleType) -> None:
    before = {"a": "missing", "b": "missing", "c": "partly", "d": "absent"}
    rows = [capabilities.Row(name, state) for name, state in before.items()]
    lines = capabilities.change(rows, {"a": "works", "b": "missing", "c": "partly", "d": "works"}).splitlines()
    assert lines[0].startswith("Of the 3 rows ") and lines[0].endswith("among 4:")
    assert lines[-2:] == ["| 28 November 2026 | 0 | 0 | 1 | 2 |", "| now | 1 | 0 | 1 | 1 |"]


def test_commands_are_accepted_where_tests_run_them(capabilities: ModuleType) -> None:
    """A refused command is of something missing, which no test shows: one that no longer works is found here."""
    states: dict[str, str] = {}
    for row in rows_of(capabilities):
        found = capabilities.outcome(row.command)
        states[row.name] = state = capabilities.state_of(row, found)
        assert not (found.startswith("refused") and row.tests), (row.name, found)
        assert "hub-unreachable" not in found, f"{row.name}: a page is made without a network"
        assert state == "works" or row.remains or row.untried, row.name
        assert row.before != "works" or state != "missing", row.name
    counted = capabilities.change(rows_of(capabilities), states).splitlines()[-2:]
    totals = [sum(int(cell) for cell in line.split("|")[2:6]) for line in counted]
    assert totals == [sum(row.before != "absent" for row in rows_of(capabilities))] * 2
