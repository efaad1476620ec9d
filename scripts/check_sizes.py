"""Refuse files that have outgrown a few screens; what a function may hold is limited by ruff's C901 (complexity).

What is longer for a good reason is listed in ``REASONS`` with that reason.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIRECTORIES = ("embodrl", "scripts", "benchmarks", "examples", "tests")
MAX_FILE_LINES = 600

# path -> why it may be longer.
REASONS: dict[str, str] = {}


def problems_of(path: str, source: str, reasons: dict[str, str]) -> list[str]:
    """Return what is too long in a file, without what has a reason."""
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES and path not in reasons:
        return [f"{path}: {num_lines} lines, at most {MAX_FILE_LINES}"]
    return []


def main() -> int:
    """Check every Python file."""
    problems: list[str] = []
    for directory in DIRECTORIES:
        for path in sorted((ROOT / directory).rglob("*.py")):
            problems += problems_of(str(path.relative_to(ROOT)), path.read_text(), REASONS)
    print("\n".join(problems) or "no file is too long")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
