"""The verb `embodrl parity`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="parity",
    target="embodrl.tools.parity.cli:parity",
    description="Compare a model family with recorded outputs of its reference implementation.",
)
