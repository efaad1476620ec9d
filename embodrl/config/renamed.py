"""Names of earlier versions: still accepted, with a note that names the new one."""

from __future__ import annotations

from embodrl.config.nodes import Node, lookup
from embodrl.errors import ConfigProblem

VALUES = {("rollout.backend", "huggingface"): "native"}
"""(key, former value) -> present value."""
PRESETS = {("rollout", "huggingface"): "native"}
"""(preset group, former name) -> present name."""


def present_preset(group: str, name: object, origin: str, notes: list[ConfigProblem]) -> object:
    """Return the present name of a preset; a former one is noted."""
    present = PRESETS.get((group, name)) if isinstance(name, str) else None
    if present is None:
        return name
    notes.append(_note(group, str(name), present, origin))
    return present


def replace_former_values(tree: Node) -> list[ConfigProblem]:
    """Replace former values in a tree; return a note for each."""
    notes: list[ConfigProblem] = []
    for (key, former), present in VALUES.items():
        node = lookup(tree, key)
        if node is not None and node.value == former:
            node.value = present
            notes.append(_note(key, former, present, str(node.origin)))
    return notes


def _note(key: str, former: str, present: str, origin: str) -> ConfigProblem:
    message = f"'{former}' is now called '{present}'"
    return ConfigProblem(key, message, origin, hint=f"write {key}={present}", code="renamed")
