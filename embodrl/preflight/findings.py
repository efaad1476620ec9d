"""Results of machine checks, and their display."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

Status = Literal["ok", "warning", "error"]
STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True)
class MachineFinding:
    """One result of a check; the status ``error`` means that training can't run."""

    name: str
    status: Status
    detail: str
    hint: str = ""


def can_train(findings: list[MachineFinding]) -> bool:
    """Whether no finding is an error."""
    return all(finding.status != "error" for finding in findings)


def as_json(findings: list[MachineFinding], presets: dict[str, str]) -> str:
    """Return the findings as a JSON object; ``presets`` maps a preset to its problem, "" for none."""
    report = {
        "can_train": can_train(findings),
        "findings": [asdict(finding) for finding in findings],
        "presets": presets,
    }
    return json.dumps(report, indent=2)


def _by_group(presets: list[str], with_partners: bool) -> list[str]:
    """Return ``env: toy, ...`` and ``model: mlp, ...`` for ``env=toy`` or, with a partner, ``env=toy model=mlp``."""
    groups: dict[str, list[str]] = {}
    for preset in presets:
        chosen, _, partners = preset.partition(" ")
        group, _, name = chosen.partition("=")
        groups.setdefault(group, []).append(f"{name} (with {partners})" if partners and with_partners else name)
    return [f"{group}: {', '.join(names)}" for group, names in groups.items()]


def _show_presets(presets: dict[str, str], console: Console) -> None:
    """Print the presets that run, then the others by missing requirement, each by group."""
    by_lack: dict[str, list[str]] = {}
    for preset, lack in presets.items():
        by_lack.setdefault(lack, []).append(preset)
    if running := by_lack.pop("", []):
        console.print(Text("presets that run on this machine:", "green"))
        for line in _by_group(running, with_partners=True):
            console.print(Text(f"  {line}"))
    if by_lack:
        console.print(Text("presets that don't:", "yellow"))
    for lack, names in by_lack.items():
        console.print(Text(f"  {'; '.join(_by_group(names, with_partners=False))}: {lack}"))


def show(findings: list[MachineFinding], presets: dict[str, str], console: Console) -> None:
    """Print the findings as a table, then the presets."""
    table = Table(title="embodrl doctor", show_lines=False)
    for column in ("", "check", "found", "hint"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        style = STYLES[finding.status]
        # The text must not be parsed as markup: an extra in brackets would vanish.
        table.add_row(Text(finding.status, style), *map(Text, (finding.name, finding.detail, finding.hint)))
    console.print(table)
    if presets:
        _show_presets(presets, console)
    verdict = "[green]training can run[/]" if can_train(findings) else "[bold red]training can't run: see the errors[/]"
    console.print(verdict)
