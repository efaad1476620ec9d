"""docs/dev/faults.md: every finding has a row, every row has what was, what is, and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FINDINGS = [f"F{number}" for number in range(1, 18)]
RANKS = [str(number) for number in range(1, 15)]


def rows(page: str) -> list[list[str]]:
    """Return the cells of the rows that name a fault and its test."""
    found = []
    for table in re.findall(r"(?ms)^\| [Ff]ault \|.*?(?=\n\n|\Z)", page):
        for line in table.splitlines()[2:]:
            found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def missing_findings(table: list[list[str]]) -> list[str]:
    """Return the findings and ranks of the audit that no row begins with."""
    labels = " ".join(cells[0] for cells in table)
    ranked = set(re.findall(r"[Rr]anking (\d+)", labels))
    return [name for name in FINDINGS if not re.search(rf"\b{name}\b", labels)] + [
        f"ranking {number}" for number in RANKS if number not in ranked
    ]


def incomplete(table: list[list[str]], tests: set[str]) -> list[str]:
    """Return rows that lack a cell, or that name no test, or one that does not exist."""
    wrong = []
    for cells in table:
        named = set(re.findall(r"`(?:[\w/.]+::)?(test_\w+)`", cells[-1]))
        modules = set(re.findall(r"`(?:[\w/]+/)?(test_\w+\.py)`", cells[-1]))
        if len(cells) != 4 or not all(cells) or not (named | modules) or (named | modules) - tests:
            wrong.append(cells[0])
    return wrong


@pytest.fixture(scope="module")
def table() -> list[list[str]]:
    return rows((ROOT / "docs" / "dev" / "faults.md").read_text(encoding="utf-8"))


def test_every_finding_has_a_row(table: list[list[str]]) -> None:
    assert len(table) >= 100
    assert not missing_findings(table)


def test_every_row_names_tests_that_exist(table: list[list[str]]) -> None:
    paths = list((ROOT / "tests").rglob("test_*.py"))
    code = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    assert not incomplete(table, {path.name for path in paths} | set(re.findall(r"def (test_\w+)\(", code)))


def test_gaps_are_found() -> None:
    head = "| Fault | Before | Now | Test |\n|---|---|---|---|\n"
    page = f"{head}| F1, ranking 2: a | b | c | `test_a` |\n| d | e | f | same |\n\ntext\n"
    table = rows(page)
    assert [cells[0] for cells in table] == ["F1, ranking 2: a", "d"]
    assert incomplete(table, {"test_a"}) == ["d"] and incomplete(table, set()) == ["F1, ranking 2: a", "d"]
    missing = missing_findings(table)
    assert len(missing) == 16 + 13 and "F1" not in missing and "ranking 2" not in missing
