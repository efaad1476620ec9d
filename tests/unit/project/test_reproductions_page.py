"""docs/dev/reproductions.md: every row says what was and what is, and names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_row_is_whole_and_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "dev" / "reproductions.md").read_text(encoding="utf-8")
    paths = list((ROOT / "tests").rglob("test_*.py"))
    code = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    tests = {path.name for path in paths} | set(re.findall(r"def (test_\w+)\(", code))
    rows = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    rows = [cells for cells in rows if cells[0].strip() != "reproduction"]
    assert len(rows) >= 40
    for cells in rows:
        named = set(re.findall(r"`(test_\w+(?:\.py)?)", cells[-1]))
        assert len(cells) == 4 and all(cell.strip() for cell in cells) and named and named <= tests, cells
