"""docs/configuration.md is what the schema, the presets and the rules say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from embodrl.config.check import schema_keys, shipped_schemas

ROOT = Path(__file__).resolve().parents[3]


def test_reference_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_config_reference.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_reference_has_every_key() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    names = {key.rpartition(".")[2] for schema in shipped_schemas() for key in schema_keys(schema)}
    assert len(names) > 100
    assert [
        name for name in names if f"`{name}`" not in text and f".{name}`" not in text and f".{name}[i]`" not in text
    ] == []
