"""The verbs of `embodrl model`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="model",
    target="embodrl.tools.model_tools.cli:app",
    description="Create model checkpoints, and check your own models.",
)
