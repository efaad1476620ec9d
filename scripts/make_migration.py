"""The page migration.md of the documentation site: what the keys of other systems are here.

RLinf's are from the table of `embodrl import rlinf`. scripts/docs_hooks.py adds it to the site; python
scripts/make_migration.py prints it.
"""

from __future__ import annotations

import re
import sys

from embodrl.config.check import schema_keys, shipped_schemas
from embodrl.config.foreign_keys import FOREIGN_KEYS
from embodrl.config.rlinf import RLINF_KEYS, RlinfKey

INTRODUCTION = """\
# Coming from another system

<!-- Made by scripts/make_migration.py: change that, or rlinf.py and foreign_keys.py in embodrl/config, instead. -->

What settings of other systems are called here. `embodrl config validate` answers many of these names with the key here
when they are typed; [configuration](configuration.md) has all keys. Equal names do not make equal runs: each system
has its own optimizer, its own order of episodes and its own defaults.

## RLinf

```bash
embodrl import rlinf examples/embodiment/config/NAME.yaml --out mine.yaml
embodrl config validate --config mine.yaml
```

The recipe is read as plain YAML together with the files of `env/`, `model/` and the other folders beside it; no code
runs, and an interpolation that leads out of the recipe is reported. Each key is reported as mapped, equal to our
default, without meaning here, or unsupported, with the nearest key. `*` stands for a part of a key, `**` for the rest.
"""
KINDS = {
    "mapped": "Keys that become one here",
    "meaningless": "Keys that nothing here asks for",
    "unsupported": "Keys without a counterpart",
    "unread": "Keys that RLinf's embodied training does not read",
}


def code(text: str) -> str:
    """Return names, which commas separate, as code."""
    return ", ".join(f"`{part}`" for part in re.split(r", ", text)) if text else ""


def cell(text: str) -> str:
    """Return a text that does not end the cell of a table."""
    return text.replace("|", "\\|")


def row(entry: RlinfKey) -> str:
    """Return a line of RLinf's tables."""
    return f"| `{cell(entry.pattern)}` | {code(entry.ours)} | {cell(entry.note)} |"


def page() -> str:
    """Return the page."""
    lines = [INTRODUCTION]
    for kind, title in KINDS.items():
        lines += [f"### {title}", "", "| RLinf | here, or nearest | remark |", "|---|---|---|"]
        lines += [*(row(entry) for entry in RLINF_KEYS if entry.kind == kind), ""]
    for system, keys in FOREIGN_KEYS.items():
        lines += [f"## {system}", "", f"| {system} | here | remark |", "|---|---|---|"]
        lines += [f"| {code(theirs)} | {code(ours)} | {cell(remark)} |" for theirs, (ours, remark) in keys.items()]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def unknown_keys() -> set[str]:
    """Return keys of the tables that are not there."""
    known = {key for schema in shipped_schemas() for key in schema_keys(schema)}
    named = [entry.ours for entry in RLINF_KEYS] + [ours for keys in FOREIGN_KEYS.values() for ours, _ in keys.values()]
    return {ours for ours in named if ours} - known


if __name__ == "__main__":
    sys.stdout.write(page())
