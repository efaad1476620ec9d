"""The verb `embodrl bench`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="bench",
    target="embodrl.tools.bench.cli:bench",
    description="Measure this machine against a baseline.",
)
