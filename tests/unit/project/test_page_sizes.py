"""What is written by hand can be read by one person: a limit on the words of all tracked pages, and on README.md."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MOST_WORDS = 60_000
MOST_WORDS_OF_README = 1_500
MADE_BY_SCRIPTS = {f"docs/{name}.md" for name in ("configuration", "errors", "capabilities", "migration")}
WIDEST_COMMAND = 84
"""Characters of a code block that a window of 1300 pixels shows."""
BLOCK = re.compile(r"^ *```(?:bash|sh)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")


def pages() -> list[Path]:
    """Return the tracked pages that people write."""
    command = ["git", "ls-files", "-z", "README.md", "CHANGELOG.md", "docs/*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = set(filter(None, listed.split("\0"))) - MADE_BY_SCRIPTS
    return [path for name in sorted(names) if (path := ROOT / name).is_file()]


def words(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").split())


def too_wide(text: str) -> list[str]:
    """Return the lines of shell commands that are too wide and could be wrapped."""
    lines = [line.strip() for block in BLOCK.findall(text) for line in block.splitlines()]
    return [line for line in lines if len(line) > WIDEST_COMMAND and len(WORD.findall(line.rstrip("\\ "))) > 2]


def test_a_reader_can_finish_all_pages() -> None:
    counted = {page: words(page) for page in pages()}
    assert len(counted) > 30
    assert sum(counted.values()) <= MOST_WORDS
    assert counted[ROOT / "README.md"] <= MOST_WORDS_OF_README


def test_commands_are_not_cut_by_the_window() -> None:
    shown = [page for page in pages() if "dev" not in page.parts and page.name != "CHANGELOG.md"]
    assert not [line for page in shown for line in too_wide(page.read_text(encoding="utf-8"))]
    long = "embodrl train " + "a.b=1 " * 20
    assert too_wide(f"```bash\n{long}  # why\nembodrl list\n```\n") == [f"{long}  # why"]
