"""The verbs `embodrl reward` and `embodrl label`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

REWARD = VerbSpec(name="reward", target="embodrl.extras.rewards.cli:app")
LABEL = VerbSpec(name="label", target="embodrl.extras.rewards.label_cli:label")
