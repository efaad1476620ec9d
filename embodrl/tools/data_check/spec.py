"""The verbs of `embodrl data`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="data",
    target="embodrl.tools.data_check.cli:app",
    description="Look at demonstrations: what makes fine-tunes fail, and statistics.",
)
