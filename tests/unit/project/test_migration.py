"""The page for those who come from another system names keys that exist."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_the_tables_name_keys_that_exist() -> None:
    path = Path(__file__).resolve().parents[3] / "scripts" / "make_migration.py"
    spec = importlib.util.spec_from_file_location("make_migration", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.unknown_keys() == set()
    assert all(f"## {system}" in module.page() for system in ("RLinf", *module.OTHERS))
