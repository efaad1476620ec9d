"""The verbs of `embodrl pipeline`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="pipeline",
    target="embodrl.tools.pipeline_show.cli:app",
    description="Inspect the graph of a training iteration.",
)
