"""Every error code is unique, in kebab case and listed in the reference, which the documentation site makes."""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from pathlib import Path

import pytest

from embodrl.tools.explain import codes

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def entries() -> list[codes.CodeEntry]:
    return codes.entries()


@pytest.fixture(scope="module")
def nodes() -> list[tuple[str, ast.Call | ast.ClassDef]]:
    """Calls and classes of the product, with their places."""
    trees = [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted((ROOT / "embodrl").rglob("*.py"))]
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node)
        for path, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call | ast.ClassDef)
    ]


def without_code(nodes: list[tuple[str, ast.Call | ast.ClassDef]], positions: dict[str, int]) -> list[str]:
    """Return the places of calls that pass no ``code``, by the number of positional arguments that would include it."""
    calls = [(place, node) for place, node in nodes if isinstance(node, ast.Call)]
    return [
        place
        for place, call in calls
        if (name := getattr(call.func, "id", "")) in positions
        and len(call.args) < positions[name]
        and all(word.arg != "code" for word in call.keywords)
    ]


def test_every_code_is_unique_and_in_kebab_case(entries: list[codes.CodeEntry]) -> None:
    assert len(entries) > 200
    assert [entry.code for entry in entries if not codes.KEBAB.fullmatch(entry.code)] == []
    counts = Counter(entry.code for entry in entries)
    twice = [(entry.code, entry.source) for entry in entries if counts[entry.code] > 1]
    assert twice == [], "a code belongs to one class, one rule, or raise sites of one kind"


def test_every_class_has_a_cure_and_every_rule_a_cause() -> None:
    assert [entry.code for entry in codes.class_entries() if not all(entry.cases[0])] == []
    assert [entry.code for entry in codes.rule_entries() if not entry.cases[0][0]] == []


def test_every_class_of_errors_is_listed(
    nodes: list[tuple[str, ast.Call | ast.ClassDef]],
) -> None:
    listed = {entry.source for entry in codes.class_entries()}
    classes = [node for _, node in nodes if isinstance(node, ast.ClassDef)]
    derived = {node.name for node in classes if {getattr(base, "id", "") for base in node.bases} & listed}
    assert derived <= listed, "errors are defined in embodrl/errors.py"


def test_every_problem_of_a_configuration_or_pipeline_has_a_code_of_its_own(
    nodes: list[tuple[str, ast.Call | ast.ClassDef]],
) -> None:
    assert without_code(nodes, {"ConfigProblem": 7, "PipelineProblem": 4}) == []


def test_errors_of_a_general_class_have_a_code_of_their_own(
    nodes: list[tuple[str, ast.Call | ast.ClassDef]],
) -> None:
    assert without_code(nodes, {"EmbodrlError": 99, "CheckpointError": 99, "EnvError": 99}) == []


def test_the_page_has_every_code(entries: list[codes.CodeEntry], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("make_error_reference", ROOT / "scripts" / "make_error_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "entries", lambda: entries)
    page = module.page()
    assert [entry.code for entry in entries if f"| `{entry.code}` |" not in page] == []
    listed = {entry.code for entry in entries}
    # a class, a rule, what is raised, chosen by a function, printed and answered
    assert {"env", "kl-reaches-the-loss", "run-exists", "config-range", "command-unknown", "server-token"} <= listed
