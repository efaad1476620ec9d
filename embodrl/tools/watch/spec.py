"""The verb `embodrl watch`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="watch",
    target="embodrl.tools.watch.cli:watch",
    description="Show runs on a local web page: curves, success per task, videos, differing settings;"
    " refreshed while they train.",
)
