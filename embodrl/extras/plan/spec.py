"""The verbs `embodrl plan`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(name="plan", target="embodrl.extras.plan.cli:app", reads_as="train")
