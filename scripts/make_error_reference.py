"""The page errors.md of the documentation site: every error code with its cause and cure, from the sources.

scripts/docs_hooks.py adds it to the site; python scripts/make_error_reference.py prints it.
"""

from __future__ import annotations

import re
import sys

from embodrl.tools.explain.codes import CodeEntry, entries

INTRODUCTION = """\
# Error codes

<!-- Made by scripts/make_error_reference.py from the sources: change those instead. -->

Every error, problem of a configuration and note ends with a stable `code`, for searching and for scripts. Wording may
change, codes do not; `embodrl explain CODE` prints an entry of this page. In messages below, `…` stands for what
depends on the case. A configuration with problems exits with code 2, any other error with 1; `embodrl --help` lists
all exit codes.
"""


def cell(text: str) -> str:
    """Return text that is safe in a table."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|").replace("<", "&lt;")


def table(rows: list[CodeEntry]) -> list[str]:
    """Return a table of codes."""
    lines = ["| code | cause | cure |", "|---|---|---|"]
    for row in sorted(rows, key=lambda entry: entry.code):
        lines.append(f"| `{row.code}` | {cell('; '.join(row.causes))} | {cell('; '.join(row.cures))} |")
    return [*lines, ""]


SECTIONS = (
    ("Errors by class", "An error without a code of its own has that of its class.", "class"),
    ("Errors", "Raised where an operation cannot continue.", "error"),
    ("Problems of a configuration, an argument or a pipeline", "Found when it is read.", "problem"),
    ("Rules between settings", "A configuration that breaks one is refused; all problems come in one report.", "rule"),
    ("Notes", "What is allowed but without effect or odd; printed, and nothing is stopped.", "note"),
)


def page() -> str:
    """Return the whole page."""
    found = entries()
    lines = [INTRODUCTION]
    for title, text, kind in SECTIONS:
        lines += [f"## {title}", "", text, "", *table([entry for entry in found if entry.kind == kind])]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
