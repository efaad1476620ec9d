"""The verb `embodrl import`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(name="import", target="embodrl.extras.importers.cli:import_recipe")
