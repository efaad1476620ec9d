"""The verb `embodrl explain`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="explain",
    target="embodrl.tools.explain.cli:explain",
    description="Explain settings, sections and error codes.",
)
