"""The hand-written pages of the user menu (mkdocs.yml) stay short enough to be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MOST_WORDS = 57_000
WIDEST_COMMAND = 84
"""Characters of a code block that a window of 1300 pixels shows."""
BLOCK = re.compile(r"^ *```(?:bash|sh)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")


def user_pages(mkdocs: str) -> list[str]:
    """Return the pages of the menu without its last section, "For developers"."""
    menu, _, developers = mkdocs.partition("\nnav:")[2].partition("\n  - For developers:")
    assert developers
    return re.findall(r": ([\w/]+\.md)$", menu, re.MULTILINE)


def words(page: str) -> int:
    return len((ROOT / "docs" / page).read_text(encoding="utf-8").split())


def test_a_reader_can_finish_the_user_menu() -> None:
    pages = user_pages((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    written = {page for page in pages if (ROOT / "docs" / page).exists()} - {"api.md"}
    assert len(written) > 30
    assert sum(words(page) for page in written) <= MOST_WORDS


@pytest.mark.parametrize("page", ["failures.md", "limits.md"])
def test_what_fails_and_what_is_missing_is_one_page_each(page: str) -> None:
    assert words(page) <= 900


def too_wide(text: str) -> list[str]:
    """Return the lines of shell commands that are too wide and could be wrapped."""
    lines = [line.strip() for block in BLOCK.findall(text) for line in block.splitlines()]
    return [line for line in lines if len(line) > WIDEST_COMMAND and len(WORD.findall(line.rstrip("\\ "))) > 2]


def test_commands_are_not_cut_by_the_window() -> None:
    pages = user_pages((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    files = [path for page in pages if (path := ROOT / "docs" / page).exists()]
    assert not [line for path in [ROOT / "README.md", *files] for line in too_wide(path.read_text(encoding="utf-8"))]
    long = "embodrl train " + "a.b=1 " * 20
    assert too_wide(f"```bash\n{long}  # why\nembodrl list\n```\n") == [f"{long}  # why"]


def test_developers_pages_do_not_count() -> None:
    menu = "x\nnav:\n  - A: a.md\n  - B:\n      - C: c.md\n  - For developers:\n      - D: dev/d.md\n"
    assert user_pages(menu) == ["a.md", "c.md"]
