"""Refuse files and functions that have outgrown a screen or two.

The aim is 400 lines a file and 60 a function; this check fails above 450 and 80, so that a few lines more need no
ceremony.
What is bigger for a good reason is listed in ``REASONS`` with that reason.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIRECTORIES = ("embodrl", "scripts", "benchmarks", "examples", "tests")
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80

# "path" or "path:function" -> why it may be longer.
REASONS: dict[str, str] = {}


def long_functions(source: str) -> list[tuple[str, int]]:
    """Return name and length in lines of the functions that are too long."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append((node.name, length))
    return found


def problems_of(path: str, source: str, reasons: dict[str, str]) -> list[str]:
    """Return what is too long in a file, without what has a reason."""
    problems: list[str] = []
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES and path not in reasons:
        problems.append(f"{path}: {num_lines} lines, at most {MAX_FILE_LINES}")
    for name, length in long_functions(source):
        if f"{path}:{name}" not in reasons:
            problems.append(f"{path}:{name}: {length} lines, at most {MAX_FUNCTION_LINES}")
    return problems


def main() -> int:
    """Check every Python file."""
    problems: list[str] = []
    for directory in DIRECTORIES:
        for path in sorted((ROOT / directory).rglob("*.py")):
            problems += problems_of(str(path.relative_to(ROOT)), path.read_text(), REASONS)
    print("\n".join(problems) or "no file and no function is too long")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
