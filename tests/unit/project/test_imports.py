"""No two modules of embodrl import each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield what runs at import, without what only a type checker reads."""
    for statement in body:
        if isinstance(statement, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(statement.test):
                yield from statements(statement.body)
            yield from statements(statement.orelse)
        elif isinstance(statement, ast.Try):
            for part in (statement.body, *(handler.body for handler in statement.handlers), statement.orelse):
                yield from statements(part)
        elif isinstance(statement, ast.With | ast.ClassDef):
            yield from statements(statement.body)
        else:
            yield statement


def imported(source: str, known: set[str]) -> set[str]:
    """Return the modules of ``known`` that a module imports when it is imported."""
    found: set[str] = set()
    for statement in statements(ast.parse(source).body):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert not statement.level, "imports are absolute"
            module = statement.module or ""
            found |= {name if (name := f"{module}.{alias.name}") in known else module for alias in statement.names}
    return found & known


def graph_of(sources: dict[str, str]) -> dict[str, set[str]]:
    return {name: imported(source, set(sources)) - {name} for name, source in sources.items()}


def test_a_circle_is_found() -> None:
    sources = {
        "a": "from b import x",
        "b": "import c",
        "c": "if TYPE_CHECKING:\n    import a\ntry:\n    import a\nexcept ImportError:\n    pass\n",
    }
    with pytest.raises(CycleError):
        TopologicalSorter(graph_of(sources)).prepare()
    sources["c"] = sources["c"].partition("try")[0] + "def f():\n    import a\n"
    TopologicalSorter(graph_of(sources)).prepare()


def test_no_circle_among_the_modules_of_embodrl() -> None:
    sources: dict[str, str] = {}
    for path in (ROOT / "embodrl").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        sources[name] = path.read_text()
    try:
        TopologicalSorter(graph_of(sources)).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
