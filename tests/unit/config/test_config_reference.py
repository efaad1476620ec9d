"""The reference of the configuration, which the documentation site makes, has every key."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from embodrl.config.check import schema_keys, shipped_schemas

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "make_config_reference.py"


def test_reference_has_every_key() -> None:
    spec = importlib.util.spec_from_file_location("make_config_reference", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.page()
    names = {key.rpartition(".")[2] for schema in shipped_schemas() for key in schema_keys(schema)}
    assert len(names) > 100
    assert [
        name for name in names if f"`{name}`" not in text and f".{name}`" not in text and f".{name}[i]`" not in text
    ] == []
