"""Every name of embodrl that is imported anywhere, or named as module:name, exists: optional parts included.

Nothing is imported: what a module defines is read from its source, so that the extras need not be installed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TREES = ("embodrl", "tests", "scripts", "benchmarks", "examples")
TARGET = re.compile(r"embodrl(\.\w+)+:\w+(\.\w+)*")


def source_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    found = [each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()]
    return found[0] if found else None


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those in its if, try and with blocks as well."""
    for statement in body:
        yield statement
        for block in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With | ast.For):
                yield from statements(getattr(statement, block, []))
        for handler in getattr(statement, "handlers", []):
            yield from statements(handler.body)


def names_of(target: ast.expr) -> Iterator[str]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name):
            yield node.id


def defined(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            for alias in names:
                yield alias.asname or alias.name.split(".")[0]
        case ast.Assign(targets=targets):
            for target in targets:
                yield from names_of(target)
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target) | ast.For(target=target):
            yield from names_of(target)
        case _:
            pass


@cache
def names_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(name for statement in statements(tree.body) for name in defined(statement))


def exists(module: str, name: str) -> bool:
    path = source_of(module)
    if path is None:
        return False
    lazy = "__getattr__" in names_in(path)
    return lazy or name in names_in(path) or source_of(f"{module}.{name}") is not None


def references(path: Path) -> Iterator[tuple[str, str]]:
    """Yield modules and names of embodrl that a file refers to; an empty name is the module itself.

    Of tests the strings are left out, which name wrong ones on purpose.
    """
    in_strings = not path.is_relative_to(ROOT / "tests")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "embodrl":
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "embodrl")
        elif not in_strings:
            continue
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and TARGET.fullmatch(node.value):
            module, _, name = node.value.partition(":")
            yield module, name.split(".")[0]


@pytest.mark.parametrize("tree", TREES)
def test_every_name_of_embodrl_exists(tree: str) -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {module}{':' * bool(name)}{name}"
        for path in sorted((ROOT / tree).rglob("*.py"))
        for module, name in references(path)
        if not (exists(module, name) if name else source_of(module) is not None)
    ]
    assert not missing, missing
