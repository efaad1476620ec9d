"""docs/capabilities.md is what the checks of its commands say today, and names tests that exist."""

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
    monkeypatch.setattr(sys, "argv", ["make_capabilities.py", "--check"])
    return module


def test_the_page_is_up_to_date(capabilities: ModuleType) -> None:
    assert capabilities.main() == 0, "run: python scripts/make_capabilities.py"


def test_a_test_that_is_gone_and_another_outcome_are_found(
    capabilities: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = capabilities.SECTIONS["Many runs"][0]
    for changed, says in (
        (replace(row, tests=("unit/project/test_docs.py::test_gone",)), "test_gone"),
        (replace(row, command="train runner.seeds=3"), "out of date"),
    ):
        monkeypatch.setattr(capabilities, "SECTIONS", {"Many runs": [changed]})
        assert capabilities.main() == 1 and says in capsys.readouterr().out


def test_every_capability_has_something_to_show_or_says_what_is_missing(capabilities: ModuleType) -> None:
    for rows in capabilities.SECTIONS.values():
        for row in rows:
            assert row.tests or row.remains, row.name
            assert row.tests or capabilities.outcome(row.command).startswith("refused"), row.name
