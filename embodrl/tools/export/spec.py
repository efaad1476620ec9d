"""The verb `embodrl export`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="export",
    target="embodrl.tools.export.cli:export",
    description="Write the policy of a checkpoint in its public layout.",
)
