"""docs/errors.md is what the sources say, and every code is unique, in kebab case and listed."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
KEBAB = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    path = ROOT / "scripts" / "make_error_reference.py"
    spec = importlib.util.spec_from_file_location("make_error_reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_error_reference.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_every_code_is_unique_and_in_kebab_case(reference: ModuleType) -> None:
    entries = reference.entries()
    assert len(entries) > 200
    assert [entry.code for entry in entries if not KEBAB.fullmatch(entry.code)] == []
    counts = Counter(entry.code for entry in entries)
    twice = [(entry.code, entry.source) for entry in entries if counts[entry.code] > 1]
    assert twice == [], "a code belongs to one class, one rule, or raise sites of one kind"


def test_every_class_has_a_cure_and_every_rule_a_cause(reference: ModuleType) -> None:
    assert [entry.code for entry in reference.class_entries() if not entry.causes[0] or not entry.cures[0]] == []
    assert [entry.code for entry in reference.rule_entries() if not entry.causes[0]] == []


def test_every_class_of_errors_is_listed(reference: ModuleType) -> None:
    listed = {entry.source for entry in reference.class_entries()}
    derived: set[str] = set()
    for path in (ROOT / "embodrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and {getattr(base, "id", "") for base in node.bases} & listed:
                derived.add(node.name)
    assert derived <= listed, "errors are defined in embodrl/errors.py"


def test_every_problem_of_a_configuration_or_pipeline_has_a_code_of_its_own() -> None:
    least = {"ConfigProblem": 7, "PipelineProblem": 4}
    without: list[str] = []
    for path in (ROOT / "embodrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in least:
                given = any(word.arg == "code" for word in node.keywords)
                if not given and len(node.args) < least[node.func.id]:  # pyright: ignore[reportAttributeAccessIssue]
                    without.append(f"{path}:{node.lineno}")
    assert without == []


def test_codes_that_tests_and_product_use_are_listed(reference: ModuleType) -> None:
    page = reference.page()
    for code in ("config-unknown-key", "preset-unknown", "pipeline-cycle", "run-exists", "policy-not-found", "env"):
        assert f"| `{code}` |" in page
