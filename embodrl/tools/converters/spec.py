"""The verb `embodrl convert`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="convert",
    target="embodrl.tools.converters.cli:convert",
    description="Convert demonstrations from another layout for `embodrl sft`.",
)
