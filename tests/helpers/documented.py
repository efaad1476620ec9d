"""The `embodrl` commands in README.md and docs/."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
_FENCE = re.compile(r"^ *```(\w*)")
LANGUAGES = ("bash", "console", "sh", "")


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        page: name of the file.
        line: where it begins.
        environment: variables that stand before it.
        arguments: after ``embodrl``.
    """

    page: str
    line: int
    environment: dict[str, str]
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def commands(page: Path) -> Iterator[Command]:
    """Yield the commands in the code blocks of a page."""
    language: str | None = None
    start, text = 0, ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if fence := _FENCE.match(line):
            language = fence[1] if language is None else None
        elif language in LANGUAGES:
            start, text = (start, text) if text else (number, "")
            text += line.strip().removeprefix("$ ")
            if text.endswith("\\"):
                text = text[:-1]
                continue
            if "embodrl" in text and (found := _command(page.name, start, text)):
                yield found
            text = ""


def _command(page: str, line: int, text: str) -> Command | None:
    environment: dict[str, str] = {}
    try:
        words = shlex.split(text, comments=True)
    except ValueError:  # prose or output with an apostrophe
        return None
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    return Command(page, line, environment, tuple(words[1:])) if words[:1] == ["embodrl"] else None
