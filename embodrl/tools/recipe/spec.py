"""The verb `embodrl run`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="run",
    target="embodrl.tools.recipe.cli:run",
    description="Do a recipe: collect demonstrations, fine-tune on them, train by RL. Given again, it continues.",
)
