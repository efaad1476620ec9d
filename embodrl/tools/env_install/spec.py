"""The verb `embodrl env`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="env",
    target="embodrl.tools.env_install.cli:app",
    description="Manage isolated Python environments of simulators; serve simulators to runs on other machines.",
)
