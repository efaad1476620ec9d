"""The verb `embodrl list`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="list",
    target="embodrl.tools.listing.cli:list_names",
    description="List models, environments, algorithms, pipelines, axes and protocols of evaluations, presets"
    " and recipes.",
)
