"""The hand-written pages of the user menu (mkdocs.yml) stay short enough to be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MOST_WORDS = 55_000
MADE_BY_SCRIPTS = {"configuration.md", "errors.md", "capabilities.md", "api.md"}


def user_pages(mkdocs: str) -> list[str]:
    """Return the pages of the menu without its last section, "For developers"."""
    menu, _, developers = mkdocs.partition("\nnav:")[2].partition("\n  - For developers:")
    assert developers
    return re.findall(r": ([\w/]+\.md)$", menu, re.MULTILINE)


def words(page: str) -> int:
    return len((ROOT / "docs" / page).read_text(encoding="utf-8").split())


def test_a_reader_can_finish_the_user_menu() -> None:
    pages = user_pages((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    written = {page for page in pages if (ROOT / "docs" / page).exists()} - MADE_BY_SCRIPTS
    assert len(written) > 30
    assert sum(words(page) for page in written) <= MOST_WORDS


@pytest.mark.parametrize("page", ["failures.md", "limits.md"])
def test_what_fails_and_what_is_missing_is_one_page_each(page: str) -> None:
    assert words(page) <= 900


def test_developers_pages_do_not_count() -> None:
    menu = "x\nnav:\n  - A: a.md\n  - B:\n      - C: c.md\n  - For developers:\n      - D: dev/d.md\n"
    assert user_pages(menu) == ["a.md", "c.md"]
