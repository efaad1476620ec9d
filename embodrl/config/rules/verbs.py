"""Settings that a verb does not read: its rules ignore them, and the command line can't set them."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.nodes import walk
from embodrl.config.rules.base import Context
from embodrl.config.schema import Config
from embodrl.config.schema.readers import Verb, readers, reads
from embodrl.rule_set import Finding

COMMANDS = {"record": "collect policy=PATH"}
"""Command of a verb, if it differs from the verb's name."""


def concerns(verb: Verb | None, finding: Finding, schema: type[Config]) -> bool:
    """Return whether a verb reads all keys of a finding."""
    return all(reads(verb, key, schema) for key in (finding.key, *finding.others))


def settings_of_other_verbs(verb: Verb, context: Context, schema: type[Config]) -> Iterator[Finding]:
    """Yield command-line settings that a verb does not read; files may be shared by verbs."""
    for key, node in walk(context.tree):
        if node.origin.kind == "argument" and not node.children and not reads(verb, key, schema):
            message = f"is not a setting of `embodrl {COMMANDS.get(verb, verb)}`"
            others = ", ".join(f"`embodrl {COMMANDS.get(name, name)}`" for name in sorted(readers(key, schema) or ()))
            hint = f"leave it out, or put it in a file shared by verbs (--config); read by {others}"
            yield Finding(key, message, hint, code="setting-of-another-verb")
