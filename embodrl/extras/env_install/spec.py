"""The verb `embodrl env`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(name="env", target="embodrl.extras.env_install.cli:app")
