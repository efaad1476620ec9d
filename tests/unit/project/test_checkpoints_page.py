"""docs/checkpoints.md has enough rows, and every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_named_tests_exist() -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    rows = [line for line in page.partition("| checkpoint |")[2].splitlines()[2:] if line.startswith("|")]
    named = set(re.findall(r"`(test_\w+)`", page))
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(rows) >= 30 and named
    assert not {name for name in named if f"def {name}(" not in code}
