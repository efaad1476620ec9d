"""The verbs of `embodrl data`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="data",
    target="embodrl.tools.data_check.cli:app",
    description="Inspect demonstrations: common causes of failed fine-tunes, and statistics.",
)
