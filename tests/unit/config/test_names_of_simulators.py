"""Core code of the configuration names no simulator and no model family: what is known about them is in their specs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "embodrl"
NAMES = re.compile("maniskill|toy|openvla|gaussian|mujoco|sapien|mani_skill", re.IGNORECASE)
WORDS = re.compile(rf"\b(?:{NAMES.pattern})\b", re.IGNORECASE)


ABOUT_NAMES = {"foreign.py", "rlinf.py"}
"""What users of other systems type, and the names that it has here."""

CONVENTIONS = {("model.py", "libero"), ("serve.py", "gr00t")}
"""``model.gripper``: how a checkpoint counts the gripper's opening, named after the dataset that introduced it; and a
protocol of policy servers, named after the family that it comes from, which serves every family."""


def texts(tree: ast.Module) -> list[tuple[int, str]]:
    """Return identifiers and texts of code with their lines; docstrings and descriptions explain, so they may name."""
    explained: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            explained.add(id(node.value))
        if isinstance(node, ast.keyword) and node.arg == "description":
            explained |= {id(part) for part in ast.walk(node.value)}
    found = [
        (n.lineno, n.value)
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in explained
    ]
    found += [(n.lineno, n.id) for n in ast.walk(tree) if isinstance(n, ast.Name)]
    found += [(n.lineno, n.module or "") for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    return found


def test_the_configuration_names_no_simulator_and_no_family() -> None:
    named = [
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for folder in ("config", "deployment")
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        if path.name not in ABOUT_NAMES
        for line, text in texts(ast.parse(path.read_text(encoding="utf-8")))
        if WORDS.search(text) and (path.name, text) not in CONVENTIONS
    ]
    assert named == []
