"""The verb `embodrl compare`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="compare",
    target="embodrl.tools.compare.cli:compare",
    description="Compare runs: success, time, environment steps, and the settings that differ; or evaluations,"
    " pair by pair.",
)
