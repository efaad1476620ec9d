"""The verb `embodrl import`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="import",
    target="embodrl.tools.importers.cli:import_recipe",
    description="Turn a recipe of another system into a configuration, and say what becomes of each of its keys.",
)
