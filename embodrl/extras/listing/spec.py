"""The verb `embodrl list`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(name="list", target="embodrl.extras.listing.cli:list_names")
