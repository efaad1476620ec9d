"""The verb `embodrl run`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(name="run", target="embodrl.extras.recipe.cli:run")
