"""The verbs `embodrl plan`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="plan",
    target="embodrl.tools.plan.cli:app",
    description="Plan a run without starting it.",
    reads_as="train",
)
