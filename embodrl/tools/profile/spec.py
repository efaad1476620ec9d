"""The verb `embodrl profile`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="profile",
    target="embodrl.tools.profile.cli:profile",
    description="Train some iterations, or look at a run in progress, and show how every process spends its time.",
)
