"""Every row of docs/capabilities.md has tests, or says what is missing; `make lint` compares the page."""

from __future__ import annotations

import importlib.util
import sys
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


def test_every_capability_has_something_to_show_or_says_what_is_missing(capabilities: ModuleType) -> None:
    for rows in capabilities.SECTIONS.values():
        for row in rows:
            assert row.tests or row.remains, row.name
            assert row.tests or capabilities.outcome(row.command).startswith("refused"), row.name
