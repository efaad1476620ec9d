"""The page capabilities.md of the documentation site: what of other systems works here.

Its rows are in capabilities.yaml. scripts/docs_hooks.py adds the page to the site; python scripts/make_capabilities.py
prints it.

Each command is checked as its verb checks it before anything starts; the tests that are named run it.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from embodrl.cli.serve import arguments_of
from embodrl.config.schema.readers import Verb
from embodrl.errors import ConfigError
from embodrl.pipelines.load import load_config
from embodrl.tools.sweep.combinations import expand_sweep
from embodrl.tools.sweep.launcher import read_launcher

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "scripts" / "capabilities.yaml"
INTRODUCTION = """\
# Capabilities beside other systems

<!-- Made by scripts/make_capabilities.py from scripts/capabilities.yaml: change these instead. -->

What RLinf, AReaL, verl (with verl-vla), siiRL, slime and Prime-RL offer, and what of it embodrl has. The rows cover the
capabilities of all six systems that an audit of 28 November 2026 looked at, and some more; those of *Hybrid* and *Card*
come from embodrl's own design. `before` is what the audit found, empty where it did not look.

`accepted` and `refused` are what the configuration check of the command says (`refused` with its [code](errors.md)); it
was not run for this page: the tests run it, on CPUs. *works*: nothing is known to be missing; where no command is
given, the tests show it. *untried*: the code is there and tested on CPUs, but not on the hardware, or with the
weights, that the last column names; *partly*: the last column says what is missing.
*missing*: the command is refused, so that nothing is ignored in silence, or there is nothing to show.
"""
STATES = ("works", "untried", "partly", "missing")
CHECKED: dict[str, Verb | None] = {
    "plan train": "plan",
    "store train": "store",
    "store collect": "store",
    "sweep": "train",
    "pipeline show": None,
}
"""Commands that are checked as another verb, or as none; all others are checked as themselves."""


@dataclass(frozen=True)
class Row:
    """A capability.

    Attributes:
        name: what it is.
        before: works, partly, missing, or absent where the audit did not look.
        systems: which have it.
        command: one that asks for it, without ``embodrl``; "" where tests say more.
        tests: ``path::name`` below tests/, of those that run it.
        remains: what is missing, and why.
        untried: hardware, weights or machines that it is for and that were not at hand.
    """

    name: str
    before: str
    systems: str = ""
    command: str = ""
    tests: tuple[str, ...] = ()
    remains: str = ""
    untried: str = ""


def read_rows(path: Path) -> dict[str, list[Row]]:
    """Return the rows of a file by section."""
    sections: dict[str, list[dict[str, Any]]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {
        title: [Row(**row | {"tests": tuple(row.get("tests", ()))}) for row in rows] for title, rows in sections.items()
    }


SECTIONS = read_rows(ROWS)


def outcome(command: str) -> str:
    """Return what the check of a command says: ``accepted``, or ``refused`` with the codes; "" of no command."""
    if not command:
        return ""
    words = shlex.split(command)
    settings = [word for word in words if "=" in word]
    named = " ".join(word for word in words if "=" not in word)
    if named == "serve":
        settings = arguments_of(settings)[1]
    runs = (
        [run.overrides for run in expand_sweep(read_launcher(settings).overrides)] if named == "sweep" else [settings]
    )
    try:
        for overrides in runs:
            load_config(list(overrides), verb=CHECKED.get(named, named))
    except ConfigError as error:
        return f"refused: {', '.join(sorted({f'`{problem.code}`' for problem in error.problems}))}"
    return "accepted"


def missing_tests() -> list[str]:
    """Return the tests of the rows that are not there."""
    named = [test.partition("::") for rows in SECTIONS.values() for row in rows for test in row.tests]
    return [
        f"tests/{path}::{name}"
        for path, _, name in named
        if not (ROOT / "tests" / path).is_file()
        or not re.search(rf"^def {name}\b", (ROOT / "tests" / path).read_text(encoding="utf-8"), re.MULTILINE)
    ]


def state_of(row: Row, found: str) -> str:
    """Return the state of a row, given what the check of its command says."""
    nothing = not row.command and not row.tests
    if nothing or found.startswith("refused"):
        return "missing"
    return "partly" if row.remains else "untried" if row.untried else "works"


def table(rows: list[Row], states: dict[str, str]) -> list[str]:
    """Return the rows of a section, and enter their states."""
    head = ("capability", "of", "command", "check", "tests", "before", "now", "what remains")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        found = outcome(row.command)
        states[row.name] = state_of(row, found)
        tests = "<br>".join(f"`{test}`" for test in row.tests)
        command = f"`embodrl {row.command}`" if row.command else ""
        before = "" if row.before == "absent" else row.before
        remains = "; ".join(filter(None, (row.remains, row.untried and f"not tried: {row.untried}")))
        cells = (row.name, row.systems, command, found, tests, before, states[row.name], remains)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def change(rows: list[Row], states: dict[str, str]) -> str:
    """Return a table of the numbers of rows in each state in the audit, and now, without those that it did not see."""
    seen = [row for row in rows if row.before != "absent"]
    lines = [f"| | {' | '.join(STATES)} |", "|---" * (len(STATES) + 1) + "|"]
    counts = {
        "28 November 2026": Counter(row.before for row in seen),
        "now": Counter(states[row.name] for row in seen),
    }
    for title, counted in counts.items():
        lines.append(f"| {title} | {' | '.join(str(counted[state]) for state in STATES)} |")
    text = f"Of the {len(seen)} rows that the audit looked at, among {len(rows)}:"
    return f"{text}\n\n" + "\n".join(lines) + "\n"


def page() -> str:
    """Return the page."""
    states: dict[str, str] = {}
    tables = {title: "\n".join(table(rows, states)) for title, rows in SECTIONS.items()}
    parts = [INTRODUCTION, change([row for rows in SECTIONS.values() for row in rows], states)]
    for title, rows in tables.items():
        parts += [f"## {title}\n", rows + "\n"]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
