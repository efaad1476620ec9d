"""The files and commands of docs/tutorial.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def script() -> str:
    """Return the block that uses embodrl from Python."""
    [found] = [block for block in blocks("python") if "embodrl.train(" in block]
    return found


def write_files(directory: Path) -> None:
    """Write the modules and the configuration of the tutorial."""
    environment, *parts = [block for block in blocks("python") if block != script()]
    [config] = blocks("yaml")
    files = {"dock.py": environment, "parts.py": "\n\n".join(parts), "config.yaml": config}
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")


def commands() -> list[list[str]]:
    """Return the arguments of every `embodrl` command, in order."""
    lines = "\n".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("embodrl ")]
