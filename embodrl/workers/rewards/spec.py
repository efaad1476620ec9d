"""The verbs `embodrl reward` and `embodrl label`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

REWARD = VerbSpec(
    name="reward",
    target="embodrl.cli.reward:app",
    description="Rewards learned from recorded episodes.",
)
LABEL = VerbSpec(
    name="label",
    target="embodrl.cli.label:label",
    description="Label a dataset for algorithm=recap: values, advantages, and positive frames.",
)
