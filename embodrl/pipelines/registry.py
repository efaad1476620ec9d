"""The built-in pipelines. Imports no torch."""

from __future__ import annotations

PIPELINES = {
    name: f"embodrl.pipelines.builtin:{name.upper()}" for name in ("on_policy", "off_policy", "dagger", "offline")
}
