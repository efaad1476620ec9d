"""docs/migration.md is what its tables say, and names keys that exist."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


def test_the_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).resolve().parents[3] / "scripts" / "make_migration.py"
    spec = importlib.util.spec_from_file_location("make_migration", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["make_migration.py", "--check"])
    assert module.main() == 0, "run: python scripts/make_migration.py"
