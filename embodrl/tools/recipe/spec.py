"""The verb `embodrl run`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="run",
    target="embodrl.tools.recipe.cli:run",
    description="Run a recipe: collect demonstrations, fine-tune on them, train with RL. Run again, it resumes.",
)
