"""The page of capabilities names tests that exist, and says what the checks of its commands say."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def capabilities(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = ROOT / "scripts" / "make_capabilities.py"
    spec = importlib.util.spec_from_file_location("make_capabilities", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_the_tests_that_it_names_exist(capabilities: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert capabilities.missing_tests() == []
    row = replace(capabilities.SECTIONS["Many runs"][0], tests=("unit/project/test_docs.py::test_gone",))
    monkeypatch.setattr(capabilities, "SECTIONS", {"Many runs": [row]})
    assert capabilities.missing_tests() == ["tests/unit/project/test_docs.py::test_gone"]


def test_the_page_has_what_the_checks_say(capabilities: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    row = capabilities.SECTIONS["Many runs"][0]
    refused = replace(row, command="train runner.seeds=3")
    monkeypatch.setattr(capabilities, "SECTIONS", {"Many runs": [row, refused]})
    page = capabilities.page()
    assert "| accepted |" in page and "| refused: `config-unknown-key` |" in page


def test_rows_of_the_audit_are_counted_before_and_now(capabilities: ModuleType) -> None:
    names = {row.name for rows in capabilities.SECTIONS.values() for row in rows}
    assert capabilities.BEFORE.keys() <= names
    states = {"SGLang": "missing", "VAPO": "works", "Sharded training": "partly", "Sweeps": "works"}
    lines = capabilities.change(states).splitlines()
    assert lines[-2:] == ["| 28 November 2026 | 0 | 1 | 2 |", "| now | 1 | 1 | 1 |"]


def test_every_capability_has_something_to_show_or_says_what_is_missing(capabilities: ModuleType) -> None:
    for rows in capabilities.SECTIONS.values():
        for row in rows:
            assert row.tests or row.remains, row.name
            assert row.tests or capabilities.outcome(row.command).startswith("refused"), row.name
