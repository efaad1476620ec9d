"""The verb `embodrl compare`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(name="compare", target="embodrl.extras.compare.cli:compare")
