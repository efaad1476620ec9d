"""No modules of embodrl import each other in a circle, and a run starts without libraries that take long to import."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
START = ("embodrl.runs.train", "embodrl.models.openvla.build", "embodrl.models.openvla.policy")
SLOW = ("transformers", "tensordict", "scipy", "pandas", "torch._dynamo", "torch.distributed.checkpoint")
SLOW += ("torch.distributed.fsdp", "torch.distributed.tensor")


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


def modules_of(imports: Iterable[ast.stmt | ast.AST], known: set[str]) -> set[str]:
    """Return the modules that these statements import; names imported from others of ``known`` may be modules."""
    found: set[str] = set()
    for statement in imports:
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert not statement.level, "imports are absolute"
            module = statement.module or ""
            found |= {name if (name := f"{module}.{alias.name}") in known else module for alias in statement.names}
    return found


def imported(source: str, known: set[str]) -> set[str]:
    """Return the modules that a module imports when it is imported."""
    return modules_of(statements(ast.parse(source).body), known)


def graph_of(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return what each module imports: at import, in its functions, or for a type checker."""
    known = set(sources)
    return {name: modules_of(ast.walk(ast.parse(source)), known) & known - {name} for name, source in sources.items()}


def all_sources() -> dict[str, str]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in (ROOT / "embodrl").rglob("*.py")
    }


def test_no_circle_among_the_modules_of_embodrl() -> None:
    try:
        TopologicalSorter(graph_of(all_sources())).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_run_starts_without_slow_libraries() -> None:
    """They import torch's compiler, or all of transformers' models: 3 s in every process."""
    sources = all_sources()
    reached, new = set[str](), set(START)
    while new:
        reached |= new
        found = {name: imported(sources[name], set(sources)) for name in new}
        slow = {name: sorted(n for n in names if n.startswith(SLOW)) for name, names in found.items()}
        assert not any(slow.values()), {name: names for name, names in slow.items() if names}
        packages = {name.rpartition(".")[0] for name in new}
        new = (packages.union(*found.values()) & set(sources)) - reached


def runs_python(node: ast.AST) -> bool:
    """Return whether a list or tuple is a command of this interpreter that runs a module or a text."""
    if not isinstance(node, ast.List | ast.Tuple):
        return False
    texts = [ast.unparse(element) for element in node.elts]
    return "sys.executable" in texts and bool({"'-m'", "'-c'"} & set(texts)) and not {"'-P'", "'-I'"} & set(texts)


def test_no_process_finds_modules_in_the_current_directory() -> None:
    """It may be a run or a sweep of somebody else: -P or -I leaves it out."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "embodrl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if runs_python(node)
    ]
    assert not found, found
