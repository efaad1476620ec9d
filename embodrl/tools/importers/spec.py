"""The verb `embodrl import`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="import",
    target="embodrl.tools.importers.cli:import_recipe",
    description="Convert a recipe of another system to a configuration, and report the outcome of each of its keys.",
)
